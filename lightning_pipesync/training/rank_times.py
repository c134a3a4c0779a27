"""What each rank has spent its time on, and which ranks are slow."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median_low
from time import perf_counter
from typing import Any, Protocol

import torch.distributed as dist

#: A rank that computes for so many times as long as the median is slow.
SLOW = 1.25


@dataclass
class RankTimes:
    """What a rank has spent.

    Attributes:
        seconds: of all that was counted.
        waited: the seconds of these that it has waited for the network or other ranks; None: nobody has counted.
        mib_sent: MiB that it has sent in steps, all of them; None: nobody has counted.
        host: its host's name.
    """

    seconds: float = 0.0
    waited: float | None = None
    mib_sent: float | None = None
    host: str = field(default_factory=socket.gethostname)

    @property
    def computed(self) -> float:
        return self.seconds - (self.waited or 0.0)

    def add(self, seconds: float, waited: float | None) -> None:
        """Adds what a batch took."""
        self.seconds += seconds
        self.waited = None if waited is None else (self.waited or 0.0) + waited


class HasMetrics(Protocol):
    """A method, or an Accelerator with methods."""

    def metrics(self) -> dict[str, float]: ...


@contextmanager
def step_report(sync: HasMetrics) -> Iterator[None]:
    """Context manager around a training loop, at whose end rank 0 prints what each rank has spent its time on::

        with step_report(sync):
            for x, y in loader:
                ...
                sync.step()

    Whatever a rank did not wait for counts as computation, the loading of its data, too. A collective call, unless the
    loop raises.

    Args:
        sync: the attached method, such as ``DeAR(model, optimizer)``; or a :class:`PipeSyncAccelerator`, whose methods
            count together.
    """
    began, before = perf_counter(), sync.metrics()
    yield
    after, seconds = sync.metrics(), perf_counter() - began
    waited, mib_sent = (_increase(before, after, name) for name in ("exposed_seconds", "mib_sent"))
    report(RankTimes(seconds, waited, mib_sent))


def _increase(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float | None:
    """Returns by how much a metric, of all methods, is larger; None: there is none."""
    counted = [key for key in after if key.rpartition("/")[2] == name]
    return sum(after[key] - before.get(key, 0.0) for key in counted) if counted else None


def report(own: RankTimes) -> None:
    """Prints a table of all ranks on rank 0; a collective call on the default group."""
    ranks: list[Any] = [own]
    if dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, own)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(as_table(ranks))


def as_table(ranks: Sequence[RankTimes]) -> str:
    """Returns a table with a row for each rank, as text."""
    rows = [("rank", "host", "computing", "of median", "waiting", "%", "MiB sent", "")]
    for rank, (times, ratio) in enumerate(zip(ranks, slowness(ranks), strict=True)):
        share = None if times.waited is None or not times.seconds else 100 * times.waited / times.seconds
        waited, sent = _number(times.waited, ".1f"), _number(times.mib_sent, ".1f")
        note = "slow" if ratio > SLOW else ""
        rows.append(
            (str(rank), times.host, f"{times.computed:.1f}", f"{ratio:.1f}", waited, _number(share, ".0f"), sent, note)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = (str.ljust, str.ljust, *[str.rjust] * 5, str.ljust)
    lines = ["Seconds of each rank"]
    for row in rows:
        cells = (side(cell, width) for side, cell, width in zip(justify, row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def slowness(ranks: Sequence[RankTimes]) -> list[float]:
    """Returns the computation of each rank as a multiple of their median, the lower one of two."""
    typical = median_low(times.computed for times in ranks)
    return [times.computed / typical if typical else 1.0 for times in ranks]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
