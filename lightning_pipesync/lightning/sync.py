"""Strategies of methods that synchronize what Lightning's loop computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_pipesync.core.buckets import unshare_storage
from lightning_pipesync.core.comm.exchange import exchange_fused
from lightning_pipesync.core.consistency import check_same, raise_on_all_ranks
from lightning_pipesync.core.guarded_states import at_hand
from lightning_pipesync.core.private_names import overrides, with_attributes
from lightning_pipesync.data.loaders import batch_size_before_injection
from lightning_pipesync.data.order import check_num_samples, in_order, replaceable_order
from lightning_pipesync.fabric.distribution import rank_zero_warn
from lightning_pipesync.fabric.private import scaler_of, unwrapped
from lightning_pipesync.lightning.distribution import is_param_in_hook_signature
from lightning_pipesync.lightning.joining import JoiningMixin
from lightning_pipesync.lightning.private import (
    check_agreements,
    check_trainer,
    check_uneven_batches,
    has_swa,
    no_broadcast_of_signals,
    run_hooks_before_step,
    saves_now,
    writes_average_within_training,
)
from lightning_pipesync.lightning.uneven import UnevenBatches
from lightning_pipesync.methods.method import PIECE_MB, parameters_of
from lightning_pipesync.methods.step import check_unscaling
from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.training.clipping import Step, clip_norm, clip_value
from lightning_pipesync.training.session import MethodPlan
from lightning_pipesync.training.sharded_state import whole_state

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


#: The name of the barrier at which a validation begins, before the hook of that name.
VALIDATION_LOADERS = "val_dataloader()"

#: What this rank's weights are if a flush has found that ranks hold different ones.
RIGHT_OR_WRONG = "those of rank 0, right or wrong, as the ranks hold different ones: resume from an earlier checkpoint"

#: Hooks of modules and callbacks between a step and the next forward pass, which may read and write weights.
HOOKS = ("optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_train_batch_start")


class SyncStrategyMixin(JoiningMixin):
    """Translates the Trainer's hooks into the calls of a :class:`SyncMethod`.

    The module is not wrapped: ``training_step`` runs on it directly. The method synchronizes its gradients and weights.
    """

    _uneven_batches: UnevenBatches
    _flushed_to_save = False
    _hooks_follow = False  # a step, which read its weights, or write to them
    _weights_after_error = ""  # what they are, once a checkpoint was saved after an error

    # --- set-up and end ---------------------------------------------------------------------------------------------

    @override
    def configure_ddp(self) -> None:
        """Does nothing: the module is not wrapped."""

    @override
    def setup(self, trainer: Trainer) -> None:
        self._begin_to_join(trainer)
        # What follows may make the loaders, before there is a method.
        self._start, self._weights_after_error = (0, 0), ""
        self._uneven_batches = UnevenBatches(self.world_size, lambda *asked: self.attached.data.ask(*asked))
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        module = self._module
        check_trainer(trainer, self.precision_plugin)
        if self.config.partition == "work_queue":
            check_uneven_batches(trainer)
        self._begin_to_attach(trainer)
        self._check(module, self.optimizers)
        self.method = method = self._plan.attach(module, self.optimizers)
        self._prepare_to_join(method)
        if not method.in_lockstep:
            check_agreements(trainer, self.name)
        if self._may_be_uneven(method):
            self._until_teardown.enter_context(no_broadcast_of_signals(trainer))
        if self.config.partition == "work_queue":
            self._until_teardown.enter_context(self._uneven_batches.pace_schedulers(module))
            self._until_teardown.enter_context(self._uneven_batches.limited(trainer))
        owners = [module, *trainer.callbacks]  # type: ignore[attr-defined]  # libraries' own hooks wait by themselves
        self._hooks_follow = self.config.wait_for_hooks and any(overrides(owner, *HOOKS) for owner in owners)
        self._check_checkpoint()
        self._follow_averages(trainer, method)
        # The plugin would clip p.grad, which may not hold the gradient yet, or never does.
        clipping = {"clip_grad_by_norm": self._clip_by_norm, "clip_grad_by_value": self._clip_by_value}
        self._until_teardown.enter_context(with_attributes(self.precision_plugin, **clipping))

    def _follow_averages(self, trainer: Trainer, method: SyncMethod) -> None:
        """Makes running averages of callbacks, such as WeightAveraging, the same on all ranks when they are read."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        problem = None
        if not method.trains_written_weights and writes_average_within_training(trainer):
            problem = ValueError(
                f"StochasticWeightAveraging writes the average before its pass for BatchNorm's statistics, and "
                f"strategy={self.name!r} would change it after that: use EMAWeightAveraging or WeightAveraging, or "
                "strategy='ddp'."
            )
        if self._is_sharded and has_swa(trainer):
            problem = self._refusal_of_average("StochasticWeightAveraging")
        raise_on_all_ranks(method.transport.job, problem)
        values = ((callback, value) for callback in callbacks for value in vars(callback).values())
        found = [(callback, value) for callback, value in values if isinstance(value, AveragedModel)]
        names = ", ".join(type(callback).__name__ for callback, _ in found) or "none"
        check_same(method.transport, [("the callbacks that average weights", names)])
        for _, averaged in found:
            tensors = [*averaged.parameters(), *averaged.buffers()]  # copied before all ranks had rank 0's weights
            with method.transport.traffic.beside_steps():
                exchange_fused(tensors, PIECE_MB, method.transport.broadcast)
            method.follow(averaged)

    @override
    def on_train_end(self) -> None:
        """Restores the whole state of the optimizers, for a checkpoint that is saved after the training."""
        super().on_train_end()
        if self.method is not None and not self._interrupted:
            self.method.return_optimizer_states()

    def _check(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers if self._scaler is not None else ():
            check_unscaling(optimizer, "precision='16-mixed'", f"strategy={self.name!r}")
        injection = self.config.injection
        if injection is not None and is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            raise ValueError(
                f"injection={injection} cannot reach the batches of a training_step(dataloader_iter), which takes "
                "them from the loader itself: write training_step(batch, batch_idx), or set injection=None."
            )

    @property
    def has_ended(self) -> bool:
        return self._uneven_batches.are_used_up

    @property
    def _plan(self) -> MethodPlan:
        return MethodPlan(
            self.name,
            self.config,
            self.num_processes,
            self._traffic_backend,
            loads_data=True,
            steps_per_epoch=self._steps_per_epoch,
            replicas_of=self._replicas_of,
            num_readers=self._place_of_data[1],
        )

    # --- data -------------------------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.method is not None and self._trainer.training:
            batch = self.method.data.inject(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Sets the method's order and batch size in the training loader; a resumed run continues within its epoch."""
        dataloader = super().process_dataloader(dataloader)
        if not self._trainer.training or not isinstance(dataloader, DataLoader):
            return dataloader
        settings, (rank, world_size) = self.config, self._place_of_data
        keeps_order = self._overfitting
        if self._place is not None and not keeps_order:
            return self.resume_loader(self._place.divided(dataloader, settings))
        order = None if keeps_order else replaceable_order(dataloader, settings, rank, world_size)
        if settings.partition == "work_queue":
            return self.resume_loader(self._uneven_batches.with_work_queue(dataloader, order))
        if settings.partition == "seldp" or settings.injection is not None:
            check_num_samples(dataloader, world_size)
        samples = batch_size_before_injection(dataloader, settings.injection, world_size)
        limit = self._trainer.limit_train_batches
        return self.resume_loader(in_order(dataloader, settings, order, samples, limit))

    # --- a training step --------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.attached.begin_pass()  # the step may read weights outside of any module's forward pass
        result = super().training_step(*args, **kwargs)
        if not self._automatic:
            self.attached.end_pass()  # its optimizers have stepped; callbacks may read the weights next
        return result

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(*args, **kwargs)
        if self.method is not None and self._automatic:
            self.method.end_pass()  # this was the only graph, and a step need not follow
        return loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        method = self.attached
        # LearningRateFinder replaces all callbacks, and expects its callback as the first.
        self._add_callback(self._trainer, first=False)

        def compute() -> Any:
            result = closure()
            if result is None and self._automatic:  # no backward pass: Lightning neither unscales nor steps
                method.reduce(optimizer)
            else:
                method.reduce(optimizer, self._scaler, unscale=False)  # Lightning unscales next
            return result

        result = method.step(partial(super().optimizer_step, optimizer, compute, model, **kwargs), optimizer)
        if self._hooks_follow:
            method.synchronize()
        return result

    def after_backward(self, optimizer: Optimizer) -> None:
        self.attached.reduce(optimizer, self._scaler)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Context manager that accumulates gradients without communication."""
        with nullcontext() if self.method is None else self.method.no_sync():
            yield

    def flush(self) -> None:
        if self.method is not None and not self._interrupted:
            self.method.flush()
            self._flushed_to_save = False

    @override
    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks: before a validation makes its loaders, also for those that need others' gradients."""
        if name == VALIDATION_LOADERS and self.method is not None and self._may_be_uneven(self.method):
            self.flush()
        super().barrier(name)

    def resume(self) -> None:
        if self.method is not None:
            self.method.resume()
        super().resume()

    def end_batch(self) -> None:
        super().end_batch()
        # A ModelCheckpoint begins with a barrier, at which ranks would wait for those that need their gradients.
        if self.method is not None and not self.method.in_lockstep and saves_now(self._trainer):
            self.flush()

    def end_training(self) -> None:
        if self.method is not None and not self._interrupted:
            self.method.finish(partial(run_hooks_before_step, self.precision_plugin, self.lightning_module))
        self.flush()

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        step = self._step_to_clip(optimizer)
        clip_norm([step], parameters_of(optimizer), clip_val)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        step = self._step_to_clip(optimizer)
        clip_value([step], parameters_of(optimizer), clip_val)

    def _step_to_clip(self, optimizer: Optimizer) -> Step:
        """Returns the step of ``optimizer``, after its gradient is reduced: with manual optimization it may not be."""
        optimizer = unwrapped(optimizer)
        self.attached.reduce(optimizer, self._scaler, unscale=False)
        return self.attached, optimizer

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.method is not None and self._interrupted:
            if not self._weights_after_error:  # what is in flight ends with the first checkpoint
                words = self.method.give_up()
                self._weights_after_error = RIGHT_OR_WRONG if self.method.weights_differ else words
        elif self.method is not None and not self.method.flushed:
            self.flush()
            self._flushed_to_save = True  # saving may interrupt a step, which resumes afterwards
        state = super().lightning_module_state_dict()
        return state if self.method is None else unshare_storage(state)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.method is not None and self._interrupted and not self._is_sharded:
            rank_zero_warn(
                f"{filepath} is saved after an error, by this rank alone: its weights are {self._weights_after_error}. "
                "Any strategy can resume from it."
            )
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.method is not None and self._flushed_to_save:
            self.method.resume()
            self._flushed_to_save = False

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the whole state, as DDP's optimizer would have it, on every rank."""
        if self.method is None or not (self.method.shards_optimizer_state or self._is_sharded):
            return super().optimizer_state(optimizer)
        if self._interrupted:
            rank_zero_warn(
                "The checkpoint is saved after an error, when other ranks may be gone. Each rank has only a part of "
                "the optimizer's state, so the checkpoint has none: a run that resumes from it starts with a new "
                "optimizer state."
            )
            with at_hand(unwrapped(optimizer)):
                return super().optimizer_state(optimizer)
        return whole_state(optimizer, self.method.optimizer_state_dict(unwrapped(optimizer)))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _may_be_uneven(self, method: SyncMethod) -> bool:
        """Whether ranks may have taken different numbers of steps."""
        return not method.in_lockstep or self.config.partition == "work_queue"

    def _steps_per_epoch(self) -> int | None:
        trainer = self._trainer
        batches = trainer.num_training_batches
        return None if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches)

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return scaler_of(self.precision_plugin)

    @property
    def _automatic(self) -> bool:
        return self._module.automatic_optimization
