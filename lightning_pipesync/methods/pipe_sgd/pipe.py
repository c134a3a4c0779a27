"""One optimizer and its gradients in flight (Pipe-SGD, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.core.torch_private import mark_stepped
from lightning_pipesync.methods.gradients.backpipe import BackPipe
from lightning_pipesync.methods.hyperparameters import Hyperparameters, in_use
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.pipe_sgd.algorithm import Pipeline
from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig
from lightning_pipesync.methods.pipe_sgd.gradient import GradientInFlight, GradientLayout
from lightning_pipesync.methods.pipe_sgd.prediction import PredictedWeights, TrialStep
from lightning_pipesync.methods.step import SCALER_RECIPE
from lightning_pipesync.methods.sync_method import SyncMethod


class GradientPipe:
    """Submits the gradient of each step, and updates the weights by the gradient of ``staleness`` steps before."""

    def __init__(
        self,
        sync: SyncMethod,
        optimizer: Optimizer,
        parameters: Sequence[NamedParameter],
        queue: CommQueue,
    ) -> None:
        self.optimizer, self._queue = optimizer, queue
        self._sync, self._transport = sync, sync.transport
        self._config: PipeSGDConfig = sync.config
        self.pipeline: Pipeline[GradientInFlight] = Pipeline(self._config.staleness, self._config.warmup_steps)
        self._backpipe = BackPipe(
            queue,
            may_start=lambda parameter: sync.syncing,
            before_first=self._before_first,
            started=lambda index: self._backpipe.buckets[index].note_gradients(),
            outdated=self._refuse_outdated,
        )
        self._failed, self._num_skipped = False, 0
        self._started: GradientInFlight | None = None  # the all-reduce of some of its buckets has started
        self._due: GradientInFlight | None = None  # about to be applied
        self._in_grad: GradientInFlight | None = None  # p.grad are views of its buffers
        self.predicted = PredictedWeights(optimizer, self._expected_steps)
        self._set_layout(parameters)

    @property
    def has_started(self) -> bool:
        """Whether the all-reduce of some of this step's gradient has started."""
        return self._started is not None

    def own_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors whose ``grad`` is this rank's part of the gradient that was submitted last."""
        in_flight = self.pipeline.in_flight
        return in_flight[-1].own_holders(parameters) if in_flight else []

    def set_parameters(self, parameters: Sequence[NamedParameter]) -> None:
        """Sets the parameters of later gradients; those in flight stay as they are. A collective call."""
        if self._config.pipeline_level == 2:  # ranks may have started different numbers of segments
            self._start_all().wait()
        self._set_layout(parameters)

    def send_all(self) -> None:
        """Starts the all-reduce of all segments of this step's gradient, since some rank has started some."""
        self._backpipe.start_rest()
        self._queue.start_finishing()

    def submit(self, loss_scale: float) -> None:
        """Submits this step's gradient, and sets ``p.grad`` to the gradient that is about to be applied.

        In the first steps there is none: ``p.grad`` is then zero, and no update is made.
        """
        self._check()
        self._check_written()
        gradient = self._start_all()
        self.predicted.forget()
        grad_is_reused = self._in_grad is not None  # the gradient was added to, and is a view of a buffer
        gradient.submit(self.optimizer, loss_scale, self.pipeline.num_updates, self._num_skipped, grad_is_reused)
        self.pipeline.submit(gradient)
        if (due := self.pipeline.due) is not None:
            self._set_gradients(due, loss_scale)
        else:
            for parameter in parameters_of(self.optimizer):
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter.grad)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager around the user's step, in which :meth:`apply` updates the weights.

        Raises:
            RuntimeError: it did not, and the gradient that was due is finite: a loss scaler that looks at this rank's
                gradient would make this rank alone skip the update.
        """
        self._check()
        try:
            yield
            if self._due is not None and self._due.is_finite():
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} made no update within step(), as with a loss scaler that has "
                    f"looked at this rank's own gradient only. {SCALER_RECIPE}"
                )
        except BaseException:
            self._failed = True
            raise
        mark_stepped(self.optimizer)
        self.end_step()

    def apply(self, optimizer_step: Callable[[], object]) -> None:
        """Updates the weights by the gradient that is due, if there is one (Algorithm 1, line 5)."""
        if self._due is None:
            return
        self.predicted.forget()  # a forward pass may have run since the gradient was submitted
        late = self.pipeline.num_updates - self._due.num_updates
        later = [gradient.hyperparameters for gradient in self.pipeline.in_flight]
        hyperparameters = self._compensated(self._due, late)
        allowed = self._sync.user_steps.allowing(self.optimizer)
        with profiled("update"), allowed, in_use(self.optimizer, hyperparameters, later):
            optimizer_step()
        self.pipeline.count_update(self._due.num_updates)
        self._due = None

    def skip_step(self) -> None:
        """Ends a step that the user has skipped after its gradient was submitted."""
        self._num_skipped += 1
        self.end_step()

    def end_step(self) -> None:
        self._due = None
        self.pipeline.end_step()

    def drain(self, before_update: Callable[[Optimizer], object]) -> None:
        """Applies all gradients in flight, in order; a collective call."""
        self.predicted.forget()
        try:
            while self.pipeline.in_flight:
                self._set_gradients(self.pipeline.in_flight[0], loss_scale=1.0)
                if self._due is not None and (self._due.loss_scale == 1.0 or self._due.is_finite()):
                    before_update(self.optimizer)
                    self.apply(self.optimizer.step)
        finally:
            self._due = None

    def close(self) -> None:
        self._backpipe.remove_hooks()

    def state_dict(self) -> dict[str, Any]:
        """Returns the gradients in flight, the counters and the codec's residuals; a collective call."""
        pipeline = self.pipeline
        return {
            "steps": [pipeline.num_steps, pipeline.num_updates, pipeline.staleness],
            "in_flight": [gradient.state_dict() for gradient in pipeline.in_flight],
            **self._layout.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned; a collective call."""
        self.predicted.forget()
        pipeline = self.pipeline
        pipeline.num_steps, pipeline.num_updates, pipeline.staleness = state["steps"]
        pipeline.in_flight.clear()
        for saved in state["in_flight"]:
            gradient = GradientInFlight(self._layout)
            gradient.load_state_dict(saved)
            pipeline.submit(gradient)
        self._layout.load_state_dict(state)

    def _set_layout(self, parameters: Sequence[NamedParameter]) -> None:
        self._layout = GradientLayout(parameters, self._config, self._transport)
        self._backpipe.index_of = self._layout.index_of
        if self._config.pipeline_level == 2:
            self._backpipe.hook_gradients(parameter.tensor for parameter in parameters)
        self.predicted.names = {id(parameter.tensor): parameter.name for parameter in parameters}

    def _expected_steps(self) -> list[TrialStep]:
        """Returns the updates in flight, as this rank predicts them."""
        if not self._config.predicts:
            return []
        expected = [gradient for gradient in self.pipeline.in_flight if gradient.own_is_finite]
        return [TrialStep(gradient.own, gradient.hyperparameters) for gradient in expected]

    def _before_first(self) -> None:
        # A zero_grad() that sets gradients to zero keeps the views, and this step's gradient is added to them.
        if self._in_grad is not None and not self._in_grad.is_in_grad():
            self._in_grad.release()
            self._in_grad = None
        self._started = GradientInFlight(self._layout)
        self._backpipe.buckets = self._started.buckets

    def _refuse_outdated(self) -> None:
        raise RuntimeError(
            "pipeline_level=2 has sent this gradient already, and a further backward pass changes it: put all backward "
            "passes of a step but the last under no_sync() (in a LightningModule: "
            "self.trainer.strategy.block_backward_sync()), or use pipeline_level=1."
        )

    def _start_all(self) -> GradientInFlight:
        """Starts the all-reduce of all segments of this step's gradient, and returns it."""
        self.send_all()
        gradient, self._started = self._started, None
        self._backpipe.end_step()
        assert gradient is not None
        for bucket in gradient.buckets:
            bucket.forget_gradients()
        return gradient

    def _set_gradients(self, due: GradientInFlight, loss_scale: float) -> None:
        """Waits for the oldest gradient in flight, and sets ``p.grad`` to it (Algorithm 1, lines 3 and 4)."""
        due.wait()
        self._due = self.pipeline.retire()
        due.own = {}
        due.set_gradients(self.optimizer, loss_scale)
        if self._in_grad is not None:
            self._in_grad.release()
        self._in_grad = due

    def _check(self) -> None:
        if self._failed:
            raise RuntimeError(
                "An earlier step ended with an error on this rank, and the other ranks may have taken it: detach, and "
                "begin anew from a checkpoint."
            )

    def _check_written(self) -> None:
        for bucket in [] if self._started is None else self._started.buckets:
            bucket.check_unwritten(
                lambda parameter: self.predicted.names[id(parameter)],
                "pipeline_level=2 has sent it by then",
                ", or use pipeline_level=1",
            )

    def _compensated(self, gradient: GradientInFlight, late: int) -> Hyperparameters:
        """Returns the hyper-parameters of the gradient's step, with a learning rate for being ``late`` updates late."""
        if not self._config.reduces_learning_rate:
            return gradient.hyperparameters
        if self._config.delay_compensation == "staleness":
            return [{**group, "lr": group["lr"] / max(1, late)} for group in gradient.hyperparameters]
        squared = gradient.squared_distance()
        largest = self._config.distance_constant / squared if squared else float("inf")
        return [{**group, "lr": min(group["lr"], largest)} for group in gradient.hyperparameters]
