"""The throughput of a policy on hosts of given speeds if communication takes no time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from lightning_pipesync.methods.servers.messages import Decision, Gradient
from lightning_pipesync.methods.servers.policies import Policy, Sequencer


class Throughput:
    """Simulates learners with the sequencer's decisions, and servers that answer at once.

    ``passes`` yields the seconds of each host's passes, without an end.
    """

    def __init__(self, policy: Policy, passes: Sequence[Iterator[float]]) -> None:
        num_hosts = len(passes)
        self._sequencer = Sequencer(policy, range(num_hosts))
        self._cancels, self._keeps_computing = policy.cancels, policy.local
        self._seconds = passes
        self._now, self._used = 0.0, 0
        self._versions = [0] * num_hosts
        self._passes = [0] * num_hosts  # the number of each learner's pass under way
        self._ends: list[tuple[float, int, int]] = []  # when a pass ends: seconds, learner, number of the pass

    def gradients_per_second(self, num_gradients: int = 20_000) -> float:
        """Returns the gradients that updates use in a second, from a simulation of ``num_gradients``."""
        for host in range(len(self._seconds)):
            self._begin(host)
        while self._used < num_gradients:
            self._now, host, number = heapq.heappop(self._ends)
            if number == self._passes[host]:  # it was not cancelled
                gradient = Gradient(host, number, self._versions[host])
                self._follow(self._sequencer.push(gradient))
                if self._keeps_computing:
                    self._begin(host)
        return self._used / self._now

    def _begin(self, host: int) -> None:
        self._versions[host] = self._sequencer.version
        self._passes[host] += 1
        heapq.heappush(self._ends, (self._now + next(self._seconds[host]), host, self._passes[host]))

    def _follow(self, decisions: list[Decision]) -> None:
        released: set[int] = set()
        for decision in decisions:
            released.update(decision.released)
            if decision.update is not None:
                self._used += len(decision.update.gradients)
                if self._cancels:
                    released.update(host for host, learner in self._sequencer.learners.items() if not learner.waiting)
        for host in sorted(released):
            self._begin(host)


def together_per_second(passes: Sequence[Iterator[float]], num_steps: int = 5000) -> float:
    """Returns the gradients a second of steps that wait for all hosts, without communication."""
    return len(passes) * num_steps / sum(max(map(next, passes)) for _ in range(num_steps))
