"""The speeds of emulated hosts: how long the computation of each rank takes, pass by pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from lightning_pipesync.lab.netlab.faults import Slow, check_faults, parse_slow
from lightning_pipesync.lab.netlab.units import parse_seconds, parse_share


@dataclass(frozen=True)
class Stalls:
    """Stalls at random: now and then a pass takes longer, by an exponentially distributed time.

    Attributes:
        share: the share of the passes that stall.
        factor: the mean of the added time, over the computation of a step.
    """

    share: float
    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"stalls: a stall must be a positive multiple of the computation, got {self.factor!r}.")


@dataclass(frozen=True)
class HostSpeeds:
    """How long the computation of a step takes on each host.

    Attributes:
        compute_s: the seconds of a step on a host of full speed.
        slow: the hosts that compute at a share of that speed.
        stalls: of all hosts; None: there are none.
    """

    compute_s: float = 0.0
    slow: tuple[Slow, ...] = ()
    stalls: Stalls | None = None

    @classmethod
    def parse(cls, compute: str | None, slow: Sequence[str], stalls: str | None) -> HostSpeeds:
        """Returns the speeds that a user has written.

        Args:
            compute: a duration, ``"100ms"``; None: nothing is emulated.
            slow: ``"HOST:SHARE%"`` each, as in ``"3:50%"``.
            stalls: ``"SHARE%:FACTOR"``, as in ``"5%:10"``; None: there are none.

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
        check_faults(hosts, 1 + max((one.host for one in hosts), default=0))
        return cls(compute_s, tuple(hosts), None if stalls is None else _parse_stalls(stalls))

    def check_hosts(self, num_hosts: int) -> None:
        """Raises ValueError if a host that is to be slow does not exist."""
        check_faults(self.slow, num_hosts)

    def seconds_of(self, host: int, seed: int) -> Iterator[float]:
        """Yields the seconds of a host's passes, without an end; the same ones for the same seed."""
        share = next((one.share for one in self.slow if one.host == host), 1.0)
        seconds = self.compute_s / share
        if self.stalls is None:
            return repeat(seconds)
        return self._stalling(seconds, self.stalls, np.random.default_rng((seed, host)))

    def _stalling(self, seconds: float, stalls: Stalls, random: np.random.Generator) -> Iterator[float]:
        while True:
            stalled, added = random.random() < stalls.share, random.exponential(stalls.factor * self.compute_s)
            yield seconds + added * stalled


def _parse_stalls(text: str) -> Stalls:
    share, separator, factor = text.partition(":")
    try:
        return Stalls(parse_share(share), float(factor) if separator else math.nan)
    except ValueError as error:
        raise ValueError(f"stalls={text!r} is not SHARE%:FACTOR, as in 5%:10 ({error})") from error
