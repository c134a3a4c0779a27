"""Strategies of methods that make the passes themselves: pipelines, of which each process has a part."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric
from typing_extensions import override

from lightning_pipesync.core.consistency import check_optimizers
from lightning_pipesync.core.private_names import with_attributes
from lightning_pipesync.core.rng import seeded
from lightning_pipesync.core.torch_private import map_tensors, mark_stepped
from lightning_pipesync.fabric.distribution import rank_zero_info, rank_zero_warn
from lightning_pipesync.fabric.private import scaler_of, unwrapped
from lightning_pipesync.lightning.distribution import is_param_in_hook_signature
from lightning_pipesync.lightning.private import (
    accumulate,
    accumulated,
    check_monitored_times,
    check_trainer,
    kept_local,
    run_hooks_before_step,
    saves_now,
    show_metrics,
    shown_metrics,
    without_rank,
)
from lightning_pipesync.lightning.strategy import PipeSyncStrategyMixin
from lightning_pipesync.lightning.submodule import Submodule, digest_of
from lightning_pipesync.lightning.sync import SyncStrategyMixin
from lightning_pipesync.methods.ea_pipe import EAPipe, EAPipeConfig
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.registry import METHODS

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision

#: Broadcasts an object from rank 0.
Broadcast = Callable[[Any], Any]
#: Callbacks that average the weights of a whole model.
AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")


class PipelineStrategyMixin(PipeSyncStrategyMixin[EAPipe]):
    """Translates the Trainer's hooks into the calls of a method that makes the passes itself: a pipeline.

    The LightningModule does not change. It holds an ``nn.Sequential``, whose layers are divided among the processes, or
    another submodule, which is traced and split, and computes its loss from that submodule's output. Every process
    loads the same batches. Rank 0 has the last stage: it runs ``training_step``, ``validation_step`` and so on, and
    logs their metrics. All ranks have the same metrics after each epoch, validation and checkpoint. ``trainer.predict``
    returns the predictions on rank 0.
    """

    config: EAPipeConfig
    _completes = True
    _num_evaluated = 0
    _num_closures: int | None = None  # that a step has run; None: none is under way
    _was_clipped = False  # in this update

    # --- set-up and end ---------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self._module
        self._start = (0, 0)
        check_trainer(trainer, self.precision_plugin)
        self._begin_to_attach(trainer)
        trainer.accelerator.setup(trainer)
        self.precision_plugin.convert_module(module)
        self._submodule = Submodule(module, self.config.module, traced=self.config.split_names is not None)
        self.model_to_device()
        self._until_teardown.enter_context(logging_on_rank_0(module, self.share_metrics, self.global_rank))
        if self._fitting:
            self.setup_optimizers(trainer)
            check_training(trainer, self.precision_plugin, self.name)
            self._until_teardown.enter_context(
                with_attributes(self.precision_plugin, clip_grad_by_norm=self._clip_by_norm)
            )
        self.setup_precision_plugin()
        broadcast_rng_state(self.broadcast)
        for metric in metrics_of(module):
            self._until_teardown.enter_context(kept_local(metric))  # only rank 0 updates it
        method = cast("type[EAPipe]", METHODS[self.name])
        clips_by_norm = self._fitting and trainer.gradient_clip_algorithm in (None, "norm")
        self.method = method(
            self._submodule.layers,
            None,
            (lambda parameters: self.optimizers[0]) if self._fitting else None,
            replace(self.config, clip_norm=(trainer.gradient_clip_val or None) if clips_by_norm else None),
            others=self._submodule.others,
            device=self.root_device,
            backend=self._traffic_backend,
        )
        if self._fitting:
            check_optimizers(self._transport.job, self.optimizers)
        self._check_checkpoint()

    @override
    def model_to_device(self) -> None:
        """Moves everything except the layers; the method moves those of this rank's stage."""
        parent, _, name = self._submodule.name.rpartition(".")
        owner = self._module.get_submodule(parent)
        setattr(owner, name, nn.Identity())
        self._module.to(self.root_device)
        setattr(owner, name, self._submodule.layers)

    def end_training(self) -> None:
        self.flush()
        if self.method is not None and not self._interrupted:
            self.method.gather()
            for optimizer in self.optimizers:  # so that rank 0 can save a whole checkpoint after the processes end
                state = self.optimizer_state(optimizer)
                if self.global_rank == 0:
                    unwrapped(optimizer).load_state_dict(state)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks see the samples of their pipeline, in the same order; in evaluation all samples."""
        whole = not self._trainer.training
        part, count = (0, 1) if whole else self.config.data_part(self.global_rank, self.world_size)
        return {"num_replicas": count, "rank": part}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if not isinstance(dataloader, DataLoader):
            return dataloader
        without_rank(dataloader)
        return self.resume_loader(dataloader) if self._trainer.training else dataloader

    # --- a training step --------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._completes = False
        try:
            yield
        finally:
            self._completes = True

    @override
    def training_step(self, batch: Any, *args: Any) -> Any:
        self._check_closure()
        step, trainer = self._module.training_step, self._trainer
        results: list[Any] = []

        def loss(output: Any, part: Callable[[Any], Any]) -> Tensor:
            result = self._submodule.result_of(partial(step, part(batch), *args), output)
            results[:] = [map_tensors(Tensor.detach, result)]
            return loss_of(result) / trainer.accumulate_grad_batches

        with self.precision_plugin.train_step_context():
            self.attached.feed(
                lambda: self._submodule.input_of(partial(step, batch, *args)),
                loss,
                completes=self._completes,
                digest=digest_of(batch),
            )
        if trainer.fit_loop.total_batch_idx == 0:
            rank_zero_info(self.attached.describe())
        return results[0] if results else torch.zeros(())

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Makes the backward pass of the next mini-batch in the schedule, and its update if one is due."""
        self.precision_plugin.pre_backward(closure_loss, self._module)
        complete = self.attached.backward()
        self.precision_plugin.post_backward(closure_loss, self._module)
        if complete:
            self._update()
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        self._add_callback(self._trainer, first=False)
        mark_stepped(optimizer)  # the first steps of a stage only fill the pipeline
        self._num_closures = 0
        try:
            return closure()
        finally:
            self._num_closures = None

    def _check_closure(self) -> None:
        """Raises a RuntimeError where ``optimizer_step`` of the user's leaves out a step, or runs a closure again."""
        if not self._completes:
            return
        if self._num_closures is None or self._num_closures > 0:
            raise RuntimeError(
                f"optimizer_step of {type(self._module).__name__} has run the closure "
                f"{'without a step of the optimizer' if self._num_closures is None else 'twice in a step'}. A pipeline "
                "updates its stages once in each step: call optimizer.step(closure=optimizer_closure) once for each "
                "batch, or accumulate by Trainer(accumulate_grad_batches=...)."
            )
        self._num_closures += 1

    def after_backward(self, optimizer: Optimizer) -> None:
        """Does nothing: a pipeline averages no gradients."""

    def _update(self) -> None:
        optimizer, norm = self.optimizers[0], self.attached.config.clip_norm
        self._was_clipped = False
        run_hooks_before_step(self.precision_plugin, self.lightning_module, optimizer)
        if norm is not None and not self._was_clipped:
            raise RuntimeError(
                f"A pipeline clips by the norm that Trainer(gradient_clip_val={norm!r}) sets in every update, and "
                f"configure_gradient_clipping of {type(self._module).__name__} has left it out: do not override it, or "
                "leave out gradient_clip_val."
            )
        self.attached.step(unwrapped(optimizer).step)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Only checks the norm: the method clips by that over all stages, after the backward pass of all of them."""
        self._was_clipped, norm = True, self.attached.config.clip_norm
        if clip_val != norm:
            raise RuntimeError(
                f"A pipeline clips by the norm that Trainer(gradient_clip_val={norm!r}) sets, "
                f"not by {clip_val!r}: do not override configure_gradient_clipping."
            )

    # --- evaluation and metrics -------------------------------------------------------------------------------------

    @override
    def validation_step(self, *args: Any) -> Any:
        return self._evaluate("validation_step", *args)

    @override
    def test_step(self, *args: Any) -> Any:
        return self._evaluate("test_step", *args)

    @override
    def predict_step(self, *args: Any) -> Any:
        return self._evaluate("predict_step", *args)

    def _evaluate(self, name: str, *args: Any) -> Any:
        """Runs the master model on all ranks, and the step on rank 0; returns its result there, None elsewhere."""
        step = partial(getattr(self.lightning_module, name), *args)
        self._num_evaluated += 1
        drawn = seeded(self.config.seed, -self._num_evaluated, None, self.root_device)
        with drawn, self.precision_plugin.val_step_context():
            output = self.attached.infer(lambda: self._submodule.input_of(step))
            return self._submodule.result_of(step, output) if self.global_rank == 0 else None

    def flush(self) -> None:
        """Drains the pipeline, puts the master's weights into the module, and broadcasts rank 0's metrics."""
        if self.method is not None and not self._interrupted:
            self.method.flush(self._update)
            self.share_metrics()

    def share_metrics(self) -> None:
        """Broadcasts rank 0's logged metrics and the states of its metric objects."""
        if not self._interrupted:
            adopt_metrics(self._trainer, self.broadcast)

    def end_batch(self) -> None:
        if saves_now(self._trainer):
            self.flush()

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns ``tensor`` unchanged: only rank 0 logs."""
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns ``tensor`` with a leading dimension of 1: only rank 0 runs steps."""
        return tensor.unsqueeze(0)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions: list[bool] = [False] * self.world_size
        dist.all_gather_object(decisions, bool(decision))
        return sum(decisions) == self.world_size if all else any(decisions)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the whole master model, gathered from all stages; after an error it is not gathered."""
        if self.method is not None and not self._interrupted:
            self.flush()
            self.method.gather()
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Saves the checkpoint, unless after an error: the layers of the other stages may then be lost."""
        if self.method is None or not self._interrupted:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            rank_zero_warn(
                f"After an error {filepath} is not saved: the layers of the other stages are in other processes. "
                "Resume from the previous checkpoint."
            )

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer state of the whole model; each parameter's is the mean over its replicas."""
        merged: dict[str, Any] = unwrapped(optimizer).state_dict()
        if self.method is None or self._interrupted:
            return merged
        states = self._transport.job.collect_states({"state": self.method.optimizer_state()})
        if states is not None and any(part["state"] for part in states):
            merged["state"] = {index: values for part in states for index, values in part["state"].items()}
        return merged


