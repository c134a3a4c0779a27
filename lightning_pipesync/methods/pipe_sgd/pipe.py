"""One optimizer and its gradients in flight (Pipe-SGD, Algorithm 1).

[Note: the paper's index and ours]
In the paper, iteration t begins with the update by the gradient of iteration t - (k + 1), and then computes gradient t.
A training loop computes first and updates then: our step t computes gradient t, hands it over, and ends with the update
that begins the paper's iteration t + 1, by gradient t - k. It is the same sequence. With k = 1 the weights of iteration
t come from gradient t - 2: "each iteration depends on the 2nd last" (Fig. 6).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.comm_queue import CommQueue
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import mark_stepped
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.hyperparameters import Hyperparameters, in_use
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.methods.pipe_sgd.config import PipeSGDConfig
from lightning_pipesync.methods.pipe_sgd.gradient import GradientInFlight, GradientPlan
from lightning_pipesync.methods.pipe_sgd.prediction import PredictedWeights, TrialStep
from lightning_pipesync.methods.step import StepGuard, replaced_step

T = TypeVar("T")


class GradientPipe:
    """Hands over the gradient of each step, and updates the weights by the one that is ``staleness`` steps older.

    Attributes:
        optimizer: the user's own.
        guard: refuses steps that are not taken through here.
        num_steps: steps so far.
        num_updates: updates so far.
        staleness: by how many updates the last gradient that was applied was late.

    Args:
        optimizer: the user's own.
        parameters: its parameters, in the order of registration.
        config: the settings.
        queue: on which gradients travel.
        transport: the way to the other ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[NamedParameter],
        config: PipeSGDConfig,
        queue: CommQueue,
        transport: Transport,
    ) -> None:
        self.optimizer, self._config = optimizer, config
        self._queue, self._transport = queue, transport
        self.guard = StepGuard(optimizer, "PipeSGD")
        self._handed_over = False  # and ``p.grad`` is what will be applied
        self.num_steps = self.num_updates = self.staleness = 0
        self._failed = False
        self._in_flight: deque[GradientInFlight] = deque()
        self._started: GradientInFlight | None = None  # some of its segments are on their way
        self._due: GradientInFlight | None = None  # about to be applied
        self._shown: GradientInFlight | None = None  # p.grad are views of its buffers
        self._predicted = PredictedWeights(optimizer) if config.predicts else None
        self._make_plan(parameters)

    @property
    def looks_ahead(self) -> bool:
        """Whether the parameters hold the predicted weights."""
        return self._predicted is not None and self._predicted.in_use

    def use_predicted_weights(self) -> None:
        """Swaps in the weights that the updates on their way lead to, as far as this rank knows."""
        if self._predicted is not None and not self._predicted.in_use:
            expected = [gradient for gradient in self._in_flight if gradient.own_is_finite]
            self._predicted.use([TrialStep(gradient.own, gradient.hyperparameters) for gradient in expected])

    def restore_true_weights(self, check: bool = True) -> None:
        """Swaps in the weights after the last update, which are the same on all ranks."""
        if self._predicted is not None:
            self._predicted.restore(check)

    def forget_prediction(self) -> None:
        """Restores the true weights, which are about to change, or the updates on their way are."""
        if self._predicted is not None:
            self._predicted.forget()

    def own_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns what holds, in ``grad``, this rank's part of the gradient that was last handed over."""
        return self._in_flight[-1].own_gradients(parameters) if self._in_flight else []

    def begin_anew(self, parameters: Sequence[NamedParameter]) -> None:
        """Takes ``parameters`` into the gradients from now on; those in flight stay as they are. A collective call."""
        if self._config.pipeline_level == 2:  # some ranks may have sent more of this step's gradient than others
            started = self._started or self._begin()
            started.send_all()
            started.settle()
            self._started = None
        self._make_plan(parameters)

    def gradient_is_ready(self, parameter: Tensor, send: bool) -> None:
        """Sends the segment whose last gradient this is, if ``send`` and at level 2."""
        if not send or self._config.pipeline_level == 1:
            return
        if self._started is None:
            self._started = self._begin()
        self._started.is_ready(parameter)

    def hand_over(self, loss_scale: float) -> None:
        """Sends this step's gradient, and has ``p.grad`` be the one that is about to be applied.

        In the first steps there is none: ``p.grad`` is then zero, for who looks at it, and no update is made.

        Raises:
            RuntimeError: a peer is lost.
        """
        self._check()
        gradient = self._started or self._begin()
        self._started = None
        self.forget_prediction()
        grad_is_reused = self._shown is not None  # it has been added to, and is where gradients travel
        gradient.hand_over(self.optimizer, loss_scale, self.num_updates, grad_is_reused)
        self._in_flight.append(gradient)
        self._handed_over = True
        may_be_in_flight = 0 if self.num_steps < self._config.warmup_steps else self._config.staleness
        if len(self._in_flight) > may_be_in_flight:
            self._show_next(loss_scale)
        else:
            for parameter in parameters_of(self.optimizer):
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter.grad)

    def run(self, update: Callable[[], T] | None, hand_over: Callable[[], object]) -> T | None:
        """Runs ``update``; the ``optimizer.step()`` within it applies the gradient that is due, if there is one.

        Args:
            update: what steps the optimizer; None: that alone.
            hand_over: called before the update, when a closure has been evaluated.

        Raises:
            RuntimeError: ``update`` did not step the optimizer, and the gradient that was due is finite: a loss scaler
                that looks at this rank's own gradient would have this rank alone skip the update.
        """
        self._check()
        optimizer_step = self.optimizer.step

        def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            result = None if closure is None else closure()
            hand_over()
            self._apply(lambda: optimizer_step(**kwargs))
            return result

        try:
            with self.guard.stepping(), replaced_step(self.optimizer, step):
                result = step() if update is None else update()
            if not self._handed_over or (self._due is not None and self._due.is_finite()):
                raise RuntimeError(
                    f"{type(self.optimizer).__name__}.step() was not called within step(), as by a loss scaler that "
                    "has looked at this rank's own gradient. Call after_backward(loss_scale=scaler.get_scale()) before "
                    "it unscales or anything clips: then it looks at the gradient of all ranks."
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
        self._handed_over = True
        try:
            while self._in_flight:
                self._show_next(loss_scale=1.0)
                if self._due is not None and (self._due.loss_scale == 1.0 or self._due.is_finite()):
                    before_update(self.optimizer)
                    with self.guard.stepping():
                        self._apply(self.optimizer.step)
        finally:
            self._handed_over, self._due = False, None

    def state_dict(self) -> dict[str, Any]:
        """Returns the gradients in flight, the counters and what the codec has dropped; a collective call."""
        return {
            "steps": [self.num_steps, self.num_updates, self.staleness],
            "in_flight": [gradient.state_dict() for gradient in self._in_flight],
            "feedback": [feedback.state_dict() for feedback in self._feedback()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned; a collective call."""
        self.forget_prediction()
        self.num_steps, self.num_updates, self.staleness = state["steps"]
        self._in_flight.clear()
        for saved in state["in_flight"]:
            gradient = GradientInFlight(self._plan, self._queue, self._transport)
            gradient.load_state_dict(saved)
            self._in_flight.append(gradient)
        for feedback, residuals in zip(self._feedback(), state["feedback"], strict=True):
            feedback.load_state_dict(residuals)

    def _make_plan(self, parameters: Sequence[NamedParameter]) -> None:
        self._plan = GradientPlan(parameters, self._config, self._transport)
        if self._predicted is not None:
            self._predicted.names = {id(parameter.tensor): parameter.name for parameter in parameters}

    def _feedback(self) -> list[ErrorFeedback]:
        return [feedback for of_bucket in self._plan.feedback for feedback in of_bucket if feedback is not None]

    def _begin(self) -> GradientInFlight:
        """Begins the gradient of this step."""
        if self._shown is not None and not self._shown.is_shown():  # but if it was set to zero, and added to
            self._shown.release()
            self._shown = None
        return GradientInFlight(self._plan, self._queue, self._transport)

    def _show_next(self, loss_scale: float) -> None:
        """Waits for the oldest gradient in flight, and has it be what is applied next (Algorithm 1, lines 3 and 4)."""
        self._in_flight[0].settle()
        self._due = self._in_flight.popleft()
        self._due.own = {}  # nothing is predicted with it any more
        self._due.install(self.optimizer, loss_scale)
        if self._shown is not None:
            self._shown.release()
        self._shown = self._due

    def _apply(self, optimizer_step: Callable[[], object]) -> None:
        """Updates the weights by the gradient that is due (Algorithm 1, line 5)."""
        if self._due is None:
            return
        self.forget_prediction()  # somebody may have run a forward pass since the gradient was handed over
        self.staleness = self.num_updates - self._due.num_updates
        later = [gradient.hyperparameters for gradient in self._in_flight]
        with in_use(self.optimizer, self._compensated(self._due), later):
            optimizer_step()
        self._due = None
        self.num_updates += 1

    def _check(self) -> None:
        if self._failed:
            raise RuntimeError(
                "An earlier step ended with an error on this rank, and the other ranks may have taken it: detach, and "
                "begin anew from a checkpoint."
            )

    def end_step(self) -> None:
        """Ends a step, which was taken or skipped."""
        self._handed_over, self._due = False, None
        self.num_steps += 1

    def _compensated(self, gradient: GradientInFlight) -> Hyperparameters:
        """Returns the hyper-parameters of the gradient's step, with what its delay makes of the learning rate."""
        if not self._config.reduces_learning_rate:
            return gradient.hyperparameters
        if self._config.delay_compensation == "staleness":
            late = max(1, self.staleness)
            return [{**group, "lr": group["lr"] / late} for group in gradient.hyperparameters]
        squared = gradient.squared_distance()
        largest = self._config.distance_constant / squared if squared else float("inf")
        return [{**group, "lr": min(group["lr"], largest)} for group in gradient.hyperparameters]
