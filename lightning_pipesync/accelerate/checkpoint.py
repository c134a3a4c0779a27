"""The file of each rank that ``save_state`` writes besides Accelerate's files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file
from torch import nn

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import on_all_ranks
from lightning_pipesync.core.files import replacing
from lightning_pipesync.core.fingerprints import checksums_of, digest
from lightning_pipesync.core.torch_private import local_tensor
from lightning_pipesync.methods.settings import Settings
from lightning_pipesync.training.sharded_state import state_of_shards
from lightning_pipesync.training.state import layout_of, state_of_rank


def save_rank_state(
    folder: str | Path,
    state: Mapping[str, Any] | None,
    name: str,
    rank: int,
    layout: Mapping[str, int],
    models: Sequence[nn.Module],
) -> None:
    """Writes what this rank resumes from besides Accelerate's files, and a checksum of its weights, to its file.

    ``layout`` is that of :func:`layout_of`. Machines need not share the folder. If ``state`` is None, the file of an
    earlier checkpoint is removed.
    """
    if state is None:
        _file(folder, rank).unlink(missing_ok=True)
        return
    Path(folder).mkdir(parents=True, exist_ok=True)  # rank 0 may not have created it yet
    saved = {"strategy": name, **layout, "ranks": {rank: dict(state)}, "digests": {rank: digest(state)}}
    with replacing(_file(folder, rank)) as temporary:
        torch.save({**saved, "weights": _fingerprint(models)}, temporary)


def read_rank_state(
    folder: str | Path, transport: Transport | None, name: str, models: Sequence[nn.Module], config: Settings
) -> dict[str, Any] | None:
    """Returns the state that :func:`save_rank_state` has written; a collective call.

    It is None if the checkpoint is of plain Accelerate, or of another method than ``name``. A file that is missing,
    damaged, or of other models raises a ValueError on all ranks.
    """
    job = None if transport is None else transport.job
    rank = 0 if job is None else job.rank
    path = _file(folder, rank)
    saved = on_all_ranks(job, lambda: _read(path, rank))
    if saved is not None and saved["weights"] != _fingerprint(models):
        warnings.warn(
            f"{path} is of other weights than those that were loaded, and is not used: plain Accelerate, or another "
            "program, has overwritten the checkpoint.",
            stacklevel=4,
        )
        saved = None
    layout = layout_of(transport)
    mine = None if saved is None else {key: saved[key] for key in ("strategy", *layout)}
    of_ranks = [mine] if job is None else job.gather_objects(mine)
    first = next((entry for entry in of_ranks if entry is not None), None)
    if first == {"strategy": name, **layout} and any(entry != first for entry in of_ranks):
        raise ValueError(
            f"Not all of the {len(of_ranks)} processes find what they need in {folder}: on machines without a "
            f"shared folder, each machine needs the files of its processes, such as {path.name}."
        )
    return state_of_rank(saved or first, name, transport, config, removable=f"{path.name} and its like")


def load_models(models: Sequence[nn.Module], folder: str | Path) -> None:
    """Loads what Accelerate has written of models that the user has sharded: whole tensors, each rank its shards."""
    for index, model in enumerate(models):
        suffix = f"_{index}" if index else ""
        safe, pickled = (Path(folder, f"{name}{suffix}") for name in (SAFE_MODEL_NAME, MODEL_NAME))
        if (path := safe.with_name(f"{safe.name}.safetensors")).exists():
            state = load_file(path)
        else:
            state = torch.load(pickled.with_name(f"{pickled.name}.bin"), map_location="cpu", weights_only=True)
        model.load_state_dict(state_of_shards(model, state))


def _read(path: Path, rank: int) -> dict[str, Any] | None:
    """Returns what is in the file of a rank; None if there is no file; a damaged one raises a ValueError."""
    if not path.exists():
        return None
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # those of zipfile, pickle and torch
        raise ValueError(
            f"The state of rank {rank} in {path} is damaged ({type(error).__name__}: {error}). Resume from another "
            f"checkpoint, or remove {path.name} and its like to resume from the weights and optimizers alone."
        ) from error
    return saved


def _fingerprint(models: Sequence[nn.Module]) -> list[int]:
    """Returns checksums of the weights of this rank: of its shards, if they are sharded."""
    values = [value for model in models for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
    return checksums_of([local_tensor(value) for value in values])


def _file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"pipesync_{rank}.bin"
