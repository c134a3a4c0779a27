"""PowerSGD and ACP-SGD line by line, on the gradients of all workers of one matrix: references."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.references.pipe_sgd import mean


def orthogonalized(matrix: Tensor) -> Tensor:
    return torch.linalg.qr(matrix).Q


class PowerSGD:
    """Algorithm 1 of Vogels et al. within error feedback (Algorithm 2), for a matrix of ``shape``."""

    def __init__(self, shape: torch.Size, rank: int, workers: int, feedback: bool = True) -> None:
        rows, columns = shape[0], shape[1:].numel()
        self.errors, self.feedback = [torch.zeros(rows, columns) for _ in range(workers)], feedback
        self.random = torch.randn(max(rows, columns), rank, generator=torch.Generator().manual_seed(0))
        self.q = self.random[:columns]  # Algorithm 1, line 1
        self.number = 0  # of the factors so far

    def aggregate(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Returns the decompressed mean of the workers' gradients; None: a worker has none, and keeps its error."""
        deltas = [None if g is None else g.flatten(1).float() + e for g, e in zip(gradients, self.errors, strict=True)]
        return self.compressed_mean(deltas)

    def compressed_mean(self, deltas: list[Tensor | None]) -> Tensor:
        p = mean(self.products(deltas, self.known(self.q)))  # lines 3 and 4
        self.number += 1
        p = orthogonalized(self.known(p))  # line 5
        own = self.products(deltas, p, transposed=True)  # line 6
        self.keep_errors(deltas, [(p, q) for q in own])
        self.q = mean(own)  # line 7
        self.number += 1
        return p @ self.q.T

    def known(self, factor: Tensor) -> Tensor:
        """Random columns, other ones each time, in place of a factor of zeros: no worker had a gradient."""
        shift = random.Random(self.number).randrange(len(self.random))
        return factor if factor.any() else self.random.roll(shift, 0)[: len(factor)]

    def products(self, deltas: list[Tensor | None], factor: Tensor, transposed: bool = False) -> list[Tensor]:
        rows = self.errors[0].shape[transposed]
        return [
            torch.zeros(rows, factor.shape[1]) if d is None else (d.T if transposed else d) @ factor for d in deltas
        ]

    def keep_errors(self, deltas: list[Tensor | None], factors: list[tuple[Tensor, Tensor]]) -> None:
        for worker, (delta, (p, q)) in enumerate(zip(deltas, factors, strict=True)):
            if delta is not None and self.feedback:
                self.errors[worker] = torch.addmm(delta, p, q.T, alpha=-1)  # Algorithm 2: delta - p q^T


class ACPSGD(PowerSGD):
    """The alternate compression of Zhang et al.: P in one step, Q in the next one."""

    def compressed_mean(self, deltas: list[Tensor | None]) -> Tensor:
        if self.number % 2 == 0:
            q = orthogonalized(self.known(self.q))
            own = self.products(deltas, q)
            self.keep_errors(deltas, [(p, q) for p in own])
            self.p = mean(own)
            self.number += 1
            return self.p @ q.T
        p = orthogonalized(self.known(self.p))
        own = self.products(deltas, p, transposed=True)
        self.keep_errors(deltas, [(p, q) for q in own])
        self.q = mean(own)
        self.number += 1
        return p @ self.q.T
