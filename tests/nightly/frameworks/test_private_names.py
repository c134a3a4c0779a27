"""What leans on a name of another library fails by that name when it is gone, and not by wrong weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_pipesync import SelSyncStrategy
from lightning_pipesync.core.private_names import ChecksOverrides, require
from lightning_pipesync.lightning import private as lightning_private
from lightning_pipesync.lightning.sync import SyncStrategyMixin
from lightning_pipesync.transformers import PipeSyncTrainerMixin
from tests.support.lightning_models import Classifier


def test_the_error_names_library_version_and_name() -> None:
    with pytest.raises(RuntimeError, match=rf"torch {torch.__version__} has no Linear\._gone".replace("+", r"\+")):
        require(nn.Linear(1, 1), "weight", "_gone")
    with pytest.raises(RuntimeError, match=r"accelerate \S+ has no Accelerator\._gone"):
        require(type("Users", (Accelerator,), {}), "_gone")


@pytest.mark.parametrize(
    ("mixin", "base", "name"),
    [
        (PipeSyncTrainerMixin, transformers.Trainer, "_load_best_model"),
        (SyncStrategyMixin, DDPStrategy, "configure_ddp"),
    ],
)
def test_an_override_of_nothing(mixin: Any, base: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of the user's own that has the method does not hide that the library's has it no longer."""
    theirs = [cls for cls in base.__mro__ if name in vars(cls)]
    assert theirs
    users = type("Users", (base,), {name: lambda *_: None})
    type("Made", (mixin, base), {})
    for cls in theirs:
        monkeypatch.delattr(cls, name)
    for bases in [(mixin, base), (mixin, users)]:
        with pytest.raises(RuntimeError, match=rf"has no {base.__name__}\.{name}"):
            type("Made", bases, {})
    type("Mixin", (mixin,), {})  # the library's class may follow


def test_every_override_is_marked() -> None:
    """What has the name of something of the library's, and is not marked, would not be checked."""
    made = [cls for top in ChecksOverrides.__subclasses__() for cls in _with_subclasses(top)]
    unmarked = []
    for cls in made:
        theirs = [base for base in cls.__mro__ if base.__module__.startswith(("lightning.", "accelerate.", "transf"))]
        for base in cls.__mro__:
            for name, member in vars(base).items() if base.__module__.startswith("lightning_pipesync.") else ():
                function = member.fget if isinstance(member, property) else member
                overrides = callable(function) and not name.startswith("__") and hasattr(function, "__code__")
                if overrides and any(name in vars(other) for other in theirs) and not hasattr(function, "__override__"):
                    unmarked.append(f"{base.__qualname__}.{name}")
    assert len(made) > 20
    assert not unmarked


def _with_subclasses(cls: type) -> list[type]:
    return [cls, *(below for one in cls.__subclasses__() for below in _with_subclasses(one))]


@pytest.mark.parametrize(
    ("holder", "name"),
    [("fit_loop", "_data_fetcher"), ("_logger_connector", "_logged_metrics"), ("precision_plugin", "_after_closure")],
)
def test_a_trainer_is_checked_before_it_trains(
    holder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(strategy=SelSyncStrategy(), accelerator="cpu", devices=1, max_steps=1, default_root_dir=tmp_path)
    owner, module = getattr(trainer, holder), Classifier()
    for one in [owner] if name in vars(owner) else [cls for cls in type(owner).__mro__ if name in vars(cls)]:
        monkeypatch.delattr(one, name)
    module.trainer = trainer
    trainer.strategy.connect(module)
    with pytest.raises(RuntimeError, match=rf"lightning \S+ has no {type(owner).__name__}\.{name}"):
        lightning_private.check_trainer(trainer, trainer.precision_plugin)
