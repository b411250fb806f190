import anyio
import msgspec

from broker.memory import MemoryBroker, MemoryServer
from broker.recording import Recorder, RecorderSettings, Recording, RecordingWriter, new_header, parse_rule
from schemas import arrays
from schemas.messages.sampling import GroupIssued, StreamListed, StreamRow
from schemas.messages.training import Manifest, Part, PartedFile, StepAssembled, WeightParts, WeightsPublished
from schemas.payload import run_ref
from schemas.topics import GROUP_ISSUED, STEP_ASSEMBLED, STREAM_LISTED, WEIGHTS_PUBLISHED


def writer(path, rules=()):
    return RecordingWriter.open(path, new_header("r", headrace_version="0", redactions=list(rules), weights="first"))


async def issue(broker, ordinal, prompt=None):
    message = GroupIssued(group=f"g{ordinal:07d}", ordinal=ordinal, stream="s", data_id="d", num_slots=1, prompt=prompt)
    await broker.publish(GROUP_ISSUED.subject("r", message), GROUP_ISSUED.encode(message))


def manifest(payloads):
    one = arrays.int32([0] * len(payloads))
    some = arrays.float64([0.0] * len(payloads))
    return Manifest(
        run="r", step=1, algorithm="grpo", aggregation="token_mean", temperature=1.0, groups=["g0000000"], streams=["s"],
        row_ids=[str(n) for n in range(len(payloads))], row_group=one, row_slot=one, row_stream=one, reward=some,
        advantage=some, loss_weight=some, mini_batch=one, num_tokens=one, num_loss_tokens=one, min_version=one,
        max_version=one, payload_ids=[ref.id for ref in payloads],
        payload_sizes=arrays.int64([ref.size_bytes for ref in payloads]), payload_store="run",
    )  # fmt: skip


async def assemble(broker, payloads):
    ref = await broker.payloads.put(msgspec.msgpack.encode(manifest(payloads)))
    step = StepAssembled(
        step=1,
        manifest=ref,
        groups=["g0000000"],
        num_rows=1,
        num_tokens=1,
        num_mini_batches=1,
        min_version=0,
        mean_reward=0.0,
    )
    await broker.publish(STEP_ASSEMBLED.subject("r", step), STEP_ASSEMBLED.encode(step))


