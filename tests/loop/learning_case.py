"""Learning in one process: the quickstart's tasks with the real policy, sampler, assembly's numbers and trainer, and no broker.

Rollouts are as many versions old as a run with that staleness would make them. One method and seed take about half a minute
of one core; the warmed-up policy of a seed is made once and kept in headrace's cache.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ops.arena.quickstart import QUICKSTART_STREAMS
from ops.arena.tasks import TaskSource
from ops.config import RunConfig
from ops.policy_folder import prepare_policy
from ops.run_folder import RunFolder
from schemas import arrays
from schemas.config import RunSection
from schemas.messages.training import Manifest
from stages.assembly.advantages import Estimator, EstimatorSettings, advantages
from stages.assembly.partition import PartitionSettings, partition_manifest
from stages.assembly.weights import Aggregation, step_weights
from stages.engine.model_folder import read_shape, read_weights
from stages.learning.losses.cispo import Cispo
from stages.learning.losses.config import LossConfig
from stages.learning.losses.gspo import Gspo
from stages.learning.losses.ppo import Ppo
from stages.learning.losses.sapo import Sapo
from stages.learning.normalise import TokenNormalisation
from stages.learning.sampler import Sampler, SampleRequest
from stages.learning.update import OptimizerSettings
from stages.policy.tokenizer import FolderTokenizer, load_tokenizer
from stages.training.backends import ModelSettings, hf_backend
from stages.training.critic import CriticSettings
from stages.training.determinism import set_determinism
from stages.training.placement import WholePlacement
from stages.training.ports import RowArrays
from stages.training.ranks import single_rank
from stages.training.step_backend import StepSettings
from stages.training.token_advantages import AdvantageSettings

GROUPS, SLOTS, STEPS = 8, 8, 40
SEEDS = (0, 1, 2)


@dataclass(frozen=True, kw_only=True)
class Method:
    """What is learned with."""

    loss: LossConfig
    estimator: Estimator = Estimator.GRPO
    staleness: int = 1
    models: ModelSettings = field(default_factory=ModelSettings)


METHODS = {
    "GRPO": Method(loss=LossConfig(method=Ppo(eps_clip_higher=0.28))),
    "RLOO": Method(loss=LossConfig(method=Ppo()), estimator=Estimator.RLOO),
    "PPO with critic": Method(
        loss=LossConfig(method=Ppo()),
        estimator=Estimator.GAE,
        models=ModelSettings(
            critic=CriticSettings(optimizer=OptimizerSettings(lr=1e-3), warmup_steps=3),
            advantages=AdvantageSettings(normalisation=TokenNormalisation(mean="batch", std="batch")),
        ),
    ),
    "CISPO": Method(loss=LossConfig(method=Cispo(eps_clip_higher=4.0))),
    # its default clip is for rows of a thousand tokens, whose mean ratios hardly differ from 1; rows here have five
    "GSPO": Method(loss=LossConfig(method=Gspo(eps_clip=0.03, eps_clip_higher=0.04))),
    "SAPO": Method(loss=LossConfig(method=Sapo())),
    "decoupled PPO, staleness 4": Method(loss=LossConfig(proximal="loglinear", behaviour_weight="token"), staleness=4),
}


@dataclass
class Rollout:
    """One slot: its tokens so far, which of them were sampled, and its reward."""

    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    reply: str = ""
    reward: float = 0.0

    def extend(self, prompt: np.ndarray, sampled: list) -> None:
        """A further call; what was sampled before is trained only if it comes back token by token."""
        known = len(self.tokens)
        if prompt[:known].tolist() != self.tokens.tolist():
            known = 0
        said = np.array([s.logprob for s in sampled], dtype=np.float32)
        rest = np.zeros(len(prompt) - known)
        self.tokens = np.concatenate([prompt, np.array([s.token_id for s in sampled], dtype=np.int32)])
        self.mask = np.concatenate([self.mask[:known], rest.astype(bool), np.ones(len(sampled), bool)])
        self.logprobs = np.concatenate([self.logprobs[:known], rest.astype(np.float32), said])


class Player:
    """Plays groups of the two streams, 3:1, with the sampler's current weights."""

    def __init__(self, sampler: Sampler, tokenizer: FolderTokenizer, seed: int) -> None:
        self._sampler, self._tokenizer = sampler, tokenizer
        self._sources = [TaskSource(stream) for stream in QUICKSTART_STREAMS]
        self._seeds = np.random.default_rng(seed)
        self._num_groups = 0

    def groups(self) -> list[list[Rollout]]:
        """GROUPS groups of SLOTS slots."""
        found: list[list[Rollout]] = []
        for _ in range(GROUPS):
            source = self._sources[self._num_groups % 4 == 3]
            data_id = source.data_ids[self._num_groups % len(source.data_ids)]
            self._num_groups += 1
            found.append(self._group(source, data_id))
        return found

    def _group(self, source: TaskSource, data_id: str) -> list[Rollout]:
        empty = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32)
        slots = [Rollout(*empty) for _ in range(SLOTS)]
        chats: list[list[dict[str, object]]] = [[] for _ in slots]
        for turn in source.texts(data_id).turns:
            prompts = []
            for slot, chat in zip(slots, chats, strict=True):
                chat.append({"role": "user", "content": turn.replace("{reply}", slot.reply)})
                prompts.append(self._tokenizer.render(chat, tools=None, add_generation_prompt=True))
            for slot, chat, prompt, sampled in zip(slots, chats, prompts, self._sample(prompts), strict=True):
                slot.extend(prompt, sampled)
                slot.reply = self._tokenizer.decode(np.array([s.token_id for s in sampled]))
                chat.append({"role": "assistant", "content": slot.reply})
        for slot in slots:
            slot.reward = source.score(data_id, slot.reply)
        return slots

    def _sample(self, prompts: list[np.ndarray]) -> list[list]:
        found: list[list] = [[] for _ in prompts]
        for i, prompt in enumerate(prompts):
            self._sampler.add(
                SampleRequest(
                    request_id=str(i),
                    prompt_ids=prompt,
                    max_new_tokens=16,
                    stop_token_ids=frozenset(self._tokenizer.stop_token_ids),
                    seed=int(self._seeds.integers(2**63)),
                )
            )
        while self._sampler.num_running:
            for sampled in self._sampler.step():
                found[int(sampled.request_id)].append(sampled)
        return found


