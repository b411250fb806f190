"""A run on an in-memory broker: real messages, real reward mapping, the real assembly fold and a stand-in trainer, with
agents that are made up. With mishaps, slots are retried, rejected, late, missing or given up.
"""

import random
import tempfile

import msgspec

from broker.memory import MemoryBroker, MemoryServer
from broker.recording import RecorderSettings
from ops.config import assembly_settings, decode_config
from ops.logtools.record import record_run
from ops.logtools.stage_diffs import reward_settings
from pipeline.errors import RefusedError
from pipeline.fold import FoldRunner
from pipeline.log import RunLog, RunPayloads
from pipeline.metrics import Metrics
from pipeline.retries import retries_of
from pipeline.runner import describe
from pipeline.sessions import SessionReader
from schemas import arrays
from schemas.messages import rollout as r
from schemas.messages import sampling as s
from schemas.messages import training as t
from schemas.topics import EPISODE_ENDED, EPISODE_REQUESTED
from stages.assembly.fold import AssemblyFold
from stages.rewards.map_rewards import gave_up, map_rewards
from stages.training.loop import row_arrays
from stages.training.standin import StandInBackend


def config_tree(**assembly):
    return {
        "run": {"id": "r"},
        "streams": [
            {"name": "math", "stream_id": "s1", "reward_threshold": 0.5},
            {"name": "words", "stream_id": "s2", "sampling_weight": 2.0},
        ],
        "sampling": {"groups_per_step": 3, "slots_per_group": 4, "max_staleness": 8, "max_concurrent_groups": 16},
        "assembly": {"filter_zero_spread": True, **assembly},
        "training": {"backend": "standin"},
    }


