"""Low-rank factors of gradients, which ranks sum in place of the gradients (PowerSGD, ACP-SGD).

The gradient of a tensor is a matrix M of n rows and m columns, its first dimension and all others. It is approximated
by P Q^T, where P has n rows, Q has m, and both have r columns. Ranks know one factor, with orthonormal columns, and
compute the other one as a product of it and their own gradient. Products are linear: the mean of the ranks' factors is
the factor of their mean gradient. So factors are summed as gradients are, unlike the wire formats of codecs.

- ``power_sgd`` (Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
  Algorithm 1) computes P with the Q of the step before (warm start), and, once P is summed and orthonormal, Q.
- ``acp_sgd`` (Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning")
  computes P and Q in turns, one in a step: half of the values, and one all-reduce.

Each rank adds what its own factor does not express to its next gradient (error feedback: PowerSGD, Algorithm 2).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.codecs.codec import accumulation_dtype
from lightning_pipesync.core.comm.comm_queue import Queued
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.settings import Settings

#: Which factor is computed: it has the rows of the matrix, or its columns.
P, Q = 0, 1


class FactorizedGradient:
    """What remains of a parameter's gradients from step to step.

    Attributes:
        residual: what this rank has not sent, shape ``[n, m]``; in fp32, or fp64 for fp64.
        factors: P and Q as the ranks have summed them last, shapes ``[n, r]`` and ``[m, r]``; the same on all ranks.
            They keep their memory: it is another stream's than that which reads them.
        number: of the factors that were summed so far; P and Q take turns.
    """

    def __init__(self, parameter: Tensor, rank: int, error_feedback: bool) -> None:
        dtype, rows, columns = accumulation_dtype(parameter.dtype), parameter.shape[0], parameter.shape[1:].numel()
        self.shape, self._error_feedback = (rows, columns), error_feedback
        self.residual = torch.zeros(rows, columns, dtype=dtype, device=parameter.device)
        generator = torch.Generator().manual_seed(0)  # the same Q on all ranks (Algorithm 1, line 1)
        self._random = torch.randn(max(rows, columns), rank, generator=generator, dtype=dtype).to(parameter.device)
        first = self._random[:columns].clone()
        self.factors, self.number = (first.new_zeros(rows, rank), first), 0
        self._known = first  # with which the other one is computed in this step

    @property
    def side(self) -> int:
        """Which factor is computed next."""
        return self.number % 2

    @property
    def factor(self) -> Tensor:
        """The one that was summed last."""
        return self.factors[self._other]

    @property
    def rank(self) -> int:
        return self.factor.shape[1]

    def add(self, gradient: Tensor) -> None:
        """Adds this step's gradient to the residual."""
        values = gradient.flatten(1).to(self.residual.dtype)
        if self._error_feedback:
            self.residual.add_(values)
        else:
            self.residual.copy_(values)

    def take_factor(self, orthonormal: bool) -> None:
        """Takes the factor that was summed last as the known one; what is not finite counts as zero there.

        Where it is zero, as no rank had a gradient, or one that overflowed, random columns take its place, others each
        time, and the same on all ranks: those of the first factor, with the rows shifted.
        """
        known = self.factor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        shift = random.Random(self.number).randrange(len(self._random))
        known = torch.where(known.any(), known, self._random.roll(shift, 0)[: len(known)])
        self._known = torch.linalg.qr(known).Q if orthonormal else known

    def project(self, into: Tensor) -> None:
        """Writes this rank's part of the other factor."""
        matrix = self.residual if self.side == P else self.residual.T
        torch.mm(matrix, self._known, out=into)

    def subtract(self, part: Tensor) -> None:
        """Leaves what this rank's ``part`` does not express; zero where that is not finite."""
        first, second = (part, self._known.T) if self.side == P else (self._known, part.T)
        self.residual.addmm_(first, second, alpha=-1).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def receive(self, mean: Tensor) -> None:
        """Takes the mean of all ranks' parts; the other factor is next."""
        self.factors[self.side].copy_(mean)
        self.number += 1

    def approximate(self, gradient: Tensor) -> None:
        """Overwrites ``gradient`` with P Q^T, after :meth:`receive`."""
        first, second = (self.factor, self._known.T) if self.side == Q else (self._known, self.factor.T)
        if gradient.is_contiguous() and gradient.dtype == first.dtype:
            torch.mm(first, second, out=gradient.flatten(1))
        else:
            whole = torch.mm(first, second, out=first.new_empty(self.shape))  # with out=, autocast does not round it
            gradient.copy_(whole.view(gradient.shape))

    def state_dict(self) -> dict[str, Any]:
        return {"residual": self.residual, "factor": self.factor, "number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.residual.copy_(state["residual"])
        self.number = state["number"]
        self.factor.copy_(state["factor"])

    @property
    def _other(self) -> int:
        return Q if self.side == P else P


class LowRankGradients:
    """The factorized gradients of ``parameters``: of those with two dimensions or more whose factors are smaller."""

    def __init__(self, parameters: Sequence[NamedParameter], settings: Settings) -> None:
        assert settings.low_rank is not None
        self.alternates = settings.low_rank_method == "acp_sgd"
        self._of: dict[int, FactorizedGradient] = {}
        self._names: dict[int, str] = {}
        for parameter in parameters:
            if is_factorized(parameter.tensor.shape, settings.low_rank):
                gradient = FactorizedGradient(parameter.tensor, settings.low_rank, settings.error_feedback)
                self._of[id(parameter.tensor)], self._names[id(parameter.tensor)] = gradient, parameter.name

    def of(self, parameter: Tensor) -> FactorizedGradient | None:
        return self._of.get(id(parameter))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the residuals and the factors by name."""
        return {self._names[key]: gradient.state_dict() for key, gradient in self._of.items()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        for key, gradient in self._of.items():
            if self._names[key] in state:
                gradient.load_state_dict(state[self._names[key]])


class LowRankBucket:
    """What the ranks all-reduce for the gradients of a bucket: factors, and the gradients of the other parameters.

    Attributes:
        num_rounds: all-reduces of a step, of which each needs the result of the one before.
        last: the last one that was queued.
    """

    def __init__(self, gradients: LowRankGradients, parameters: Sequence[Tensor], num_shards: int) -> None:
        self._parameters, self._num_shards = list(parameters), num_shards
        self._factorized = [gradients.of(parameter) for parameter in parameters]
        self._alternates = gradients.alternates
        self.num_rounds = 1 if self._alternates or not any(self._factorized) else 2
        self.last: Queued[Tensor] | None = None
        self._buffers: dict[tuple[int | None, ...], Bucket] = {}  # by the sides of the factors

    def start(self, round_: int, views: Sequence[Tensor], present: Sequence[bool]) -> Tensor:
        """Returns what is to be averaged in this round: 1-D.

        Args:
            views: the gradients.
            present: whether this rank has each of them. It sends zeros for others, and keeps its residuals.
        """
        buffer, indices = self._buffer(round_)
        buffer.zero_gaps()
        for index, into in zip(indices, buffer.views, strict=True):
            factorized = self._factorized[index]
            if factorized is None:
                into.copy_(views[index])
                continue
            factorized.take_factor(orthonormal=self._alternates or round_ == 1)
            if not present[index]:
                into.zero_()
                continue
            if round_ == 0:
                factorized.add(views[index])
            factorized.project(into)
            if round_ == self.num_rounds - 1:
                factorized.subtract(into)
        return buffer.flat

    def finish(self, round_: int, views: Sequence[Tensor]) -> None:
        """Takes the averages of this round; after the last one, the ``views`` are the averaged gradients."""
        buffer, indices = self._buffer(round_)
        for index, mean in zip(indices, buffer.views, strict=True):
            factorized, view = self._factorized[index], views[index]
            if factorized is None:
                view.copy_(mean)
                continue
            factorized.receive(mean)
            if round_ == self.num_rounds - 1:
                factorized.approximate(view)

    def drop_residuals(self) -> None:
        """Forgets what was not sent of gradients."""
        for factorized in self._factorized:
            if factorized is not None:
                factorized.residual.zero_()

    def _buffer(self, round_: int) -> tuple[Bucket, list[int]]:
        """Returns the buffer of this round, and the indices of the parameters whose values it has."""
        indices = [i for i, factorized in enumerate(self._factorized) if factorized is not None or round_ == 0]
        sides = tuple(None if one is None else one.side for one in (self._factorized[i] for i in indices))
        if sides not in self._buffers:
            self._buffers[sides] = Bucket([self._values_like(index) for index in indices], self._num_shards)
        return self._buffers[sides], indices

    def _values_like(self, index: int) -> Tensor:
        """Returns a tensor of the shape, dtype and device of what is sent of a parameter next."""
        parameter, factorized = self._parameters[index], self._factorized[index]
        if factorized is None:
            return torch.empty_like(parameter, dtype=accumulation_dtype(parameter.dtype), requires_grad=False)
        return factorized.residual.new_empty(factorized.shape[factorized.side], factorized.rank)


def low_rank_gradients(parameters: Sequence[NamedParameter], settings: Settings) -> LowRankGradients | None:
    """Returns the factorized gradients of ``parameters``; None without ``low_rank``."""
    return None if settings.low_rank is None else LowRankGradients(parameters, settings)


def low_rank_bucket(
    gradients: LowRankGradients | None, parameters: Sequence[Tensor], num_shards: int
) -> LowRankBucket | None:
    """Returns what is all-reduced for a bucket of these parameters; None without ``low_rank``."""
    return None if gradients is None else LowRankBucket(gradients, parameters, num_shards)


def is_factorized(shape: torch.Size, rank: int) -> bool:
    """Returns whether the gradient of a tensor is sent as factors: if both together have fewer values."""
    if len(shape) < 2:
        return False
    rows, columns = shape[0], shape[1:].numel()
    return rank * (rows + columns) < rows * columns


def factor_bytes(shape: torch.Size, itemsize: int, rank: int) -> float:
    """Returns the bytes of a factor of a gradient, the mean of P and Q; those of the gradient if it has none.

    ``itemsize`` is that of its values, in bytes; those of 16 bits are sent in fp32.
    """
    width = max(4, itemsize)
    if not is_factorized(shape, rank):
        return width * shape.numel()
    return width * rank * (shape[0] + shape[1:].numel()) / 2
