"""The speeds of emulated hosts: how long the computation of each rank takes, pass by pass, and passes that do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from torch import Tensor

from lightning_pipesync.lab.netlab.faults import Slow, check_faults, parse_slow
from lightning_pipesync.lab.netlab.units import parse_seconds, parse_share

#: The longest sleep between two checks whether a pass is still wanted.
SLICE_S = 5e-3


@dataclass(frozen=True)
class HostSpeeds:
    """How long the computation of a step takes on each host.

    Attributes:
        compute_s: the seconds of a step on a host of full speed.
        slow: the hosts that compute at a share of that speed.
        stalling: the share of the passes of all hosts that stall.
        stall_s: the mean of the time that is added to a pass that stalls, exponentially distributed.
    """

    compute_s: float = 0.0
    slow: tuple[Slow, ...] = ()
    stalling: float = 0.0
    stall_s: float = 0.0

    @classmethod
    def parse(cls, compute: str | None, slow: Sequence[str], stalls: str | None) -> HostSpeeds:
        """Returns the speeds that a user has written.

        Args:
            compute: a duration, ``"100ms"``; None: nothing is emulated.
            slow: ``"HOST:SHARE%"`` each, as in ``"3:50%"``.
            stalls: ``"SHARE%:FACTOR"``, as in ``"5%:10"``, with the mean stall over ``compute``; None: there are none.

        Raises:
            ValueError: a text is malformed or out of its range, or there are slow hosts without ``compute``.
        """
        if compute is None:
            for name, value in (("slow", slow), ("stalls", stalls)):
                if value:
                    raise ValueError(f"{name}={value!r} changes the emulated computation: give compute, too, as 100ms.")
            return cls()
        try:
            compute_s = parse_seconds(compute)
        except ValueError as error:
            raise ValueError(f"compute: {error}") from error
        if compute_s <= 0:
            raise ValueError(f"compute must be more than 0 s, got {compute!r}.")
        hosts, rates = parse_slow(slow)
        if rates:
            raise ValueError(f"slow={tuple(slow)!r}: only a share of the speed can be emulated here, as in 3:50%.")
        check_faults(hosts, 1 + max((fault.host for fault in hosts), default=0))
        stalling, factor = (0.0, 0.0) if stalls is None else _parse_stalls(stalls)
        return cls(compute_s, tuple(hosts), stalling, factor * compute_s)

    def check_hosts(self, num_hosts: int) -> None:
        """Raises ValueError if a host that is to be slow does not exist."""
        check_faults(self.slow, num_hosts)

    def of_hosts(self, num_hosts: int, seed: int = 0) -> list[Iterator[float]]:
        """Returns :meth:`seconds_of` each host."""
        return [self.seconds_of(host, seed) for host in range(num_hosts)]

    def seconds_of(self, host: int, seed: int) -> Iterator[float]:
        """Yields the seconds of a host's passes, without an end; the same ones for the same seed."""
        seconds = self.compute_s / next((fault.share for fault in self.slow if fault.host == host), 1.0)
        random = np.random.default_rng((seed, host))
        while self.stalling:
            stalls, added = random.random() < self.stalling, random.exponential(self.stall_s)
            yield seconds + added * stalls
        yield from repeat(seconds)


def _parse_stalls(text: str) -> tuple[float, float]:
    """Returns the share of the passes that stall, and the mean stall over the computation."""
    share, separator, factor = text.partition(":")
    try:
        found = parse_share(share), float(factor) if separator else math.nan
        if not 0 < found[1] < math.inf:
            raise ValueError(f"a stall must be a positive multiple of the computation, got {found[1]!r}")
    except ValueError as error:
        raise ValueError(f"stalls={text!r} is not SHARE%:FACTOR, as in 5%:10 ({error})") from error
    return found


class Passes:
    """Runs passes that take at least a given time each.

    The rest of the time is slept between forward and backward, so that what a method exchanges under the backward pass
    comes as late as it would if all layers took longer, and so that the hosts do not compete for this machine's
    processors. The next backward pass is expected to take the processor time of the last.

    Args:
        seconds: the least seconds of each pass.
    """

    def __init__(self, seconds: Iterator[float]) -> None:
        self._seconds = seconds
        self._backward_s = 0.0

    def run(self, forward: Callable[[], Tensor], check: Callable[[], object] = lambda: None) -> float:
        """Runs a forward and a backward pass.

        Args:
            forward: computes the loss.
            check: called every few ms while the rest of the time is slept; may raise, to end the pass.

        Returns:
            The loss.
        """
        end = time.perf_counter() + next(self._seconds) - self._backward_s
        loss = forward()
        while (rest := end - time.perf_counter()) > 0:
            check()
            time.sleep(min(rest, SLICE_S))
        begin = time.thread_time()
        loss.backward()
        self._backward_s = time.thread_time() - begin
        return loss.item()
