"""The throughput of a policy on hosts of given speeds if communication takes no time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from benchmarks.learners.simulated_learners import SimulatedLearners, num_gradients
from lightning_pipesync.methods.servers import ParameterServerConfig


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
