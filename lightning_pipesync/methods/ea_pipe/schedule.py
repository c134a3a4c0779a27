"""Which mini-batch a stage works on, and with which replica (paper, Figs. 1 and 2, Section III-B)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """What one stage does in turn: forward passes alone until ``lag`` are ahead, then one forward, one backward.

    Attributes:
        stage: n, from 0 on.
        num_stages: N.
        num_replicas: mini-batches in flight at the first stage, N in the paper.
    """

    stage: int
    num_stages: int
    num_replicas: int

    @property
    def lag(self) -> int:
        """How many forward passes this stage is ahead of its backward passes, before it makes the next one.

        N - 1 - stage in the paper. What more replicas allow is spread over the links that they are there for.
        """
        links = self.num_stages - 1
        return -(-(links - self.stage) * (self.num_replicas - 1) // links) if links else 0

    @property
    def num_in_flight(self) -> int:
        """How many mini-batches this stage has seen forward and not yet backward, at most."""
        return self.lag + 1

    def replica(self, step: int) -> int:
        """Returns the index of the replica that mini-batch ``step`` (both from 0 on) uses in every stage."""
        return step % self.num_replicas

    def is_due(self, step: int, sync_period: int) -> bool:
        """Returns whether mini-batch ``step`` (from 0 on) has its replica pulled: ceil(t / N) mod tau = 0."""
        return (step // self.num_replicas + 1) % sync_period == 0

    @property
    def versions_between(self) -> int:
        """Updates of this stage between its forward and its backward pass of a mini-batch, with one set of weights."""
        return self.lag

    @property
    def versions_after(self) -> int:
        """Updates of this stage between its backward pass of a mini-batch and that of the first stage.

        A backward pass of another mini-batch comes after every two slots (SpecTrain, Section 3.2).
        """
        return self.stage // 2
