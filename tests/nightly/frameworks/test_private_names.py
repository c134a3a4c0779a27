"""What leans on a name of another library fails by that name when it is gone, and not by wrong weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch.utilities.data
import pytest
import torch
import torchmetrics
import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import SGD

from lightning_pipesync import PipeSyncPlugin, SelSyncStrategy
from lightning_pipesync.accelerate import PipeSyncAccelerator
from lightning_pipesync.core import torch_private
from lightning_pipesync.core.private_names import ChecksOverrides, require
from lightning_pipesync.fabric import private as fabric_private
from lightning_pipesync.fabric.strategy import PipeSyncFabricStrategyMixin
from lightning_pipesync.lightning import private as lightning_private
from lightning_pipesync.lightning.callback import PipeSyncCallbackMixin
from lightning_pipesync.lightning.pipeline import PipelineStrategyMixin
from lightning_pipesync.lightning.sync import SyncStrategyMixin
from lightning_pipesync.transformers import PipeSyncTrainerMixin
from tests.support.lightning_models import Classifier


class Without:
    """An object without an attribute, which says where it is of."""

    def __init__(self, given: Any, *names: str) -> None:
        self.__dict__ = {name: value for name, value in vars(given).items() if name not in names}
        self.__class__ = type(type(given).__name__, (), {"__module__": type(given).__module__})


def test_the_error_names_library_version_and_name() -> None:
    with pytest.raises(RuntimeError, match=rf"torch {torch.__version__} has no Linear\._gone".replace("+", r"\+")):
        require(nn.Linear(1, 1), "weight", "_gone")
    with pytest.raises(RuntimeError, match=r"accelerate \S+ has no Accelerator\._gone"):
        require(type("Users", (Accelerator,), {}), "_gone")
    with pytest.raises(RuntimeError, match=r"has no lightning\.pytorch\.utilities\.data\._gone"):
        require(lightning.pytorch.utilities.data, "_gone")


@pytest.mark.parametrize(
    ("mixin", "base", "name"),
    [
        *((PipeSyncTrainerMixin, transformers.Trainer, name) for name in ("_load_best_model", "_finalize_training")),
        (PipeSyncTrainerMixin, transformers.Trainer, "_save_optimizer_and_scheduler"),
        (PipeSyncTrainerMixin, transformers.Trainer, "_load_optimizer_and_scheduler"),
        (PipeSyncTrainerMixin, transformers.Trainer, "_load_scaler"),
        (SyncStrategyMixin, DDPStrategy, "configure_ddp"),
        (PipelineStrategyMixin, DDPStrategy, "distributed_sampler_kwargs"),
        (PipeSyncFabricStrategyMixin, FabricDDPStrategy, "setup_module_and_optimizers"),
        (PipeSyncCallbackMixin, Callback, "on_validation_end"),
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


def test_what_is_set_on_metrics() -> None:
    metric = torchmetrics.MeanMetric()
    for name in ("sync_on_compute", "_to_sync"):
        local = lightning_private.kept_local(Without(metric, name))  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=rf"torchmetrics \S+ has no MeanMetric\.{name}"), local:
            pass
    for name in ("_update_count", "_computed"):
        with pytest.raises(RuntimeError, match=rf"torchmetrics \S+ has no MeanMetric\.{name}"):
            lightning_private.accumulate(Without(metric, name), {}, 1)  # type: ignore[arg-type]


def test_what_optimizers_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that torch sets on some optimizers only: whether it does is tried once."""
    parameter = nn.Parameter(torch.zeros(1))
    for check in (torch_private._check_fused, torch_private._check_scheduled):
        check.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch_private, "Probe", lambda parameters, fused=None: SGD(parameters))
        with pytest.raises(RuntimeError, match=r"torch \S+ has no SGD\._step_supports_amp_scaling"):
            torch_private.handles_unscaling(SGD([parameter]))
        patch.setattr(torch.optim.lr_scheduler, "LambdaLR", lambda *_: None)
        with pytest.raises(RuntimeError, match=r"torch \S+ has no SGD\._opt_called"):
            torch_private.mark_stepped(SGD([parameter]))
    assert not torch_private.handles_unscaling(SGD([parameter]))
    assert torch_private.handles_unscaling(SGD([parameter], fused=True))
    torch_private.mark_stepped(SGD([parameter]))