def check_training(trainer: Trainer, precision: Precision, name: str) -> None:
    """Checks that a pipeline, the strategy of that name, can train the Trainer's module."""
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            f"strategy={name!r} makes the backward passes itself, outside of training_step: set "
            "self.automatic_optimization = True."
        )
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"strategy={name!r} runs training_step twice for each batch, which needs a batch as its argument, not the "
            "loader's iterator: write training_step(batch, batch_idx)."
        )
    if scaler_of(precision) is not None:
        raise ValueError(
            "precision='16-mixed' scales the loss, and the mini-batches in flight would have different loss scales: "
            "set precision='bf16-mixed' or '32-true'."
        )
    check_monitored_times(trainer, name)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(cls.__name__ in AVERAGING for cls in type(callback).__mro__):
            raise ValueError(
                f"{type(callback).__name__} averages the weights of a whole model, and each process has only some of "
                f"its layers: remove the callback. The weights of strategy={name!r} are an average already."
            )


def broadcast_rng_state(broadcast: Broadcast) -> None:
    """Broadcasts rank 0's random states, so that data sets and steps draw the same numbers on all ranks."""
    of_torch, of_numpy, of_python = broadcast((torch.get_rng_state(), np.random.get_state(), random.getstate()))
    torch.set_rng_state(of_torch)
    np.random.set_state(of_numpy)
    random.setstate(of_python)


