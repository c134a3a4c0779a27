"""The local steps of a Downpour learner (Dean et al., NIPS 2012, Algorithm 7.1; lecture, "Downpour - Pseudocode")."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from lightning_pipesync.methods.servers.learner import Learner
from lightning_pipesync.methods.servers.policies import Accrued, Fetch, Gradient
from lightning_pipesync.methods.servers.shards import SharedBucket


class LocalSteps:
    """Steps of plain SGD on a learner's own weights, under which it pushes accrued gradients and fetches weights.

    Nothing waits under computation: weights that were asked for at the end of a step are taken at the end of the next
    one, before that step's own update.

    Args:
        learner: this rank's.
        buckets: the parameters.
        optimizer: the user's own, whose learning rates the steps have.
        n_push: steps from one push to the next.
        n_fetch: steps from one fetch to the next.
        push: pushes what the buckets have packed, given its description and which parameters of each have a gradient.
        ask: asks for weights.
    """

    def __init__(
        self,
        learner: Learner,
        buckets: Sequence[SharedBucket],
        optimizer: Optimizer,
        n_push: int,
        n_fetch: int,
        push: Callable[[Gradient, list[list[bool]]], object],
        ask: Callable[[], object],
    ) -> None:
        self._learner, self._buckets, self._optimizer = learner, buckets, optimizer
        self._n_push, self._n_fetch = n_push, n_fetch
        self._push, self._ask = push, ask
        self._accrued = [torch.zeros_like(bucket.packed) for bucket in buckets]
        self._present = [[False] * len(bucket.members) for bucket in buckets]
        self._first_step = learner.steps + 1
        self._fetches: list[Fetch] = []  # since the last push
        self._asked = False

    @torch.no_grad()
    def step(self) -> None:
        """Takes a local step, and pushes and fetches what is due."""
        self._learner.steps += 1
        step = self._learner.steps
        for i, bucket in enumerate(self._buckets):
            present = bucket.pack()
            self._present[i] = [had or has for had, has in zip(self._present[i], present, strict=True)]
            self._accrued[i].add_(bucket.packed)
        if self._asked:
            self._learner.await_weights()
            self._asked = False
            self._fetches.append(Fetch(step, self._learner.version, before_pass=False))
        for bucket in self._buckets:
            group = self._optimizer.param_groups[bucket.group[1]]
            alpha = group["lr"] if group.get("maximize") else -group["lr"]
            for parameter in (member.tensor for member in bucket.members):
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=alpha)
        if step % self._n_push == 0:
            self._push_accrued()
        if step % self._n_fetch == 0:
            self._ask()
            self._asked = True

    def drain(self) -> None:
        """Pushes what is accrued, and takes the weights that were asked for."""
        if self._asked:
            self._learner.await_weights()
            self._asked = False
        if self._first_step <= self._learner.steps:
            self._push_accrued()

    def drop(self) -> None:
        """Drops what is accrued, and the weights that were asked for: all ranks have loaded others."""
        if self._asked:
            self._learner.drop_weights()
            self._asked = False
        self._forget_accrued()

    def begin_anew(self) -> None:
        """Goes on from weights that all ranks have, after :meth:`drain`."""
        self._fetches = [Fetch(self._learner.steps + 1, self._learner.version, before_pass=True)]

    def _push_accrued(self) -> None:
        learner, accrued = self._learner, Accrued(self._first_step, tuple(self._fetches))
        for bucket, total in zip(self._buckets, self._accrued, strict=True):
            bucket.packed.copy_(total)
        self._push(Gradient(learner.rank, learner.steps, learner.version, accrued=accrued), self._present)
        self._forget_accrued()

    def _forget_accrued(self) -> None:
        for total in self._accrued:
            total.zero_()
        self._present = [[False] * len(present) for present in self._present]
        self._first_step, self._fetches = self._learner.steps + 1, []
