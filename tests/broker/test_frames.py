"""However a connection's bytes are cut by the network, the same messages and control lines come out, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.jetstream.frames import LARGE_BYTES, ROOM_BYTES, SHOWN_BYTES, Frames

Message = tuple[int, bytes, bytes, bytes, bytes | None]


class _Heard:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.datas: list[bytes | memoryview] = []
        self.lines: list[bytes] = []
        self.frames = Frames(self._message, self.lines.append)

    def _message(self, sid: int, subject: bytes, reply: bytes, data: bytes | memoryview, headers: bytes | None) -> None:
        self.messages.append((sid, subject, reply, bytes(data), headers))
        self.datas.append(data)

    def hear(self, stream: bytes, sizes: list[int]) -> None:
        """As a socket does: at most as much as there is space for, in pieces of these sizes, again and again."""
        start, turn = 0, 0
        while start < len(stream):
            space = self.frames.space()
            assert len(space) > 0
            piece = stream[start : start + min(len(space), sizes[turn % len(sizes)])]
            space[: len(piece)] = piece
            self.frames.filled(len(piece))
            start, turn = start + len(piece), turn + 1


def _wire(message: Message) -> bytes:
    sid, subject, reply, data, headers = message
    middle = b"%b %d%b" % (subject, sid, b" " + reply if reply else b"")
    if headers is None:
        return b"MSG %b %d\r\n%b\r\n" % (middle, len(data), data)
    return b"HMSG %b %d %d\r\n%b%b\r\n" % (middle, len(headers), len(headers) + len(data), headers, data)


_tokens = st.sampled_from([b"a", b"hr.run.topic.key", b"_INBOX.f00.1", b"MSG", b"x" * 300])
_datas = st.one_of(
    st.binary(max_size=200),
    st.just(b"MSG a 1 3\r\nabc\r\n"),
    st.builds(
        lambda fill, size: fill * size,
        st.sampled_from([b"x", b"\r\n", b"PING\r\n"]),
        st.sampled_from([LARGE_BYTES // 6, LARGE_BYTES // 2, LARGE_BYTES, ROOM_BYTES, 3 * ROOM_BYTES + 1]),
    ),
)
_messages = st.tuples(
    st.integers(1, 10**9),
    _tokens,
    st.one_of(st.just(b""), _tokens),
    _datas,
    st.one_of(st.none(), st.just(b"NATS/1.0\r\nA: b\r\n\r\n"), st.just(b"NATS/1.0 503\r\n\r\n")),
)
_lines = st.sampled_from(
    [b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'x'\r\n", b'INFO {"a": "%b"}\r\n' % (b"b" * 5000)]
)


@given(
    st.lists(st.one_of(_messages, _lines), max_size=8),
    st.lists(st.one_of(st.integers(1, 40), st.just(4096), st.just(10**6)), min_size=1, max_size=5),
)
def test_every_way_of_cutting_gives_the_same_messages_and_lines(said, sizes):
    heard = _Heard()
    sizes = [size * 64 if sum(len(one) for one in map(_bytes, said)) > ROOM_BYTES else size for size in sizes]
    heard.hear(b"".join(map(_bytes, said)), sizes)
    assert heard.messages == [one for one in said if isinstance(one, tuple)]
    assert heard.lines == [one for one in said if isinstance(one, bytes)]


def _bytes(said: Message | bytes) -> bytes:
    return said if isinstance(said, bytes) else _wire(said)


def test_large_data_is_handed_on_where_it_was_received_and_does_not_change_afterwards():
    heard = _Heard()
    first, second = b"1" * (4 * LARGE_BYTES), b"2" * (4 * LARGE_BYTES)
    heard.hear(_wire((1, b"a", b"", first, b"NATS/1.0\r\n\r\n")) + _wire((1, b"a", b"", second, None)), [10_000])
    assert all(isinstance(data, memoryview) and data.readonly for data in heard.datas)
    assert [bytes(data) for data in heard.datas] == [first, second]


def test_small_data_is_bytes_that_the_next_read_can_not_change():
    heard = _Heard()
    heard.hear(b"MSG a 1 3\r\nabc\r\n", [100])
    heard.hear(b"MSG a 1 3\r\nxyz\r\n", [100])
    assert heard.datas == [b"abc", b"xyz"]
    assert all(isinstance(data, bytes) for data in heard.datas)


@pytest.mark.parametrize(
    "line",
    [b"MSG a\r\n", b"MSG a b 3\r\n", b"MSG a 1 r s 3\r\n", b"HMSG a 1 9 3\r\n", b"HMSG a 1 3\r\n", b"MSG a 1 -3\r\n", b"MAP a 1 3\r\n"],
)  # fmt: skip
def test_a_line_that_can_not_be_understood_is_told_once_and_nothing_comes_after_it(line):
    heard = _Heard()
    heard.hear(b"PING\r\n" + line + b"MSG a 1 3\r\nabc\r\nPING\r\n", [7])
    assert heard.lines == [b"PING\r\n", line]
    assert heard.messages == []


def test_of_a_long_line_that_can_not_be_understood_the_beginning_is_told():
    heard = _Heard()
    heard.hear(b"MSG " + b"a" * 9000 + b" b 3\r\nabc\r\n", [777])
    assert heard.lines == [b"MSG " + b"a" * (SHOWN_BYTES - 4) + b"\r\n"]


def test_a_line_without_an_end_is_told_instead_of_waited_for():
    heard = _Heard()
    heard.hear(b"MSG " + b"a" * (2 * ROOM_BYTES), [5000])
    assert len(heard.lines) == 1
    assert len(heard.frames.space()) > 0
