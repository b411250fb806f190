"""Weight broadcast: a trained step becomes a published version.

    step.trained ──▶ folder ──▶ manifest of checksums ──▶ pieces into the store ──▶ weights.published ──▶ old ones out

Runs where the trainer's files are. The files are stored and checked before the message that names them.
"""

from __future__ import annotations

import anyio.to_thread
import msgspec
import structlog

from pipeline.errors import RefusedError
from pipeline.generations import Generations
from pipeline.stage import stage
from schemas.messages.training import StepTrained, WeightsPublished
from schemas.topics import STEP_TRAINED, WEIGHTS_PUBLISHED
from stages.ports import WeightsRefusedError
from stages.weight_files.folders import version_folder, versions_in
from stages.weight_files.safetensors_file import ADAPTER_FILE_NAME, read_folder, tensor_file, weights_digest
from stages.weights.shelf import Shelf, WeightsStore

log = structlog.get_logger("headrace.weights")


@stage(consumes=STEP_TRAINED, produces=(WEIGHTS_PUBLISHED,), concurrency=1)
async def broadcast_weights(
    trained: StepTrained,
    *,
    payloads: WeightsStore,
    shelf: Shelf | None,
    weights_dir: str,
    generations: Generations | None = None,
) -> list[WeightsPublished]:
    """Publish the weights of a step: a checksummed manifest, the folder, and its pieces in the payload store.

    Args:
        shelf: the store's copies, for engines that don't share the folder; None where all of them do.
        weights_dir: where the trainer leaves its version folders.
        generations: those that were heard before; nothing is published of a trainer that was superseded when it spoke.

    Raises:
        RefusedError: the folder is gone, and no newer version has taken its place.
    """
    if generations is not None and not generations.admits(trained.generation):
        log.warning(
            "a superseded trainer's step is not published",
            step=trained.step,
            generation=trained.generation,
            newest_generation=generations.newest,
        )
        return []
    folder = version_folder(weights_dir, trained.step, trained.generation)
    try:
        manifest = await anyio.to_thread.run_sync(read_folder, folder)
        parts = None if shelf is None else await shelf.put(folder, manifest, trained.step, trained.generation)
    except (WeightsRefusedError, FileNotFoundError) as error:
        if not tensor_file(folder).exists():
            if any(version > trained.step for version, _, _ in versions_in(weights_dir)):
                # Broadcast was away for longer than the trainer keeps versions: engines go on to the newest.
                log.warning("a version was overtaken before it was published", step=trained.step)
                return []
            raise RefusedError(f"weights of step {trained.step} are no longer in {folder}: {error}") from error
        raise
    if shelf is not None:
        await shelf.retire(trained.step, trained.generation)
    return [
        WeightsPublished(
            version=trained.step,
            generation=trained.generation,
            digest=weights_digest(manifest),
            manifest=await payloads.put(msgspec.msgpack.encode(manifest)),
            directory=folder,
            parts=parts,
            adapter=manifest.file == ADAPTER_FILE_NAME,
        )
    ]
