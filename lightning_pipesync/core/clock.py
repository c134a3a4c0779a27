"""Moments of a computation, on the host or on a CUDA device."""

from __future__ import annotations

import time
from typing import TypeAlias

import torch

#: A moment: seconds of the host's clock, or an event in the work of a device.
Moment: TypeAlias = "float | torch.cuda.Event"


class Clock:
    """Tells when the work that a device has been given so far is done; without blocking."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Moment:
        """Returns the moment at which the work of the current stream so far is done."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, begin: Moment, end: Moment) -> float:
        """Returns the seconds from ``begin`` to ``end``; on CUDA it blocks until both have come."""
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float)
            assert isinstance(end, float)
            return end - begin
        begin.synchronize()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
