"""Which predictions belong to which method."""

from __future__ import annotations

from lightning_pipesync.lab.predictions.dear import DeARLab
from lightning_pipesync.lab.predictions.ea_pipe import EAPipeLab
from lightning_pipesync.lab.predictions.entry import LabEntry
from lightning_pipesync.lab.predictions.local_sgd import LocalSGDLab
from lightning_pipesync.lab.predictions.parameter_server import ParameterServerLab
from lightning_pipesync.lab.predictions.pipe_sgd import PipeSGDLab
from lightning_pipesync.lab.predictions.selsync import SelSyncLab
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.registry import METHODS

#: By method; a class that has none has its base's.
ENTRIES: dict[type[Method], type[LabEntry]] = {
    METHODS["dear"]: DeARLab,
    METHODS["ea_pipe"]: EAPipeLab,
    METHODS["local_sgd"]: LocalSGDLab,
    METHODS["parameter_server"]: ParameterServerLab,
    METHODS["pipe_sgd"]: PipeSGDLab,
    METHODS["selsync"]: SelSyncLab,
}


def register_lab(method: type[Method], entry: type[LabEntry]) -> None:
    """Sets what ``pipesync bench`` and ``plan`` know of a method of one's own, and of those that inherit from it.

    Call it in the module that ``--import`` names, beside :func:`~lightning_pipesync.register_method`.
    """
    ENTRIES[method] = entry


def lab_of(name: str) -> LabEntry:
    """Returns what the laboratory knows of a registered method."""
    method = METHODS[name]
    entry = next((ENTRIES[base] for base in method.__mro__ if base in ENTRIES), LabEntry)
    return entry(method)