def metrics_of(module: nn.Module) -> list[Metric]:
    return [child for child in module.modules() if isinstance(child, Metric)]


def logging_on_rank_0(module: LightningModule, share: Callable[[], object], rank: int) -> AbstractContextManager[None]:
    """Context manager in which rank 0 alone logs, and ``share`` follows the module's ``on_train_epoch_end``.

    ModelCheckpoint and EarlyStopping, which read what the hook has logged, come next. Epoch-end hooks run on all ranks,
    since they may change the layers. Only rank 0 completes steps, so on other ranks the hooks find no results of steps,
    and their errors say so.
    """

    def run(name: str, hook: Callable[[], None]) -> None:
        try:
            hook()
        except Exception as error:
            if rank == 0:
                raise
            raise RuntimeError(
                f"{name} raised {type(error).__name__} on a rank that completes no steps: {error}. The hook runs on "
                "all ranks, and only rank 0 has the results of steps: use them only if self.trainer.is_global_zero."
            ) from error
        if name == "on_train_epoch_end":
            share()

    names = [f"on_{stage}_epoch_end" for stage in ("train", *(("validation", "test", "predict") if rank else ()))]
    hooks: dict[str, Any] = {name: partial(run, name, getattr(module, name)) for name in names}
    return with_attributes(module, **hooks, **({"log": lambda *_, **__: None} if rank else {}))


def adopt_metrics(trainer: Trainer, broadcast: Broadcast) -> None:
    """Broadcasts rank 0's logged metrics and the states of its metric objects."""
    metrics = metrics_of(trainer.lightning_module)
    mine = shown_metrics(trainer), [accumulated(metric) for metric in metrics]
    shown, states = broadcast(map_tensors(Tensor.cpu, mine))
    if trainer.global_rank != 0:
        show_metrics(trainer, shown)
        for metric, (state, updates) in zip(metrics, states, strict=True):
            accumulate(metric, map_tensors(methodcaller("to", metric.device), state), updates)


def loss_of(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor):
        raise RuntimeError(f"training_step must return a loss for every batch of a pipeline, got {result!r}.")
    return loss


def mixin_of(method: type[Method]) -> tuple[type, Collection[str]]:
    """Returns the mixin of a method's strategy, and the settings that the Trainer's arguments replace."""
    return PipelineStrategyMixin if method.makes_passes else SyncStrategyMixin, method.config_type.set_by_trainer
