"""The training in loops of the user's own: plain, in Fabric, with Accelerate."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState, GradientState
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from tests.conformance.methods import Method
from tests.conformance.training import (
    Checkpoint,
    Options,
    Result,
    batch_of,
    flat,
    flat_state,
    loss_of,
    network,
    optimizers_of,
    order,
    pass_by,
    replica_of_process,
    scaler_of,
    scheduler_of,
    whole,
)
from tests.support.accelerate_runs import end as end_accelerator

Settings = dict[str, Any]


def rank_of_process() -> int:
    return int(os.environ.get("RANK", "0"))


class Loop(ABC):
    """A training, ready for its first batch; constructing one is a collective call.

    Args:
        method: None: DistributedDataParallel.
        settings: the method's.
        options: see :class:`Options`.
    """

    model: nn.Sequential
    #: What the user calls: the model, or what it is wrapped in; a pipeline is not called.
    called: nn.Module | None = None
    scale = 1.0

    @abstractmethod
    def __init__(self, method: Method | None, settings: Settings, options: Options) -> None:
        self.options = options
        self.norms: list[float] = []

    @abstractmethod
    def train_on(self, index: int, x: Tensor, y: Tensor) -> None:
        """Makes the passes of the batch with that index, and the step if it is one's last."""

    @abstractmethod
    def save(self, path: Path) -> None: ...

    @abstractmethod
    def load(self, path: Path) -> None: ...

    @staticmethod
    @abstractmethod
    def saved_weights(path: Path) -> Tensor:
        """Returns the weights in a checkpoint, of which everything can be loaded with ``weights_only=True``."""

    @abstractmethod
    def end(self) -> Tensor:
        """Ends the method; returns the consolidated weights."""


def run_loop(
    loop_type: type[Loop],
    method: Method | None,
    settings: Settings,
    options: Options,
    batches: list[list[int]] | None = None,
    save: Checkpoint | None = None,
    resume: Checkpoint | None = None,
) -> Result:
    """Trains on ``batches``, by default those of :func:`order`."""
    rank = rank_of_process()
    first = 0 if resume is None else resume.at
    loop = loop_type(method, settings, options)
    torch.manual_seed(100 + rank + first)
    if resume is not None:
        loop.load(resume.path)
    loaded = flat(loop.model) if resume else None
    if batches is None:
        batches = order(0 if method is not None and method.pipeline else rank, options.ranks)
    for index, indices in enumerate(batches[first:], first):
        x, y = batch_of(indices)
        pass_by(options, "batch", loop)
        loop.train_on(index, x.to(options.device), y.to(options.device))
        if save is not None and (index + 1) % save.at == 0:
            pass_by(options, "saving", loop)
            loop.save(save.path.with_name(f"{save.path.name}-{index + 1}"))
    pass_by(options, "end", loop)
    own = None if loop.called is None else flat_state(loop.called.state_dict())
    return Result(loop.end(), batches[first:], loaded, loop.scale, loop.norms, own)


def autocast(options: Options) -> Any:
    dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    if options.precision not in dtypes:
        return nullcontext()
    return torch.autocast(options.device, dtypes[options.precision])


