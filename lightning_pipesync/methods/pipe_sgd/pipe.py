"""One optimizer and its gradients in flight (Pipe-SGD, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import mark_stepped
from lightning_pipesync.methods.gradients.hyperparameters import Hyperparameters, in_use
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.pipe_sgd.algorithm import Pipeline
from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig
from lightning_pipesync.methods.pipe_sgd.gradient import GradientInFlight
from lightning_pipesync.methods.pipe_sgd.gradient_plan import GradientPlan
from lightning_pipesync.methods.pipe_sgd.prediction import PredictedWeights, TrialStep
from lightning_pipesync.methods.step import SCALER_RECIPE
from lightning_pipesync.methods.user_steps import StepGuard, is_skipped, replaced_step

T = TypeVar("T")


class GradientPipe:
    """Submits the gradient of each step, and updates the weights by the gradient of ``staleness`` steps before.

    Args:
        optimizer: the user's own.
        parameters: its parameters, in the order of registration.
        config: the settings.
        queue: runs the all-reduces.
        transport: the way to the other ranks.
        guard: allows the steps that are taken through this object.

    Attributes:
        optimizer: the user's own.
        pipeline: the gradients in flight.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[NamedParameter],
        config: PipeSGDConfig,
        queue: CommQueue,
        transport: Transport,
        guard: StepGuard,
    ) -> None:
        self.optimizer, self._config = optimizer, config
        self._queue, self._transport = queue, transport
        self._guard = guard
        self.pipeline: Pipeline[GradientInFlight] = Pipeline(config.staleness, config.warmup_steps)
        self._submitted = False  # the gradient of this step; ``p.grad`` is then what will be applied
        self._failed = False
        self._started: GradientInFlight | None = None  # the all-reduce of some of its segments has started
        self._due: GradientInFlight | None = None  # about to be applied
        self._in_grad: GradientInFlight | None = None  # p.grad are views of its buffers
        self._predicted = PredictedWeights(optimizer) if config.predicts else None
        self._make_plan(parameters)

    @property
    def has_predicted_weights(self) -> bool:
        """Whether the parameters hold the predicted weights."""
        return self._predicted is not None and self._predicted.in_use

    def use_predicted_weights(self) -> None:
        """Swaps in the weights after the updates in flight, as this rank predicts them."""
        if self._predicted is not None and not self._predicted.in_use:
            expected = [gradient for gradient in self.pipeline.in_flight if gradient.own.is_finite]
            self._predicted.use([TrialStep(gradient.own.values, gradient.hyperparameters) for gradient in expected])

    def restore_true_weights(self, check: bool = True) -> None:
        """Swaps in the weights after the last update, which are the same on all ranks."""
        if self._predicted is not None:
            self._predicted.restore(check)

    def forget_prediction(self) -> None:
        """Restores the true weights and drops the prediction, since the weights or the gradients in flight change."""
        if self._predicted is not None:
            self._predicted.forget()

    def own_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors whose ``grad`` is this rank's part of the gradient that was submitted last."""
        in_flight = self.pipeline.in_flight
        return in_flight[-1].own.grad_holders(parameters) if in_flight else []

    def set_parameters(self, parameters: Sequence[NamedParameter]) -> None:
        """Sets the parameters of later gradients; those in flight stay as they are. A collective call."""
        if self._config.pipeline_level == 2:  # ranks may have started different numbers of segments
            started = self._started or self._new_gradient()
            started.send_all()
            started.wait()
            self._started = None
        self._make_plan(parameters)

    def gradient_is_ready(self, parameter: Tensor, send: bool) -> None:
        """Starts the all-reduce of the segment whose last gradient this is, if ``send`` and at level 2."""
        if not send or self._config.pipeline_level == 1:
            return
        if self._started is None:
            self._started = self._new_gradient()
        self._started.is_ready(parameter)

    @property
    def has_started(self) -> bool:
        """Whether the all-reduce of some segments of this step's gradient has started."""
        return self._started is not None

    def send_all(self) -> None:
        """Starts the all-reduce of all segments of this step's gradient, since some rank has started some."""
        self._started = self._started or self._new_gradient()
        self._started.send_all()

    def submit(self, loss_scale: float) -> None:
        """Submits this step's gradient, and sets ``p.grad`` to the gradient that is about to be applied.

        In the first steps there is none: ``p.grad`` is then zero, and no update is made.

        Raises:
            RuntimeError: a peer is lost.
        """
        self._check()
        gradient = self._started or self._new_gradient()
        self._started = None
        self.forget_prediction()
        grad_is_reused = self._in_grad is not None  # the gradient was added to, and is a view of a buffer
        gradient.start(self.optimizer, loss_scale, self.pipeline.num_updates, grad_is_reused)
        self.pipeline.submit(gradient)
        self._submitted = True
        if (due := self.pipeline.due) is not None:
            self._set_gradients(due, loss_scale)
        else:
            for parameter in parameters_of(self.optimizer):
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter.grad)

    def run(self, update: Callable[[], T] | None, complete: Callable[[bool], object]) -> T | None:
        """Runs ``update``; the ``optimizer.step()`` within it applies the gradient that is due, if there is one.

        Args:
            update: calls ``optimizer.step()``; None: is ``optimizer.step``.
            complete: called before the update: the gradient must be complete, and is submitted if the argument is True.

        Raises:
            RuntimeError: ``update`` did not step the optimizer, and the gradient that was due is finite: a loss scaler
                that looks at this rank's own gradient would have this rank alone skip the update.
        """
        self._check()
        optimizer_step = self.optimizer.step

        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            result = None if closure is None else closure()
            complete(update is None or closure is not None)
            if not is_skipped(self.optimizer):
                self._apply(lambda: optimizer_step(**kwargs))
            return result

        try:
            with self._guard.stepping(), replaced_step(self.optimizer, step):
                result = step() if update is None else update()
            if not self._submitted or (self._due is not None and self._due.is_finite()):
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} made no update within step(), as with a loss scaler that has "
                    f"looked at this rank's own gradient only. {SCALER_RECIPE}"
                )
        except BaseException:
            self._failed = True
            raise
        mark_stepped(self.optimizer)
        self.end_step()
        return result

    def drain(self, before_update: Callable[[Optimizer], object]) -> None:
        """Applies all gradients in flight, in order; a collective call."""
        self.forget_prediction()
        self._submitted = True
        try:
            while self.pipeline.in_flight:
                self._set_gradients(self.pipeline.in_flight[0], loss_scale=1.0)
                if self._due is not None and (self._due.loss_scale == 1.0 or self._due.is_finite()):
                    before_update(self.optimizer)
                    with self._guard.stepping():
                        self._apply(self.optimizer.step)
        finally:
            self._submitted, self._due = False, None

    def state_dict(self) -> dict[str, Any]:
        """Returns the gradients in flight, the counters and the codec's residuals; a collective call."""
        pipeline = self.pipeline
        return {
            "steps": [pipeline.num_steps, pipeline.num_updates, pipeline.staleness],
            "in_flight": [gradient.state_dict() for gradient in pipeline.in_flight],
            "feedback": [feedback.state_dict() for feedback in self._feedback()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned; a collective call."""
        self.forget_prediction()
        pipeline = self.pipeline
        pipeline.num_steps, pipeline.num_updates, pipeline.staleness = state["steps"]
        pipeline.in_flight.clear()
        for saved in state["in_flight"]:
            gradient = GradientInFlight(self._plan, self._queue, self._transport)
            gradient.load_state_dict(saved)
            pipeline.submit(gradient)
        for feedback, residuals in zip(self._feedback(), state["feedback"], strict=True):
            feedback.load_state_dict(residuals)

    def _make_plan(self, parameters: Sequence[NamedParameter]) -> None:
        self._plan = GradientPlan(parameters, self._config, self._transport)
        if self._predicted is not None:
            self._predicted.names = {id(parameter.tensor): parameter.name for parameter in parameters}

    def _feedback(self) -> list[ErrorFeedback]:
        return [feedback for of_bucket in self._plan.feedback for feedback in of_bucket if feedback is not None]

    def _new_gradient(self) -> GradientInFlight:
        """Returns the gradient of this step."""
        # A zero_grad() that sets gradients to zero keeps the views, and this step's gradient is added to them.
        if self._in_grad is not None and not self._in_grad.is_in_grad():
            self._in_grad.release()
            self._in_grad = None
        return GradientInFlight(self._plan, self._queue, self._transport)

    def _set_gradients(self, due: GradientInFlight, loss_scale: float) -> None:
        """Waits for the oldest gradient in flight, and sets ``p.grad`` to it (Algorithm 1, lines 3 and 4)."""
        due.wait()
        self._due = self.pipeline.retire()
        due.own.clear()
        due.set_gradients(self.optimizer, loss_scale)
        if self._in_grad is not None:
            self._in_grad.release()
        self._in_grad = due

    def _apply(self, optimizer_step: Callable[[], object]) -> None:
        """Updates the weights by the gradient that is due (Algorithm 1, line 5)."""
        if self._due is None:
            return
        self.forget_prediction()  # a forward pass may have run since the gradient was submitted
        late = self.pipeline.num_updates - self._due.num_updates
        later = [gradient.hyperparameters for gradient in self.pipeline.in_flight]
        with in_use(self.optimizer, self._compensated(self._due, late), later):
            optimizer_step()
        self.pipeline.count_update(self._due.num_updates)
        self._due = None

    def _check(self) -> None:
        if self._failed:
            raise RuntimeError(
                "An earlier step ended with an error on this rank, and the other ranks may have taken it: detach, and "
                "begin anew from a checkpoint."
            )

    def end_step(self) -> None:
        """Ends a step, which was taken or skipped."""
        self._submitted, self._due = False, None
        self.pipeline.end_step()

    def _compensated(self, gradient: GradientInFlight, late: int) -> Hyperparameters:
        """Returns the hyper-parameters of the gradient's step, with a learning rate for being ``late`` updates late."""
        if not self._config.reduces_learning_rate:
            return gradient.hyperparameters
        if self._config.delay_compensation == "staleness":
            return [{**group, "lr": group["lr"] / max(1, late)} for group in gradient.hyperparameters]
        squared = gradient.squared_distance()
        largest = self._config.distance_constant / squared if squared else float("inf")
        return [{**group, "lr": min(group["lr"], largest)} for group in gradient.hyperparameters]
