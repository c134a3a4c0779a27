"""Convex problems on a ball whose constants and optimum are known: linear models, for many trainings at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

#: The value at the optimum is off by no more, which the gap of :meth:`LinearModel.optimum` proves.
_TOLERANCE, _MOST_ITERATIONS = 1e-7, 200_000
_NUM_DIGITS = 600

Pointwise = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LinearModel:
    """The mean over all samples (a, b) of loss(a w, b), plus l2 / 2 times the squared norm of w, for w in a ball.

    Attributes:
        title: in tables and pictures.
        inputs: a, shape ``[samples, size]``, fp64.
        targets: b, shape ``[samples]``, fp64.
        loss: of outputs and targets.
        slope: its (sub-)derivative by the outputs.
        steepest: the largest magnitude of the slope within the ball.
        radius: of the ball, whose center is 0.
        l2: the weight of the squared norm.
        strong_convexity: mu; 0 if the objective is only known to be convex.
        smoothness: the Lipschitz constant of the gradient of the objective; None: it is not smooth.
    """

    title: str
    inputs: Tensor
    targets: Tensor
    loss: Pointwise
    slope: Pointwise
    steepest: float
    radius: float
    l2: float = 0.0
    strong_convexity: float = 0.0
    smoothness: float | None = None

    @property
    def lipschitz(self) -> float:
        """L, a bound on the norm of the gradient of every sample within the ball."""
        return self.steepest * float(self.inputs.norm(dim=1).max()) + self.l2 * self.radius

    @property
    def distance(self) -> float:
        """F: half the squared distance of two points of the ball is at most F squared."""
        return math.sqrt(2) * self.radius

    def value(self, weights: Tensor) -> Tensor:
        """Returns the objective at ``weights`` of shape ``[..., size]``, shape ``[...]``."""
        losses = self.loss(weights @ self.inputs.T, self.targets).mean(dim=-1)
        return losses + self.l2 / 2 * weights.square().sum(dim=-1)

    def gradient(self, weights: Tensor, samples: Tensor) -> Tensor:
        """Returns the gradient of a sample of each training.

        Args:
            weights: shape ``[..., trainings, size]``.
            samples: their numbers, shape ``[trainings]``.
        """
        a = self.inputs[samples]
        slopes = self.slope((weights * a).sum(dim=-1), self.targets[samples])
        return slopes.unsqueeze(-1) * a + self.l2 * weights

    def project(self, weights: Tensor) -> Tensor:
        """Returns the nearest points of the ball."""
        return weights * (self.radius / weights.norm(dim=-1, keepdim=True).clamp(min=1e-300)).clamp(max=1.0)

    def optimum(self) -> float:
        """Returns the least value within the ball, to within 1e-7.

        It is found by accelerated projected gradient descent (Nesterov). The gap, the most that a linear function with
        the gradient at w falls from w on within the ball, bounds the distance from the optimum, as the objective is
        convex (M. Frank and P. Wolfe, 1956). An objective that is not smooth has to be zero at its optimum.

        Raises:
            RuntimeError: the gap did not get that small.
        """
        if self.smoothness is None:
            return 0.0
        w = ahead = torch.zeros(self.inputs.shape[1], dtype=torch.float64)
        momentum = 1.0
        for _ in range(_MOST_ITERATIONS):
            before, w = w, self.project(ahead - self._whole_gradient(ahead) / self.smoothness)
            next_momentum = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            ahead = w + (momentum - 1) / next_momentum * (w - before)
            momentum = next_momentum
            gradient = self._whole_gradient(w)
            if gradient @ w + self.radius * gradient.norm() <= _TOLERANCE:
                return float(self.value(w))
        raise RuntimeError(f"{self.title}: the optimum was not found in {_MOST_ITERATIONS} iterations.")

    def _whole_gradient(self, w: Tensor) -> Tensor:
        slopes = self.slope(self.inputs @ w, self.targets)
        return self.inputs.T @ slopes / len(slopes) + self.l2 * w


def absolute_value() -> LinearModel:
    """Returns |w - 1/pi| for w from -1 to 1: where gradients are late, each crossing of the optimum goes too far.

    No sum of steps is 1/pi, where the gradient would be 0.
    """
    return LinearModel(
        title="absolute value",
        inputs=torch.ones(1, 1, dtype=torch.float64),
        targets=torch.tensor([1 / math.pi], dtype=torch.float64),
        loss=lambda outputs, targets: (outputs - targets).abs(),
        slope=lambda outputs, targets: (outputs - targets).sign(),
        steepest=1.0,
        radius=1.0,
    )


def mean_value() -> LinearModel:
    """Returns the mean of (w - b)^2 / 2 for b = -1/3 or 1, and w from -1 to 1: noise that never ends."""
    targets = torch.tensor([-1 / 3, 1.0], dtype=torch.float64)
    return LinearModel(
        title="mean value",
        inputs=torch.ones(2, 1, dtype=torch.float64),
        targets=targets,
        loss=lambda outputs, targets: (outputs - targets).square() / 2,
        slope=lambda outputs, targets: outputs - targets,
        steepest=2.0,
        radius=1.0,
        strong_convexity=1.0,
        smoothness=1.0,
    )


def logistic(l2: float, radius: float) -> LinearModel:
    """Returns logistic regression: is a handwritten digit of scikit-learn's first 600 even?

    The inputs, the pixels and a one, are scaled to norms of at most 1.
    """
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(part[:_NUM_DIGITS]) for part in load_digits(return_X_y=True))
    inputs = torch.cat([images / 16, torch.ones(len(images), 1, dtype=torch.float64)], dim=1)
    inputs /= inputs.norm(dim=1).max()
    return LinearModel(
        title=f"logistic regression, l2 = {l2:g}" if l2 else "logistic regression",
        inputs=inputs,
        targets=1.0 - 2 * (labels % 2),
        loss=lambda outputs, targets: softplus(-targets * outputs),
        slope=lambda outputs, targets: -targets * torch.sigmoid(-targets * outputs),
        steepest=1.0,
        radius=radius,
        l2=l2,
        strong_convexity=l2,
        smoothness=float(torch.linalg.matrix_norm(inputs, ord=2)) ** 2 / len(inputs) / 4 + l2,
    )


#: Builds the problems, by name.
PROBLEMS: dict[str, Callable[[], LinearModel]] = {
    "absolute": absolute_value,
    "logistic": lambda: logistic(l2=0.0, radius=5.0),
    "mean": mean_value,
    "logistic-l2": lambda: logistic(l2=0.1, radius=5.0),
}