class PlainLoop(Loop):
    """A loop without a framework; its checkpoints are a file for each rank."""

    def __init__(self, method: Method | None, settings: Settings, options: Options) -> None:
        super().__init__(method, settings, options)
        self.sync = None
        seed = 0 if method is None else replica_of_process(options)  # rank 0's weights count
        self.model = self.called = self.make_network(method, seed)
        self.optimizers = optimizers_of(self.model, options)
        if method is None:
            self.called = self.without_method(self.model)
        else:
            self.attach = partial(method.plain, self.model, self.optimizers, **settings)
            self.sync = self.attach()
        self.schedulers = [scheduler_of(optimizer, options) for optimizer in self.optimizers]
        self.scaler = scaler_of(options, enabled=options.precision == "16-mixed")

    def make_network(self, method: Method | None, seed: int) -> nn.Sequential:
        return network(self.options, seed)

    def without_method(self, model: nn.Sequential) -> nn.Module:
        return DistributedDataParallel(model)

    def no_sync(self) -> AbstractContextManager[Any]:
        return getattr(self.sync or self.called, "no_sync", nullcontext)()

    def train_on(self, index: int, x: Tensor, y: Tensor) -> None:
        accumulate = self.options.accumulate
        step, within = divmod(index, accumulate)
        optimizer = self.optimizers[step % len(self.optimizers)]
        with self.no_sync() if within + 1 < accumulate else nullcontext():
            with autocast(self.options):
                output = self.called(x)
            self.scaler.scale(loss_of(output, y) / accumulate).backward()
        if within + 1 < accumulate:
            return
        if self.sync is None:
            self.scaler.unscale_(optimizer)
        else:
            self.sync.reduce(optimizer, self.scaler)
        self.clip(optimizer)
        pass_by(self.options, "step", self)
        if self.sync is None:
            self.scaler.step(optimizer)
        else:
            self.sync.step(lambda: self.scaler.step(optimizer), optimizer)
        self.scaler.update()
        self.scale = self.scaler.get_scale()
        self.model.zero_grad()
        self.schedulers[step % len(self.optimizers)].step()

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        max_norm, max_value, sync = self.options.clip_norm, self.options.clip_value, self.sync
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if max_norm is not None:
            clip = (
                partial(nn.utils.clip_grad_norm_, trained) if sync is None else partial(sync.clip, optimizer=optimizer)
            )
            self.norms.append(float(whole(clip(max_norm))))
        elif max_value is not None:
            if hasattr(sync, "clip_value"):
                sync.clip_value(max_value, optimizer)
                return
            if sync is not None:
                sync.reduce(optimizer)
            nn.utils.clip_grad_value_(trained, max_value)

    def save(self, path: Path) -> None:
        saved: dict[str, Any] = {"rng": torch.get_rng_state()}
        if self.sync is not None:
            self.sync.flush()
            saved["pipesync"] = self.sync.state_dict()
        saved["model"] = self.model.state_dict()
        source = self.sync and self.sync.optimizer_state_dict
        saved["optimizers"] = [source(one) if source else one.state_dict() for one in self.optimizers]
        saved["schedulers"] = [scheduler.state_dict() for scheduler in self.schedulers]
        torch.save(saved, f"{path}-{rank_of_process()}")
        if self.sync is not None:
            self.sync.resume()

    def load(self, path: Path) -> None:
        saved = torch.load(f"{path}-{rank_of_process()}", weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for scheduler, state in zip(self.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if self.sync is not None and "pipesync" in saved:
            self.sync.load_state_dict(saved["pipesync"])
        torch.set_rng_state(saved["rng"])

    @staticmethod
    def saved_weights(path: Path) -> Tensor:
        return flat_state(torch.load(f"{path}-0", weights_only=True)["model"])

    def end(self) -> Tensor:
        if self.sync is not None:
            self.sync.flush()
            self.sync.detach()
        return flat(self.model)


class FabricLoop(Loop):
    """A loop in Fabric's words."""

    def __init__(self, method: Method | None, settings: Settings, options: Options) -> None:
        super().__init__(method, settings, options)
        self.environment = dict(os.environ)
        strategy = "ddp" if method is None else STRATEGY_REGISTRY[method.name]["strategy"](**settings)
        precision: dict[str, Any] = {"precision": "32-true" if options.precision == "32" else options.precision}
        if options.precision == "16-mixed":  # which Fabric would quietly make bf16-mixed
            precision = {"plugins": [MixedPrecision("16-mixed", options.device, scaler_of(options))]}
        self.fabric = Fabric(accelerator=options.device, devices=options.ranks, strategy=strategy, **precision)
        self.fabric.launch()
        self.method = method
        self.model = self.make_network(replica_of_process(options))
        optimizers = optimizers_of(self.model, options)
        self.schedulers = [scheduler_of(optimizer, options) for optimizer in optimizers]
        if options.several:  # one by one
            self.called = self.fabric.setup_module(self.model)
            self.optimizers = [self.fabric.setup_optimizers(optimizer) for optimizer in optimizers]
        else:
            self.called, *self.optimizers = self.fabric.setup(self.model, *optimizers)

    def make_network(self, seed: int) -> nn.Sequential:
        return network(self.options, seed)

    def train_on(self, index: int, x: Tensor, y: Tensor) -> None:
        options, fabric = self.options, self.fabric
        step, within = divmod(index, options.accumulate)
        accumulating = within + 1 < options.accumulate
        turn = step % len(self.optimizers)
        optimizer = self.optimizers[turn]
        with fabric.no_backward_sync(self.called, enabled=accumulating):
            fabric.backward(loss_of(self.called(x), y) / options.accumulate)
        if accumulating:
            return
        if options.clip_norm is not None:
            norm = fabric.clip_gradients(self.called, optimizer, max_norm=options.clip_norm, error_if_nonfinite=False)
            self.norms.append(float(norm))
        elif options.clip_value is not None:
            fabric.clip_gradients(self.called, optimizer, clip_val=options.clip_value)
        pass_by(options, "step", self)
        optimizer.step()
        self.called.zero_grad()
        self.schedulers[turn].step()

    def progress(self) -> dict[str, Any]:
        named: dict[str, Any] = {"model": self.called}
        for index, (optimizer, scheduler) in enumerate(zip(self.optimizers, self.schedulers, strict=True)):
            named |= {f"optimizer {index}": optimizer, f"scheduler {index}": scheduler}
        return named

    def save(self, path: Path) -> None:
        self.fabric.save(path, self.progress())

    def load(self, path: Path) -> None:
        remainder = self.fabric.load(path, self.progress())
        assert list(remainder) in ([], ["pipesync"])

    @staticmethod
    def saved_weights(path: Path) -> Tensor:
        return flat_state(torch.load(path, weights_only=True)["model"])

    def end(self) -> Tensor:
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        self.scale = 1.0 if scaler is None else scaler.get_scale()
        if self.method is None:
            return flat(self.model)
        with self.fabric.strategy.consolidated():
            weights = flat(self.model)
        self.fabric.strategy.teardown()
        os.environ.update(self.environment)  # which teardown changes, as with any strategy
        return weights


def accelerator_of(method: Method | None, settings: Settings, options: Options, **given: Any) -> Accelerator:
    """Returns an Accelerator, whatever others there were in this process."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if options.timeout_s is not None:
        given["kwargs_handlers"] = [InitProcessGroupKwargs(timeout=timedelta(seconds=options.timeout_s))]
    if method is None:
        return Accelerator(cpu=options.device == "cpu", **given)
    return PipeSyncAccelerator(PipeSyncPlugin(method.name, **settings), **given)


class AccelerateLoop(Loop):
    """A loop in Accelerate's words."""

    def __init__(self, method: Method | None, settings: Settings, options: Options) -> None:
        super().__init__(method, settings, options)
        precision = {"32": "no", "bf16-mixed": "bf16"}[options.precision]
        self.accelerator = accelerator_of(
            method,
            settings,
            options,
            gradient_accumulation_steps=options.accumulate,
            mixed_precision=precision,
            **self.sharding(),
        )
        self.method = method
        self.model = network(options, replica_of_process(options))
        optimizers = optimizers_of(self.model, options)
        self.schedulers = [scheduler_of(optimizer, options) for optimizer in optimizers]
        self.called, *self.optimizers = self.accelerator.prepare(self.model, *optimizers)
        self.accelerator.register_for_checkpointing(*self.schedulers)

    def sharding(self) -> Settings:
        """Returns further arguments of the Accelerator."""
        return {}

    def train_on(self, index: int, x: Tensor, y: Tensor) -> None:
        options, accelerator = self.options, self.accelerator
        turn = index // options.accumulate % len(self.optimizers)
        optimizer = self.optimizers[turn]
        with accelerator.accumulate(self.called):
            accelerator.backward(loss_of(self.called(x), y))
            if not accelerator.sync_gradients:
                return
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if options.clip_norm is not None:
                self.norms.append(float(accelerator.clip_grad_norm_(trained, options.clip_norm)))
            elif options.clip_value is not None:
                accelerator.clip_grad_value_(trained, options.clip_value)
            pass_by(options, "step", self)
            optimizer.step()
            self.called.zero_grad()
            self.schedulers[turn].step()

    def save(self, path: Path) -> None:
        self.accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))

    @staticmethod
    def saved_weights(path: Path) -> Tensor:
        for file in path.glob("pipesync_*.bin"):
            torch.load(file, weights_only=True)
        return flat_state(load_file(path / "model.safetensors"))

    def end(self) -> Tensor:
        if self.method is not None:
            self.accelerator.consolidate()
        end_accelerator(self.accelerator)
        return flat(self.model)
