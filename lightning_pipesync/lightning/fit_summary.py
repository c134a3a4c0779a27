"""The line at the end of a fit: what the method did, what it sent, and how long training waited."""

from __future__ import annotations

from statistics import fmean
from time import perf_counter

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.methods.method import Method


class FitSummary:
    """Counts what a method does from now on.

    Args:
        method: the method that is about to train.
        num_steps: the number of optimizer steps before.
    """

    def __init__(self, method: Method, num_steps: int) -> None:
        assert method.transport is not None  # only virtual stages have none
        self._method, self._transport = method, method.transport
        self._num_steps, self._metrics = num_steps, method.metrics()
        self._num_bytes, self._waited = self._count_traffic()
        self._began = perf_counter()

    def text(self, num_steps: int) -> str | None:
        """Returns the line, on rank 0; None on others, and if no step was taken. A collective call.

        Bytes and waiting are means over the ranks. With NCCL, streams wait, which is not counted, so that the line says
        nothing about waiting.

        Args:
            num_steps: the number of optimizer steps now.
        """
        method, transport = self._method, self._transport
        seconds, (num_bytes, waited) = perf_counter() - self._began, self._count_traffic()
        counted = num_steps - self._num_steps, num_bytes - self._num_bytes, (waited - self._waited) / seconds
        steps, sent, share = (fmean(values) for values in zip(*transport.job.gather_objects(counted), strict=True))
        if steps == 0 or transport.job.rank != 0:
            return None
        text = f"{type(method).__name__}: {method.summary(round(steps), self._metrics)}"
        if transport.job.world_size > 1 and method.counts_traffic:
            text += f"; each rank sent {_mib(sent)}"
            if method.ddp_bytes is not None:
                text += f", where DDP sends at least {_mib(steps * method.ddp_bytes)}"
            if transport.backend != "nccl":
                text += f"; training waited for the network {share:.0%} of the time"
        return f"{text}."

    def _count_traffic(self) -> tuple[int, float]:
        """Returns bytes sent and seconds waited so far."""
        traffic = self._transport.traffic
        return traffic.total_bytes_sent, traffic.total_seconds_waited


def _mib(num_bytes: float) -> str:
    mib = num_bytes / MIB
    return f"{mib:.2g} MiB" if mib < 10 else f"{mib:,.0f} MiB"
