"""Weight broadcast: a trained step becomes a published version.

Runs where the trainer's files are. The files are stored and checked before the message that names them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import anyio.to_thread
import msgspec

from pipeline.errors import RefusedError
from pipeline.stage import stage
from schemas.messages.training import StepTrained, WeightsManifest, WeightsPublished
from schemas.payload import PayloadRef
from schemas.topics import STEP_TRAINED, WEIGHTS_PUBLISHED
from stages.ports import Payloads, WeightsRefusedError
from stages.weight_files.folders import version_folder
from stages.weight_files.safetensors_file import FILE_NAME, read_manifest, weights_digest


class WeightsStore(Payloads, Protocol):
    """Payloads that can be taken out again."""

    async def delete(self, ref: PayloadRef) -> None: ...


class PublishedWeights(Protocol):
    """What was published before."""

    async def find(self, version: int, generation: int) -> WeightsPublished | None: ...


@stage(consumes=STEP_TRAINED, produces=(WEIGHTS_PUBLISHED,), concurrency=1)
async def broadcast_weights(
    trained: StepTrained,
    *,
    payloads: WeightsStore,
    published: PublishedWeights,
    weights_dir: str,
    through_store: bool,
    keep_versions: int,
) -> list[WeightsPublished]:
    """Publish the weights of a step: a checksummed manifest, the folder, and the file itself in the payload store.

    Args:
        published: finds what was published before.
        weights_dir: where the trainer leaves its version folders.
        through_store: also put the file into the payload store, for engines that don't share the folder.
        keep_versions: how many versions' files the store keeps; engines that are further behind go on to the newest.

    Raises:
        RefusedError: the folder is gone: a newer version has taken its place.
    """
    folder = version_folder(weights_dir, trained.step, trained.generation)
    path = Path(folder) / FILE_NAME
    try:
        manifest, data = await anyio.to_thread.run_sync(_read, path, through_store)
    except WeightsRefusedError as error:
        if not path.exists():
            raise RefusedError(f"weights of step {trained.step} are no longer in {folder}: {error}") from error
        raise
    await _retire(trained.step - keep_versions, trained.generation, payloads, published)
    return [
        WeightsPublished(
            version=trained.step,
            generation=trained.generation,
            digest=weights_digest(manifest),
            manifest=await payloads.put(msgspec.msgpack.encode(manifest)),
            file=await payloads.put(data) if through_store else None,
            directory=folder,
        )
    ]


async def _retire(version: int, generation: int, payloads: WeightsStore, published: PublishedWeights) -> None:
    """Take the file of an old version out of the store; its message and manifest stay."""
    old = await published.find(version, generation) if version > 0 else None
    if old is not None and old.file is not None:
        await payloads.delete(old.file)


def _read(path: Path, through_store: bool) -> tuple[WeightsManifest, bytes]:
    return read_manifest(path), path.read_bytes() if through_store else b""
