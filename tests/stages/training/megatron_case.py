"""A policy that Megatron-Core's ranks can divide, and what the plain backend makes of it."""

from pathlib import Path

import msgspec
from backend_case import Case, Outcome, train_case
from training_case import SPEC

from stages.policy.tiny import make_policy_folder
from stages.training.ranks import single_rank


def tiny_case(folder: Path) -> Case:
    make_policy_folder(folder / "policy", msgspec.structs.replace(SPEC, num_heads=4, num_kv_heads=2, head_dim=16))
    return Case(folder=str(folder))


def hf_name(name: str) -> str:
    """As Megatron's side calls it, from the plain backend's modules."""
    name = name.replace(".lora_A.default.", ".lora_A.").replace(".lora_B.default.", ".lora_B.")
    name = name.removeprefix("model.").replace("decoder.", "model.")
    return f"value_{name}" if name.startswith("head.") else name


def plain(case: Case) -> Outcome:
    """The plain backend's gradients in order of the HF names."""
    found = train_case(single_rank(), case)
    gradients, all_names = [], []
    for update, names in zip(found.gradients, found.names, strict=True):
        by_name = {hf_name(name): gradient for name, gradient in zip(names, update, strict=True)}
        all_names.append(sorted(by_name))
        gradients.append([by_name[name] for name in sorted(by_name)])
    return msgspec.structs.replace(found, gradients=gradients, names=all_names)
