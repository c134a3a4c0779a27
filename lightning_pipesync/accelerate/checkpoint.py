"""The file of each rank that ``save_state`` writes besides Accelerate's files."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file
from torch import nn

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import on_all_ranks
from lightning_pipesync.core.files import replacing
from lightning_pipesync.core.fingerprints import digest
from lightning_pipesync.core.torch_private import local_tensor
from lightning_pipesync.methods.settings import Settings
from lightning_pipesync.training.sharded_state import state_of_shards
from lightning_pipesync.training.state import layout_of, state_of_rank


@dataclass(frozen=True)
class RankStates:
    """What a rank resumes from, besides what Accelerate has saved.

    Attributes:
        methods: the state of each method.
        places: those of training loaders in their data, where the replicas are jobs of their own.
        scaler: that of this rank's loss scaler, of which Accelerate's checkpoint has one rank's; None: there is none.
        data_seed: of the order of the training data; None: no training loader was prepared.
    """

    methods: Sequence[Any] = ()
    places: Sequence[dict[str, Any]] = ()
    scaler: dict[str, Any] | None = None
    data_seed: int | None = None


def save_rank_states(
    folder: str | Path, states: RankStates, name: str, rank: int, layout: Mapping[str, int], models: Sequence[nn.Module]
) -> None:
    """Writes the states of this rank, and a checksum of the models' weights, to the rank's file.

    ``layout`` is that of :func:`layout_of`. Machines need not share the folder. Without methods, the file of an earlier
    checkpoint is removed.
    """
    if not states.methods:
        _file(folder, rank).unlink(missing_ok=True)
        return
    Path(folder).mkdir(parents=True, exist_ok=True)  # rank 0 may not have created it yet
    saved = {"method": name, "layout": dict(layout), "weights": _fingerprint(models)}
    saved |= {"states": list(states.methods), "digest": digest(list(states.methods))}
    saved |= {"places": list(states.places), "scaler": states.scaler, "data_seed": states.data_seed}
    with replacing(_file(folder, rank)) as temporary:
        torch.save(saved, temporary)


def read_rank_states(
    folder: str | Path,
    num_methods: int,
    transport: Transport | None,
    name: str,
    models: Sequence[nn.Module],
    config: Settings,
) -> RankStates:
    """Returns what :func:`save_rank_states` has written; a collective call.

    It is empty if the checkpoint is of plain Accelerate, or of another method than ``name``. A file that is missing,
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
    mine = None if saved is None else (saved["method"], saved["layout"], len(saved["states"]))
    of_ranks = [mine] if job is None else job.gather_objects(mine)
    first = next((entry for entry in of_ranks if entry is not None), None)
    if first is None:
        return RankStates()
    method, layout, num_states = first
    if method == name and layout == layout_of(transport) and any(entry != first for entry in of_ranks):
        raise ValueError(
            f"Not all of the {len(of_ranks)} processes find what they need in {folder}: on machines without a "
            f"shared folder, each machine needs the files of its processes, such as {path.name}."
        )
    section = {"strategy": method, **layout}
    if saved is not None:
        section |= {"ranks": {rank: saved["states"]}, "digests": {rank: saved["digest"]}}
    state: Any = state_of_rank(section, name, transport, config, removable=f"{path.name} and its like")
    if saved is None or state is None:
        return RankStates()
    if num_states != num_methods:
        raise ValueError(
            f"{folder} holds {num_states} models that were trained with their optimizers, and {num_methods} are "
            "prepared: prepare the same models before load_state()."
        )
    return RankStates(list(state), **{part: saved[part] for part in ("places", "scaler", "data_seed")})


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


def _fingerprint(models: Sequence[nn.Module]) -> int:
    """Returns a checksum of the weights of this rank: of its shards, if they are sharded."""
    number = 0
    for model in models:
        for tensor in model.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                values = local_tensor(tensor).detach().cpu().contiguous().reshape(-1)
                number = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), number)
    return number


def _file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"pipesync_{rank}.bin"
