from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ops.chaos.frames import FrameSplitter

ACK = b"PUB $JS.ACK.HR_r.rewards.1.7.7.99.0 4\r\n+ACK\r\n"
DELIVERY = b"MSG hr.r.a.b.k 3 $JS.ACK.HR_r.rewards.1.7.7.99.0 5\r\nhello\r\n"
HEADED = b"HMSG hr.r.a.b.k 3 $JS.ACK.HR_r.rewards.1.7.7.99.0 12 14\r\nNATS/1.0\r\n\r\nhi\r\n"
READ = b"MSG hr.r.a.b.k 3 $JS.ACK.HR_r.r0123456789abcdef.1.7.7.99.0 2\r\n\r\n\r\n"
OTHERS = [
    b"INFO {}\r\n",
    b"PING\r\n",
    b"+OK\r\n",
    b"SUB x 1\r\n",
    b"PUB a.b _INBOX.1 0\r\n\r\n",
    b"HPUB a 12 13\r\nNATS/1.0\r\n\r\nx\r\n",
]
ALL = [ACK, DELIVERY, HEADED, READ, *OTHERS]


@given(st.lists(st.sampled_from(ALL), max_size=12), st.lists(st.integers(0, 60), max_size=20))
def test_frames_come_out_whole_whatever_the_pieces_they_arrive_in(sent: list[bytes], cuts: list[int]) -> None:
    splitter, stream, found = FrameSplitter(), b"".join(sent), []
    for cut in [*cuts, len(stream)]:
        found += splitter.feed(stream[:cut])
        stream = stream[cut:]
    found += splitter.feed(stream)
    assert [frame.raw for frame in found] == sent


def test_only_words_about_deliveries_are_acknowledgements() -> None:
    frames = FrameSplitter().feed(b"".join(ALL))
    assert [frame.raw for frame in frames if frame.is_ack] == [ACK]


def test_only_what_a_durable_hands_out_is_a_delivery() -> None:
    frames = FrameSplitter().feed(b"".join(ALL))
    assert [(frame.raw, frame.durable) for frame in frames if frame.durable] == [
        (DELIVERY, b"rewards"),
        (HEADED, b"rewards"),
    ]