class SyntheticRun:
    def __init__(self, *, seed, num_groups=12, mishaps=True, broker=None):
        self.random = random.Random(seed)
        self.num_groups = num_groups
        self.mishaps = mishaps
        self.server = MemoryServer()
        self.broker = broker or MemoryBroker(self.server, "r")
        self.config = decode_config(config_tree())
        self.log = RunLog(self.broker)
        self.payloads = RunPayloads(self.broker)
        self.fates = {}
        """(group, slot) → what the script made of it."""
        self._fold = FoldRunner(AssemblyFold(assembly_settings(self.config)), self.broker, Metrics("r", "assembly"))
        self._tick = 0
        self._trained = 0
        self._work = tempfile.TemporaryDirectory()
        self._trainer = StandInBackend(self._work.name)
        self.digests = {}

    async def build(self):
        await self.log.publish(
            s.RunStarted(
                ordinal=0, config_json=msgspec.json.encode(self.config), config_digest="d", headrace_version="0.1.0"
            )
        )
        await self._list_streams()
        active = []
        for ordinal in range(self.num_groups):
            active += [self._slot(*issued) for issued in await self._issue(ordinal)]
            while len(active) > 12:
                await self._advance(active)
        while active:
            await self._advance(active)
        for _ in range(6):
            await self._time_passes()
        return self

    async def _advance(self, active):
        slot = self.random.choice(active)
        try:
            await anext(slot)
        except StopAsyncIteration:
            active.remove(slot)
        if self.random.random() < 0.02:
            await self._time_passes()
        await self._pump()

    async def _list_streams(self):
        for stream in ("math", "words"):
            prompt = await self.payloads.put(b'"How much is 1 + 1?" ' * 20)
            rows = [s.StreamRow(data_id=f"{stream}-{n}", payload=prompt) for n in range(20)]
            await self.log.publish(
                s.StreamListed(
                    stream=stream,
                    rows=await self.payloads.put(msgspec.msgpack.encode(rows)),
                    num_rows=len(rows),
                    weight=1.0,
                )
            )

    async def _issue(self, ordinal):
        group, stream = f"g{ordinal:07d}", self.random.choice(("math", "words"))
        await self.log.publish(
            s.GroupIssued(
                group=group,
                ordinal=ordinal,
                stream=stream,
                data_id=f"{stream}-{ordinal % 20}",
                num_slots=4,
                deadline_tick=self._tick + 6,
            )
        )
        return [(group, stream, f"{stream}-{ordinal % 20}", slot) for slot in range(4)]

    async def _slot(self, group, stream, data_id, slot):
        kinds = ["scored"] * 14 + ["retried"] * 3 + ["rejected"] * 3 + ["late", "missing", "dead", "refused"]
        kind = self.random.choice(kinds) if self.mishaps else "scored"
        self.fates[group, slot] = kind
        attempts = 3 if kind == "rejected" else 2 if kind == "retried" else 1
        for attempt in range(attempts):
            await self.log.publish(
                s.EpisodeRequested(group=group, slot=slot, attempt=attempt, stream=stream, data_id=data_id)
            )
            yield
            if kind == "dead":
                await self._dead("arena_launch", group, slot, attempt)
                return
            session = f"{group}-{slot}-{attempt}-0"
            await self.log.publish(
                r.EpisodeLaunched(group=group, slot=slot, attempt=attempt, launch_try=0, session=session)
            )
            yield
            await self.log.publish(
                r.EpisodeAccepted(group=group, slot=slot, attempt=attempt, launch_try=0, task_id=f"t-{session}")
            )
            yield
            if kind == "missing":
                return
            async for _ in self._session(session):
                yield
            if kind == "late":
                while self._tick < 200 and not await self._is_closed(group):
                    await self._time_passes()
            failed = kind in ("retried", "rejected") and (kind == "rejected" or attempt + 1 < attempts)
            final = attempt + 1 == attempts
            await self._end(group, slot, attempt, stream, data_id, session, failed, final, kind)
            yield

    async def _is_closed(self, group):
        return await self.broker.get(f"hr.r.group.closed.{group}") is not None

    async def _session(self, session):
        await self.log.publish(r.SessionOpened(session=session, gateway="gw-1", token_digest="0" * 16))
        context = 0
        num_calls = self.random.randint(1, 3)
        for ordinal in range(num_calls):
            num_prompt, num_completion = self.random.randint(3, 9), self.random.randint(1, 6)
            tokens = r.InteractionTokens(
                prompt_ids=arrays.int32([self.random.randrange(500) for _ in range(num_prompt)]),
                completion_ids=arrays.int32([self.random.randrange(500) for _ in range(num_completion)]),
                logprobs=arrays.float32([-self.random.random() for _ in range(num_completion)]),
                versions=arrays.runs([self._trained] * num_completion),
                messages_json=msgspec.json.encode(
                    [
                        {"role": "user", "content": f"turn {ordinal}, token=abcdef123456"},
                        {"role": "assistant", "content": f"answer {ordinal}"},
                    ]
                ),
            )
            data = msgspec.msgpack.encode(tokens)
            ref = await (self.payloads.put(data) if ordinal % 2 else self.payloads.hold(data))
            call = r.InteractionRecorded(
                session=session,
                ordinal=ordinal,
                interaction_id=f"chatcmpl-{session}-{ordinal}",
                parent=None if ordinal == 0 else ordinal - 1,
                tokens=ref,
                num_context=context,
                num_prompt=num_prompt,
                num_completion=num_completion,
                min_version=self._trained,
                max_version=self._trained,
                finish_reason=r.FinishReason.STOP,
                protocol="chat_completions",
            )
            context += num_prompt + num_completion
            await self.log.publish(call)
            yield call
        await self.log.publish(r.SessionClosed(session=session, num_interactions=num_calls))

    async def _end(self, group, slot, attempt, stream, data_id, session, failed, final, kind):
        ended = r.EpisodeEnded(
            group=group,
            slot=slot,
            attempt=attempt,
            stream=stream,
            data_id=data_id,
            session="" if failed else session,
            harness="" if failed else f"{stream}-loop@1",
            outcome=r.EpisodeClass.SYSTEM if failed else r.EpisodeClass.SCORED,
            final=final,
            status="BUILD_FAILED" if failed else "SUCCEEDED",
            error="no disk" if failed else "",
            score=None if failed else self.random.choice((0.0, 0.25, 0.5, 1.0)),
            turn_rewards={"chatcmpl-unknown": 1.0} if kind == "refused" else {},
            seconds=1.5,
        )
        await self.log.publish(ended)
        if not final:
            return
        try:
            trajectories = await map_rewards(
                ended,
                sessions=SessionReader(self.log, deadline_s=1.0),
                payloads=self.payloads,
                settings=reward_settings(self.config),
            )
        except RefusedError as error:
            trajectories = gave_up(ended, describe(error))
            await self._dead_letter("map_rewards", EPISODE_ENDED, ended, "refused", describe(error))
        for trajectory in trajectories:
            await self.log.publish(trajectory)

    async def _dead(self, stage, group, slot, attempt):
        message = s.EpisodeRequested(group=group, slot=slot, attempt=attempt, stream="math", data_id="x")
        await self._dead_letter(stage, EPISODE_REQUESTED, message, "attempts", "RuntimeError: no route to the Arena")

    async def _dead_letter(self, stage, topic, message, reason, error):
        subject = topic.subject("r", message)
        record = await self.broker.get(subject)
        await self.log.publish(
            s.DeadLetter(
                stage=stage,
                sequence=record.sequence,
                subject=subject,
                reason=reason,
                error=error,
                attempts=3,
                data=record.data,
            )
        )

    async def _time_passes(self):
        self._tick += 1
        await self.log.publish(s.Tick(ordinal=self._tick, period_s=2.0, unix_time_s=1e9 + 2 * self._tick))
        await self._pump()

    async def _pump(self):
        """Let assembly and the trainer do what they can."""
        fold = self._fold.fold
        filters = [*(topic.filter("r") for topic in fold.consumes), retries_of("r", fold.name)]
        while True:
            before = self._fold.sequence
            async with self.broker.read(filters, after_sequence=before, follow=False) as records:
                async for record in records:
                    await self._fold.fold_record(record)
            if not await self._train() and self._fold.sequence == before:
                return

    async def _train(self):
        record = await self.broker.get(f"hr.r.step.assembled.{self._trained + 1}")
        if record is None:
            return False
        step = msgspec.msgpack.decode(record.data, type=t.StepAssembled)
        manifest = msgspec.msgpack.decode(await self.payloads.get(step.manifest), type=t.Manifest)
        rows = {
            index: row_arrays(
                await self.broker.payloads.get(
                    type(step.manifest)(
                        store="run", id=payload_id, size_bytes=int(manifest.payload_sizes.as_numpy()[index])
                    )
                )
            )
            for index, payload_id in enumerate(manifest.payload_ids)
        }
        result = self._trainer.train(manifest, rows)
        self._trained = step.step
        self.digests[step.step] = result.digest
        await self.log.publish(
            t.StepTrained(
                step=step.step,
                generation=1,
                digest=result.digest,
                manifest_id=step.manifest.id,
                stats=dict(result.stats),
                seconds=0.25,
                num_tokens=result.num_tokens,
            )
        )
        weights = await self.payloads.put(msgspec.msgpack.encode(t.WeightsManifest(tensors=[], total_bytes=0)))
        await self.log.publish(
            t.WeightsPublished(version=step.step, generation=1, digest=result.digest, manifest=weights)
        )
        return True

    async def record(self, path, **options):
        return await record_run(self.broker, path, RecorderSettings(), follow=False, **options)
