"""Pipe-SGD in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.faults.shutdown import AFTER_ERROR_S
from lightning_pipesync.core.parameters import NamedParameter, modules_with_parameters
from lightning_pipesync.core.torch_private import in_function_transform
from lightning_pipesync.methods.method import NETWORK_METRICS, MetricInfo, counted
from lightning_pipesync.methods.module_hook import EagerHook, ModuleHook
from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig
from lightning_pipesync.methods.pipe_sgd.gradient import NEW_PARAMETERS, check_new_parameters
from lightning_pipesync.methods.pipe_sgd.pipe import GradientPipe
from lightning_pipesync.methods.pipe_sgd.prediction import PredictedWeights
from lightning_pipesync.methods.settings import check_saved
from lightning_pipesync.methods.sync_method import SyncMethod

T = TypeVar("T")


class PipeSGD(SyncMethod):
    """The all-reduce of one step runs under the next ones: gradients are exactly ``staleness`` steps stale.

    :meth:`step` starts the all-reduce of the gradient just computed, waits for that of ``staleness`` steps before, and
    applies it. All ranks have the same weights at every step. The first ``staleness`` steps make no update.

    A plain loop::

        sync = PipeSGD(model, optimizer, compression="int8")    # all ranks now have rank 0's weights
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            sync.step()                                         # in place of optimizer.step()
        sync.drain()                                            # applies the last gradients
        sync.flush()                                            # buffers (BatchNorm) are those of rank 0
        validate(model)
        sync.resume()                                           # before further steps
        sync.detach()

    After :meth:`step` ``p.grad`` is what was applied. With ``pipeline_level=2`` and several backward passes before a
    step, all but the last belong under :meth:`no_sync`.

    Arguments, errors and further calls are those of :class:`SyncMethod`; the settings are in :class:`PipeSGDConfig`.
    """

    name = "pipe_sgd"
    config_type = PipeSGDConfig
    same_weights = True

    metric_infos = MappingProxyType(
        {
            "updates": MetricInfo("updates of the weights so far", over_ranks="same"),
            "staleness": MetricInfo("that of the last update", "steps", "same"),
            **NETWORK_METRICS,
        }
    )

    config: PipeSGDConfig

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        self._queue = CommQueue("pipesync-pipe-sgd", self.transport.device, self.transport.traffic)
        self._at_detach(self._queue.close)
        self._pipes: list[GradientPipe] = []
        for optimizer, of_optimizer in zip(self.optimizers, self._by_optimizer(parameters), strict=True):
            pipe = GradientPipe(self, optimizer, of_optimizer, self._queue)
            self._at_detach(lambda _, pipe=pipe: pipe.close())  # type: ignore[misc]
            self._pipes.append(pipe)
        self._used_at_flush: list[PredictedWeights] = []  # that were in use at a flush
        self._saved: nn.Module | None = None  # whose state_dict is being made
        self._used_at_saving: list[PredictedWeights] = []
        self._at_detach(lambda _: self._restore(check=False))
        if self.config.predicts:
            self._hook_module()

    def _hook_module(self) -> None:
        """Registers hooks: forward passes with gradients run at the predicted weights, state dicts hold the true ones.

        Within a transform of ``torch.func`` the weights stay what they are.
        """
        # Before the hooks of others, such as those of weight_norm, which read the weights. A model that is compiled as
        # a whole needs the hook of the whole model only: those of its submodules would break its graph.
        module, before_child = self._module, EagerHook(self._before_forward)
        hooks = [module.register_forward_pre_hook(ModuleHook(self._before_forward), prepend=True)]
        for child in modules_with_parameters(module):
            if child is not module:
                hooks.append(child.register_forward_pre_hook(before_child, prepend=True))
        saving, saved = ModuleHook(self._before_saving), ModuleHook(self._after_saving)
        loading = ModuleHook(self._before_loading)
        for child in module.modules():
            hooks.append(child.register_state_dict_pre_hook(saving))
            hooks.append(child.register_state_dict_post_hook(saved))
            hooks.append(child.register_load_state_dict_pre_hook(loading))
        self._remove_at_detach(hooks)

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not in_function_transform():
            self.use_predicted_weights()

    def _before_saving(self, module: nn.Module, *_: Any) -> None:
        if self._saved is None or self._saved is module:  # an earlier state_dict of it may have raised
            self._saved = module
            self._used_at_saving = self._restore()

    def _after_saving(self, module: nn.Module, *_: Any) -> None:
        if self._saved is module:
            self._saved = None
            for predicted in self._used_at_saving:
                predicted.use()

    def _before_loading(self, *_: Any) -> None:
        for pipe in self._pipes:
            pipe.predicted.forget()

    def _restore(self, check: bool = True) -> list[PredictedWeights]:
        """Restores the true weights; returns the predictions that were in use, see :meth:`PredictedWeights.restore`."""
        in_use = [pipe.predicted for pipe in self._pipes if pipe.predicted.in_use]
        for predicted in in_use:
            predicted.restore(check)
        return in_use

    @property
    def trains_written_weights(self) -> bool:
        return self.config.staleness == 0  # otherwise gradients in flight are of the weights before

    def use_predicted_weights(self) -> None:
        """Swaps in the weights after the updates in flight, as this rank predicts them.

        Every forward pass of the module or of a submodule calls this first, if gradients are enabled. Call it before
        reading parameters outside of a forward pass. Does nothing without a prediction.
        """
        if not self.flushed:
            self._saved = None
            for pipe in self._pipes:
                pipe.predicted.use()

    def restore_true_weights(self) -> None:
        """Swaps in the weights after the last update, which are the same on all ranks.

        A step does this for its own optimizer. With several optimizers, call it to read weights between their steps.

        Raises:
            RuntimeError: the predicted weights were written to, which would be lost.
        """
        self._restore()

    def begin_pass(self) -> None:
        self.use_predicted_weights()

    def end_pass(self) -> None:
        self.restore_true_weights()

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """Within it the parameters hold the true weights, to be read or written between a forward pass and the step."""
        restored = self._restore()
        try:
            yield
        finally:
            for predicted in restored:
                predicted.forget()  # the true weights may have been written to
                predicted.use()

    def _reduce(self, index: int, loss_scale: float | None) -> None:
        """Submits this step's gradient, and sets ``p.grad`` to the gradient that is about to be applied.

        That one is scaled by the same ``loss_scale``, and is not finite on all ranks if it was not on one: a scaler
        unscales and checks it.
        """
        self._used_at_flush.clear()
        if self._has_new_parameters:
            self._take_new_parameters()
        self._pipes[index].submit(1.0 if loss_scale is None else loss_scale)

    def _take_new_parameters(self) -> None:
        """Trains the parameters that were added to an optimizer, too; a collective call.

        In a step it is not: a rank that has none sends the flag of its gradient in place of this one.

        Raises:
            ValueError: some rank has none.
        """
        flags = self.transport.exchange_flags(NEW_PARAMETERS * self._has_new_parameters).wait()
        if not check_new_parameters(flags, self.transport.ranks):
            return
        for pipe, of_optimizer in zip(self._pipes, self._by_optimizer(self._agreed_parameters()), strict=True):
            pipe.set_parameters(of_optimizer)

    def _compare_loaded(self) -> None:
        if self.config.pipeline_level == 2:  # ranks may have started different segments, or none
            [pipe] = self._pipes
            if any(self.transport.exchange_flags(pipe.has_started).wait()):
                pipe.send_all()
        self._queue.wait_all()
        super()._compare_loaded()

    def _skip(self, index: int) -> None:
        self._pipes[index].skip_step()

    def clipped_along(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors whose ``grad`` is this rank's part of the gradients that were submitted last."""
        return [gradient for pipe in self._pipes for gradient in pipe.own_gradients(parameters)]

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        """Updates the weights by the gradient of ``staleness`` steps before, with the hyper-parameters of that step."""
        self.flushed = False
        pipe = self._pipes[index]
        with pipe.step():
            _, result = self.user_steps.update_by_method(index, update, pipe.apply)
        return result

    def drain(self, before_update: Callable[[Optimizer], object] = lambda _: None) -> None:
        """Applies all gradients in flight, in order; a collective call.

        Args:
            before_update: called when ``p.grad`` is about to be applied, for example to clip it.
        """
        for index, pipe in enumerate(self._pipes):
            self.record.reduced(index)  # what is applied is no new gradient, and has no loss scale
            self.record.unscaled(index, overflow=False, scaled=False)
            pipe.drain(before_update)
            self.record.restart(index)
        self.flushed = False

    def settle(self) -> None:
        self._queue.wait_all()

    def finish(self, before_update: Callable[[Optimizer], object]) -> None:
        if self.config.drain:
            self.drain(before_update)

    def give_up(self, timeout_s: float = AFTER_ERROR_S) -> str:
        self._restore()
        return "those after the last update, which all ranks have, without the gradients in flight"

    def flush(self) -> None:
        """Restores the true weights, which are the same on all ranks, and broadcasts rank 0's buffers; collective."""
        self._used_at_flush += self._restore()
        self._compare_loaded()  # and waits: broadcasts and all-reduces have one order on all ranks
        self._compare_weights()
        self._broadcast_buffers()
        self.flushed = True

    def resume(self) -> None:
        """Undoes :meth:`flush`: swaps the predicted weights in again if it was called between forward pass and step."""
        self.flushed = False
        for predicted in self._used_at_flush:
            predicted.use()
        self._used_at_flush.clear()

    def metrics(self) -> dict[str, float]:
        """See :meth:`Method.metrics`; with several optimizers, the updates of all, and the staleness of the first."""
        return {
            "updates": sum(pipe.pipeline.num_updates for pipe in self._pipes),
            "staleness": self._pipes[0].pipeline.staleness,
            **super().metrics(),
        }

    def summary(self, num_steps: int, before: Mapping[str, float]) -> str:
        updates = counted(self.metrics()["updates"] - before["updates"], "update")
        staleness = self._pipes[0].pipeline.staleness
        return f"{updates} in {counted(num_steps, 'step')}, with a staleness of {staleness} at the end"

    def state_dict(self) -> dict[str, Any]:
        """Returns the gradients in flight, with averages on rank 0 only, and the codec's residuals; a collective call.

        Optimizer states are not part of it: they are the same on all ranks, as without Pipe-SGD.
        """
        return {"settings": self._shape_settings(), "pipes": [pipe.state_dict() for pipe in self._pipes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned, after weights and optimizers were loaded; a collective call.

        Raises:
            ValueError: the state is of other settings.
        """
        present = self._shape_settings()
        check_saved(state["settings"], present, "to begin with an empty pipeline")
        self._queue.wait_all()
        self._take_new_parameters()  # such as those that a callback has thawed before the checkpoint
        for pipe, saved in zip(self._pipes, state["pipes"], strict=True):
            pipe.load_state_dict(saved)

    def _by_optimizer(self, parameters: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
        return [
            [parameter for parameter in parameters if parameter.group and parameter.group[0] == index]
            for index in range(len(self.optimizers))
        ]

    def _shape_settings(self) -> dict[str, Any]:
        """Returns the settings that determine the structure of :meth:`state_dict`."""
        config = self.config
        settings: dict[str, Any] = {
            "staleness": config.staleness,
            "delay_compensation": config.delay_compensation,
            "error_feedback": config.uses_error_feedback,
            **config.low_rank_settings,
        }
        if config.uses_error_feedback:
            names = ("bucket_mb", "pipeline_level", "segments")
            settings |= {"compression": str(config.compression), "topology": str(self.transport.topology)}
            settings |= {name: getattr(config, name) for name in names}
        return settings

    def _check_support(self) -> None:
        config = self.config
        if config.pipeline_level == 2 and len(self.optimizers) > 1:
            raise ValueError(
                f"pipeline_level=2 sends gradients in the backward pass, and with {len(self.optimizers)} optimizers "
                "it cannot know whose step follows: use pipeline_level=1."
            )
        for optimizer in self.optimizers:
            if config.reduces_learning_rate and not all("lr" in group for group in optimizer.param_groups):
                raise ValueError(
                    f"delay_compensation={config.delay_compensation!r} changes the learning rate, and "
                    f"{type(optimizer).__name__} has none: use delay_compensation='none'."
                )
        super()._check_support()
