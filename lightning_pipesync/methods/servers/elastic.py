"""A learner of asynchronous EASGD, which trains a replica of its own (Zhang et al., NIPS 2015, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_pipesync.methods.servers.learner import Learner
from lightning_pipesync.methods.servers.policies import Accrued, Fetch, Gradient
from lightning_pipesync.methods.servers.shards import SharedBucket


class ElasticReplica:
    """This rank's replica of the weights, and the servers' center variable, which pull at each other.

    Args:
        learner: this rank's.
        buckets: the parameters.
        period: tau, the steps from one pull to the next.
        push: pushes what the buckets have packed, given its description and which parameters of each there are.
    """

    def __init__(
        self,
        learner: Learner,
        buckets: Sequence[SharedBucket],
        period: int,
        push: Callable[[Gradient, list[list[bool]]], object],
    ) -> None:
        self._learner, self._buckets, self._period, self._push = learner, buckets, period, push
        self._all = [[True] * len(bucket.members) for bucket in buckets]
        self._first_step, self._fetches = learner.steps + 1, list[Fetch]()
        self._own: list[Tensor] = []  # while the parameters are the center
        self._resumes = False  # with a replica of a checkpoint

    def step(self) -> None:
        """Ends a step of the learner's own optimizer: every tau steps the replica and the center pull at each other."""
        learner = self._learner
        learner.steps += 1
        if learner.steps % self._period:
            return
        for bucket in self._buckets:
            bucket.pack_values()
        accrued = Accrued(self._first_step, tuple(self._fetches))
        self._push(Gradient(learner.rank, learner.steps, learner.version, accrued=accrued), self._all)
        learner.await_pull()
        self._first_step, self._fetches = learner.steps + 1, []

    def keep(self) -> None:
        """Keeps the replica, before the parameters become the center."""
        for bucket in self._buckets:
            bucket.pack_values()
        self._own = [bucket.packed.clone() for bucket in self._buckets]

    def restore(self) -> None:
        """Makes the parameters the replica again, if it is kept."""
        for bucket, own in zip(self._buckets, self._own, strict=bool(self._own)):
            bucket.unpack_from(own)
        self._own = []

    def go_on_from_center(self) -> None:
        """Makes the center, which the parameters are, the replica."""
        self._own = []
        self._fetches.append(Fetch(self._learner.steps + 1, self._learner.version, before_pass=True))

    def after_loading(self) -> None:
        """Goes on from the replica of a checkpoint, or from other weights that all ranks have loaded."""
        if self._resumes:
            self.restore()
        else:
            self.go_on_from_center()
        self._resumes = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the replica, on the CPU, while it is kept, and the steps since the last pull."""
        own = [flat.to("cpu", copy=True) for flat in self._own]
        return {"own": own, "first_step": self._first_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keeps the replica that :meth:`state_dict` returned on this rank."""
        pairs = zip(self._buckets, state["own"], strict=True)
        self._own = [own.to(bucket.packed.device, copy=True) for bucket, own in pairs]
        self._first_step, self._resumes = state["first_step"], True
