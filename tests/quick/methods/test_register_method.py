"""``register_method`` refuses a class that is no complete method, by name and with the way out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lightning_pipesync import LocalSGD, register_method
from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig
from lightning_pipesync.methods.replicas.method import ReplicaMethod
from lightning_pipesync.methods.replicas.policy import AveragingPolicy
from lightning_pipesync.methods.replicas.settings import ReplicaSettings
from lightning_pipesync.training.registry import METHODS


@dataclass(frozen=True)
class Config(ReplicaSettings):
    period: int = 4


@dataclass
class NotFrozen(ReplicaSettings):
    period: int = 4


@dataclass(frozen=True)
class WithoutDefault(ReplicaSettings):
    period: int


@dataclass(frozen=True)
class OfOthers:
    period: int = 4


class NotDecorated(LocalSGDConfig):
    more: int = 4


def method_with(**attributes: Any) -> Any:
    """Returns a class with these attributes in place of those that it needs; None: without one."""
    needed = {"name": "own", "config_type": Config, "_policy": lambda *_: AveragingPolicy()}
    return type("Own", (ReplicaMethod,), {k: v for k, v in {**needed, **attributes}.items() if v is not None})


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (method_with(name=None), "Own has no name: set name ="),
        (method_with(name="dear"), "name='dear' is that of DeAR"),
        (type("Own", (LocalSGD,), {}), "name='local_sgd' is that of LocalSGD"),
        (type("LocalSGD", (LocalSGD,), {"name": "own"}), "LocalSGD is the class of another method.*rename"),
        (method_with(config_type=None), "Own has no config_type"),
        (method_with(config_type=OfOthers), "Own has no config_type.*inherits from Settings"),
        (method_with(config_type=NotFrozen), "config_type=NotFrozen is no frozen dataclass"),
        (method_with(config_type=NotDecorated), "config_type=NotDecorated is no frozen dataclass"),
        (method_with(config_type=WithoutDefault), "WithoutDefault.period has no default"),
        (method_with(_policy=None), "Own is not complete: implement _policy"),
        (method_with, "is no method: pass a class that inherits from SyncMethod"),
    ],
)
def test_an_incomplete_method_is_refused(method: Any, words: str) -> None:
    before = dict(METHODS)
    with pytest.raises(ValueError, match=words):
        register_method(method)
    assert before == METHODS