async def test_the_payloads_that_messages_and_manifests_name_are_recorded(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    prompt, row, listed = [await broker.payloads.put(data) for data in (b"prompt", b"row tokens", b"a listed prompt")]
    rows = await broker.payloads.put(msgspec.msgpack.encode([StreamRow(data_id="d", payload=listed)]))
    stream = StreamListed(stream="s", rows=rows, num_rows=1, weight=1.0)
    await broker.publish(STREAM_LISTED.subject("r", stream), STREAM_LISTED.encode(stream))
    await issue(broker, 0, prompt)
    await assemble(broker, [row])
    figures = await Recorder(broker, writer(tmp_path / "a.hrrec")).run(follow=False)
    assert (figures.messages, figures.missing) == (3, 0)
    with Recording(tmp_path / "a.hrrec") as recording:
        assert bytes(recording.payload(prompt)) == b"prompt"
        assert bytes(recording.payload(row)) == b"row tokens"
        assert bytes(recording.payload(listed)) == b"a listed prompt"


async def test_a_payload_that_is_gone_is_named_and_the_message_kept(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    await issue(broker, 0, run_ref(b"collected long ago"))
    figures = await Recorder(broker, writer(tmp_path / "a.hrrec")).run(follow=False)
    assert (figures.messages, figures.missing) == (1, 1)
    with Recording(tmp_path / "a.hrrec") as recording:
        assert recording.missing_payloads() == [run_ref(b"collected long ago").id]
        assert recording.num_messages == 1


async def test_weight_files_are_kept_of_the_first_version_only(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    for version in (0, 1):
        manifest_ref = await broker.payloads.put(b"m%d" % version)
        file = await broker.payloads.put(b"weights %d" % version)
        message = WeightsPublished(version=version, generation=1, digest="d", manifest=manifest_ref, file=file)
        await broker.publish(WEIGHTS_PUBLISHED.subject("r", message), WEIGHTS_PUBLISHED.encode(message))
    await Recorder(broker, writer(tmp_path / "a.hrrec")).run(follow=False)
    with Recording(tmp_path / "a.hrrec") as recording:
        assert recording.num_payloads == 3
        assert bytes(recording.payload(run_ref(b"weights 0"))) == b"weights 0"


async def test_the_pieces_of_weights_are_kept_with_their_index_or_not_at_all(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    for version in (0, 1):
        piece = await broker.payloads.put(b"piece %d" % version)
        index = WeightParts(files=[PartedFile("f", piece.size_bytes, [Part(0, piece.size_bytes, piece.id)])])
        parts = await broker.payloads.put(msgspec.msgpack.encode(index))
        manifest_ref = await broker.payloads.put(b"m%d" % version)
        message = WeightsPublished(version=version, generation=1, digest="d", manifest=manifest_ref, parts=parts)
        await broker.publish(WEIGHTS_PUBLISHED.subject("r", message), WEIGHTS_PUBLISHED.encode(message))
    for keep, expected in (("none", 2), ("first", 4), ("all", 6)):
        settings = RecorderSettings(weights=keep)
        figures = await Recorder(broker, writer(tmp_path / f"{keep}.hrrec"), settings).run(follow=False)
        with Recording(tmp_path / f"{keep}.hrrec") as recording:
            assert (recording.num_payloads, figures.missing) == (expected, 0)


async def test_a_recorder_follows_and_keeps_what_stood_when_it_was_stopped(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    recorder = Recorder(broker, writer(tmp_path / "a.hrrec"), RecorderSettings(flush_after_s=0.01))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.run)
        for ordinal in range(300):
            await issue(broker, ordinal)
        recorder.stop()
    with Recording(tmp_path / "a.hrrec") as recording:
        assert [record.sequence for record in recording.records()] == list(range(1, 301))


async def test_a_second_recorder_goes_on_where_the_first_was_killed(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    for ordinal in range(20):
        await issue(broker, ordinal)
    first = writer(tmp_path / "a.hrrec")
    async with broker.read(["hr.r.>"], follow=False) as stream:
        first.write_messages([record async for record in stream][:12])
    del first
    await Recorder(broker, writer(tmp_path / "a.hrrec")).run(follow=False)
    with Recording(tmp_path / "a.hrrec") as recording:
        assert [record.sequence for record in recording.records()] == list(range(1, 21))


async def test_what_a_rule_drops_is_in_no_payload_of_the_file(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    await issue(broker, 0, await broker.payloads.put(b"a secret prompt of some length"))
    rule = "group.issued.prompt=drop"
    recorder = Recorder(broker, writer(tmp_path / "a.hrrec", [rule]), rules=[parse_rule(rule)])
    await recorder.run(follow=False)
    with Recording(tmp_path / "a.hrrec") as recording:
        (record,) = recording.records()
        assert GROUP_ISSUED.decode(record.data).prompt.size_bytes == 0
        assert recording.num_payloads == 0
        assert recording.header.redactions == [rule]


async def test_a_message_that_can_not_be_decoded_is_recorded_as_it_is(tmp_path):
    broker = MemoryBroker(MemoryServer(), "r")
    await broker.publish("hr.r.group.issued.g0000000", b"\xc1 store run")
    await broker.publish("hr.r.some.future.topic", b"x")
    await Recorder(broker, writer(tmp_path / "a.hrrec")).run(follow=False)
    with Recording(tmp_path / "a.hrrec") as recording:
        assert [record.data for record in recording.records()] == [b"\xc1 store run", b"x"]