def manifest_of(step: int, version: int, groups: list[list[Rollout]], estimator: Estimator) -> tuple[Manifest, dict]:
    counts = [[int(slot.mask.sum()) for slot in group] for group in groups]
    found = advantages([[s.reward for s in group] for group in groups], counts, EstimatorSettings(name=estimator))
    slots = [slot for group in groups for slot in group]
    rows = {
        i: RowArrays(
            token_ids=slot.tokens,
            loss_mask=slot.mask,
            logprobs=slot.logprobs,
            versions=np.where(slot.mask, version, -1).astype(np.int32),
            turns=np.where(slot.mask, 0, -1).astype(np.int32),
        )
        for i, slot in enumerate(slots)
    }
    group_R, zeros = np.repeat(np.arange(len(groups)), SLOTS), np.zeros(len(slots))
    d = [int(slot.mask.sum()) for slot in slots]
    manifest = Manifest(
        run="learning",
        step=step,
        algorithm=estimator.value,
        aggregation="token_mean",
        temperature=1.0,
        groups=[str(g) for g in range(len(groups))],
        streams=["both"],
        row_ids=[str(i) for i in rows],
        row_group=arrays.int32(group_R),
        row_slot=arrays.int32(np.tile(np.arange(SLOTS), len(groups))),
        row_stream=arrays.int32(zeros),
        reward=arrays.float64([slot.reward for slot in slots]),
        advantage=arrays.float64([value for group in found for value in group]),
        loss_weight=arrays.float64(step_weights(d, group_R, zeros, Aggregation.TOKEN_MEAN)),
        mini_batch=arrays.int32(zeros),
        num_tokens=arrays.int32([len(slot.tokens) for slot in slots]),
        num_loss_tokens=arrays.int32(d),
        min_version=arrays.int32(zeros + version),
        max_version=arrays.int32(zeros + version),
        payload_ids=[""] * len(slots),
        payload_sizes=arrays.int64(zeros),
        payload_store="memory",
    )
    return manifest, rows


def learn(root: Path, method: Method, seed: int, steps: int = STEPS) -> list[float]:
    """Mean reward of each step's rollouts."""
    set_determinism(seed=seed, threads=1)
    folder = RunFolder(root)
    folder.create()
    model = prepare_policy(RunConfig(run=RunSection(id="learning", dir=str(root), seed=seed)), folder)
    shape = read_shape(model)
    sampler = Sampler(read_weights(model, shape), num_slots=64)
    player = Player(sampler, load_tokenizer(model), seed)
    trainer = trainer_of(method, model, root)
    waiting: deque[tuple[int, list[list[Rollout]]]] = deque()
    rewards: list[float] = []
    for step in range(1, steps + 1):
        while len(waiting) <= method.staleness:
            waiting.append((step - 1, player.groups()))
        version, groups = waiting.popleft()
        rewards.append(float(np.mean([slot.reward for group in groups for slot in group])))
        trainer.train(*manifest_of(step, version, groups, method.estimator))
        trainer.export_weights(str(root / "now"))
        sampler.swap(read_weights(root / "now", shape), step, recompute=True)
    trainer.close()
    return rewards


def trainer_of(method: Method, model: str, root: Path):
    settings = StepSettings(
        model_folder=model,
        checkpoint_dir=str(root / "checkpoints"),
        optimizer=OptimizerSettings(lr=5e-4),
        loss=method.loss,
    )
    budget = PartitionSettings(max_tokens_per_microbatch=8192)
    ranks = single_rank()
    return hf_backend(
        settings,
        method.models,
        lambda manifest, num_ranks: partition_manifest(manifest, num_ranks, budget).ranks,
        ranks,
        WholePlacement(ranks),
    )
