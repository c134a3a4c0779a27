"""The schedule of a stage: its mini-batches and their replicas (paper, Figs. 1 and 2, Section III-B)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The order of passes of one stage: ``lag`` forward passes, then one forward and one backward pass in turn."""

    stage: int  # n, from 0
    num_stages: int  # N
    num_replicas: int  # mini-batches in flight at the first stage, N in the paper

    @property
    def lag(self) -> int:
        """The number of forward passes by which this stage is ahead of its backward passes.

        With one set of weights, so many updates are between both passes of a mini-batch. N - 1 - stage in the paper.
        More replicas are spread evenly over the links between stages.
        """
        links = self.num_stages - 1
        return -(-(links - self.stage) * (self.num_replicas - 1) // links) if links else 0

    def replica(self, step: int) -> int:
        """Returns the index of the replica that mini-batch ``step`` (both from 0) uses in every stage."""
        return step % self.num_replicas

    def is_due(self, step: int, period: int) -> bool:
        """Returns whether the replica is pulled after mini-batch ``step`` (from 0): ceil(t / N) mod tau = 0."""
        return (step // self.num_replicas + 1) % period == 0

    @property
    def versions_after(self) -> int:
        """The updates of this stage between its backward pass of a mini-batch and that of the first stage.

        There is a backward pass of another mini-batch in every second slot (SpecTrain, Section 3.2).
        """
        return self.stage // 2
