"""The throughput of a policy on hosts of given speeds if communication takes no time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.learners.simulated_learners import SimulatedLearners, num_gradients
from lightning_pipesync.methods.servers import ParameterServerConfig


def gradients_per_second(
    config: ParameterServerConfig, passes: Sequence[Iterator[float]], least_gradients: int = 20_000
) -> float:
    """Returns the gradients that updates use in a second, from a simulation of ``least_gradients`` or some more.

    ``passes`` yields the seconds of each host's passes, without an end.
    """
    used = 0
    for seconds, update in SimulatedLearners(config, passes).updates():
        used += num_gradients(update)
        if used >= least_gradients:
            return used / seconds
    raise AssertionError("updates have no end")


def together_per_second(passes: Sequence[Iterator[float]], num_steps: int = 5000) -> float:
    """Returns the gradients a second of steps that wait for all hosts, without communication."""
    return len(passes) * num_steps / sum(max(map(next, passes)) for _ in range(num_steps))