def test_what_lightning_wraps() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))])
    wrapped = LightningOptimizer(optimizer)
    assert fabric_private.unwrapped(wrapped) is fabric_private.unwrapped(optimizer) is optimizer  # type: ignore[arg-type]
    renamed = type("LightningSGD", (SGD,), {"__module__": LightningOptimizer.__module__})
    with pytest.raises(RuntimeError, match=r"lightning \S+ has no LightningSGD\._optimizer"):
        fabric_private.unwrapped(renamed([nn.Parameter(torch.zeros(1))]))
    precision = MixedPrecision("16-mixed", "cpu")
    assert fabric_private.scaler_of(precision) is precision.scaler
    del precision.scaler
    with pytest.raises(RuntimeError, match=r"lightning \S+ has no MixedPrecision\.scaler"):
        fabric_private.scaler_of(precision)


def test_what_lightning_is_asked_and_set() -> None:
    with pytest.raises(RuntimeError, match=r"lightning \S+ has no DDPStrategy\._backward_sync_control"):
        fabric_private.control_backward_sync(DDPStrategy(), None)  # a Trainer's has none
    checkpoint = ModelCheckpoint(every_n_train_steps=2)
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[checkpoint], global_step=4)
    assert lightning_private.saves_now(trainer)
    del checkpoint._every_n_train_steps
    with pytest.raises(RuntimeError, match=r"lightning \S+ has no ModelCheckpoint\._every_n_train_steps"):
        lightning_private.saves_now(trainer)


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        ("fit_loop", "_data_fetcher"),
        ("_logger_connector", "_logged_metrics"),
        ("precision_plugin", "clip_grad_by_norm"),
        ("precision_plugin", "_after_closure"),
    ],
)
def test_a_trainer_is_checked_before_it_trains(
    holder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(strategy=SelSyncStrategy(), accelerator="cpu", devices=1, max_steps=1, default_root_dir=tmp_path)
    owner = getattr(trainer, holder)
    if name in vars(owner):
        monkeypatch.delattr(owner, name)
    else:
        for cls in [cls for cls in type(owner).__mro__ if name in vars(cls)]:
            monkeypatch.delattr(cls, name)
    with pytest.raises(RuntimeError, match=rf"lightning \S+ has no {type(owner).__name__}\.{name}"):
        lightning_private.check_trainer(_with_module(trainer), trainer.precision_plugin)


def _with_module(trainer: Trainer) -> Trainer:
    trainer.strategy.connect(_attached(trainer))
    return trainer


def _attached(trainer: Trainer) -> Classifier:
    module = Classifier()
    module.trainer = trainer
    return module


def test_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = PipeSyncAccelerator(PipeSyncPlugin("dear"), cpu=True)
    model = nn.Linear(1, 1)
    accelerator.prepare(model, SGD(model.parameters()))
    unmarked = AcceleratedOptimizer(SGD(model.parameters()))
    monkeypatch.setattr(Accelerator, "prepare", lambda *_, **__: (model, unmarked))
    with pytest.raises(RuntimeError, match=r"accelerate \S+ has no AcceleratedOptimizer\._is_accelerate_prepared"):
        accelerator.prepare(model, SGD(model.parameters()))
    make = Accelerator.__init__

    def make_without(self: Accelerator, **kwargs: Any) -> None:
        make(self, **kwargs)
        del self._optimizers

    monkeypatch.setattr(Accelerator, "__init__", make_without)
    with pytest.raises(RuntimeError, match=r"accelerate \S+ has no Accelerator\._optimizers"):
        PipeSyncAccelerator(PipeSyncPlugin("dear"), cpu=True)


def test_the_accelerator_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(PipeSyncTrainerMixin, transformers.Trainer):
        pass

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    assert isinstance(Made(model=nn.Linear(1, 1), args=arguments).accelerator, PipeSyncAccelerator)
    create = transformers.Trainer.create_accelerator_and_postprocess
    monkeypatch.setattr(transformers.Trainer, create.__name__, lambda self: None)
    with pytest.raises(RuntimeError, match=r"transformers \S+ has no transformers\.trainer\.Accelerator"):
        Made(model=nn.Linear(1, 1), args=arguments)
    monkeypatch.delattr(transformers.trainer, "Accelerator")
    with pytest.raises(RuntimeError, match=r"transformers \S+ has no transformers\.trainer\.Accelerator"):
        Made(model=nn.Linear(1, 1), args=arguments)
