"""Learners whose passes take given times, and servers that answer at once, with the decisions of the real sequencer."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice

from lightning_pipesync.methods.servers import ParameterServerConfig
from lightning_pipesync.methods.servers.messages import Accrued, Decision, Fetch, Gradient, Update
from lightning_pipesync.methods.servers.policies import Sequencer


class SimulatedLearners:
    """Simulates the order of updates under a policy, in simulated time.

    Args:
        config: the policy and its settings.
        passes: for each learner its seconds a pass, without an end.
    """

    def __init__(self, config: ParameterServerConfig, passes: Sequence[Iterator[float]]) -> None:
        self._policy = config.policy_for(len(passes))
        self._sequencer = Sequencer(self._policy, range(len(passes)), config.staleness_lr)
        self._seconds, self._now = passes, 0.0
        self._n_push, self._n_fetch = config.n_push, config.n_fetch
        self._versions = [0] * len(passes)  # of each learner's weights
        self._numbers = [0] * len(passes)  # of each learner's pass under way
        self._ends: list[tuple[float, int, int]] = []  # when a pass ends: seconds, learner, number of the pass
        self._requested: dict[int, int] = {}  # versions that arrive at the end of a learner's next pass
        self._fetches: list[list[Fetch]] = [[] for _ in passes]  # since a learner's last push

    def updates(self) -> Iterator[tuple[float, Update]]:
        """Yields each update with its time in seconds, without an end; the number of a step is that of a pass."""
        for learner in range(len(self._seconds)):
            self._begin(learner)
        while True:
            self._now, learner, number = heapq.heappop(self._ends)
            if number == self._numbers[learner]:  # it was not cancelled
                decisions = self._end_local(learner) if self._policy.local else self._end(learner)
                yield from ((self._now, one.update) for one in decisions if one.update is not None)

    def _begin(self, learner: int) -> None:
        self._numbers[learner] += 1
        heapq.heappush(self._ends, (self._now + next(self._seconds[learner]), learner, self._numbers[learner]))

    def _end(self, learner: int) -> list[Decision]:
        """A learner pushes the gradient of its pass; those that then get weights begin again."""
        decisions = self._sequencer.push(Gradient(learner, self._numbers[learner], self._versions[learner]))
        released = {rank for decision in decisions for rank in decision.released}
        if self._policy.cancels and any(decision.update is not None for decision in decisions):
            released.update(rank for rank, known in self._sequencer.learners.items() if not known.waiting)
        for rank in sorted(released):
            self._versions[rank] = self._sequencer.version
            self._begin(rank)
        return decisions

    def _end_local(self, learner: int) -> list[Decision]:
        """A learner takes a local step (Dean et al., Algorithm 7.1), and begins the next one at once."""
        step, decisions = self._numbers[learner], []
        if learner in self._requested:
            self._versions[learner] = self._requested.pop(learner)
            self._fetches[learner].append(Fetch(step, self._versions[learner], before_pass=False))
        if step % self._n_push == 0:
            accrued = Accrued(step - self._n_push + 1, tuple(self._fetches[learner]))
            self._fetches[learner] = []
            decisions += self._sequencer.push(Gradient(learner, step, self._versions[learner], accrued=accrued))
        if step % self._n_fetch == 0:
            decisions += self._sequencer.fetch(learner)
            self._requested[learner] = self._sequencer.version
        self._begin(learner)
        return decisions


def num_gradients(update: Update) -> int:
    """Returns the number of passes whose gradients make an update."""
    return sum(one.num_steps for one in update.gradients)


def gradients_per_second(
    config: ParameterServerConfig, passes: Sequence[Iterator[float]], least_gradients: int = 20_000
) -> float:
    """Returns the gradients that updates use in a second, from a simulation of ``least_gradients`` or some more.

    ``passes`` yields the seconds of each host's passes, without an end. What a learner with an optimizer of its own
    pushes are the steps of a period.
    """
    steps = config.period if config.policy in ("easgd", "diloco") else 1
    used = 0
    for seconds, update in SimulatedLearners(config, [_in_periods(of_host, steps) for of_host in passes]).updates():
        used += steps * num_gradients(update)
        if used >= least_gradients:
            return used / seconds
    raise AssertionError("updates have no end")


def _in_periods(passes: Iterator[float], steps: int) -> Iterator[float]:
    while True:
        yield sum(islice(passes, steps))


def together_per_second(passes: Sequence[Iterator[float]], num_steps: int = 5000) -> float:
    """Returns the gradients a second of steps that wait for all hosts, without communication."""
    return len(passes) * num_steps / sum(max(map(next, passes)) for _ in range(num_steps))
