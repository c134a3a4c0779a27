"""``python -m benchmarks.replicas``: the step time of replicas that come and go, beside torchft's DiLoCo."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from benchmarks import command
from benchmarks.churn.emulated_replica import build, take_steps
from benchmarks.churn.torchft_diloco import diloco
from benchmarks.intervals import number
from lightning_pipesync import LocalSGD
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.extras import check_extra
from lightning_pipesync.lab.bench.benchmark import Command, launched, progress_bar
from lightning_pipesync.lab.bench.tables import environment, table
from lightning_pipesync.launch.lighthouse import Lighthouse

#: Seconds that a replica waits for the others.
TIMEOUT_S = 120.0

ALONE = "no communication"


@dataclass(frozen=True, kw_only=True)
class Replicas(Command):
    """Times the steps of replicas, each a job of its own, which a launcher has started: DiLoCo, and streaming.

    Attributes:
        mib: MiB of the model's fp32 parameters.
        step_ms: Computation of a step, in milliseconds; its layers sleep.
        period: Steps between two averages.
        fragments: Parts of the model of the streaming candidates, averaged in turns.
        overlap_steps: Steps under which an average of a fragment runs, of the streaming candidates.
        periods: Periods of one measurement; one more is a warm-up.
        rounds: Number of measurements of each candidate, in turns.
    """

    mib: float = 12.0
    step_ms: float = 100.0
    period: int = 8
    fragments: int = 2
    overlap_steps: int = 2
    periods: int = 6
    rounds: int = 5

    name = "replicas"

    def __post_init__(self) -> None:
        self._check_positive("mib", "step_ms", "period", "fragments", "periods", "rounds")
        if self.period % self.fragments or not 0 <= self.overlap_steps < self.period // self.fragments:
            raise ValueError(
                f"fragments={self.fragments} must divide period={self.period}, and overlap_steps="
                f"{self.overlap_steps} must be shorter than the steps of a fragment: torchft has no other."
            )

    @property
    def candidates(self) -> dict[str, Candidate]:
        streaming: dict[str, Any] = {"fragments": self.fragments, "overlap_steps": self.overlap_steps}
        return {
            ALONE: _alone,
            "torchft DiLoCo": partial(_torchft, period=self.period),
            "local_sgd": partial(_ours, period=self.period),
            "torchft DiLoCo, streaming": partial(_torchft, period=self.period, **streaming),
            "local_sgd, streaming": partial(_ours, period=self.period, **streaming),
            "local_sgd, int4": partial(_ours, period=self.period, compression="int4"),
            "local_sgd, streaming, int4": partial(_ours, period=self.period, compression="int4", **streaming),
        }

    def results(self) -> list[dict[str, Any]]:
        """Times all candidates in turns; returns nothing on the ranks other than the first.

        Returns:
            Settings, the number of replicas, and by candidate round by round the seconds of a step of the slowest
            replica, the MiB that the last one sends in a step, None without an interface of its own, and its processor
            seconds; the first one has the lighthouse.

        Raises:
            ValueError: no launcher has started this process.
        """
        if not launched():
            raise ValueError(
                "Each replica is a process: pipesync netlab --hosts 2 --rate 200mbit -- python -m benchmarks.replicas"
            )
        check_extra("torchft", "python -m benchmarks.replicas")
        torch.set_num_threads(1)
        meeting = Meeting(*next(dist.rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S))))
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in self.candidates}
        with progress_bar(f"{meeting.size} replicas", self.rounds * len(measured)) as advance:
            for _ in range(self.rounds):
                for name, runs in measured.items():
                    runs.append(_together(meeting.gather(self._measure(name, meeting))))
                    advance(name)
        meeting.end()
        if meeting.rank != 0:
            return []
        candidates = [{"name": name, "runs": runs} for name, runs in measured.items()]
        about = {"settings": self.settings(), "replicas": meeting.size, "environment": environment()}
        return [{**about, "candidates": candidates}]

    @contextmanager
    def training(self, name: str, meeting: Meeting) -> Iterator[tuple[nn.Sequential, Update]]:
        """Gives the model of a candidate, and the function that ends a step; a collective call, also at the end."""
        model = build(self.mib, self.step_ms / 1e3)
        optimizer = SGD(model.parameters(), lr=1e-3)
        with ExitStack() as stack:
            address = None
            if meeting.rank == 0:
                # With fewer, one could go on alone while another begins.
                lighthouse = Lighthouse(0, min_replicas=meeting.size, heartbeat_timeout_s=TIMEOUT_S)
                address = f"{os.environ['MASTER_ADDR']}:{stack.enter_context(lighthouse.serving())}"
            address = meeting.gather(address)[0]
            stack.callback(meeting.gather, None)  # the lighthouse ends last
            yield model, stack.enter_context(self.candidates[name](model, optimizer, address, meeting))
            meeting.gather(None)

    def _measure(self, name: str, meeting: Meeting) -> dict[str, Any]:
        """Returns what this replica has measured of a step; a collective call."""
        steps = self.period * self.periods
        with self.training(name, meeting) as (model, update):
            take_steps(model, update, self.period)
            meeting.gather(None)
            sent, busy, begin = _sent_bytes(), time.process_time(), time.perf_counter()
            take_steps(model, update, steps)
            seconds, busy, now = time.perf_counter() - begin, time.process_time() - busy, _sent_bytes()
        mib = None if sent is None or now is None else (now - sent) / MIB / steps
        return {"seconds": seconds / steps, "mib": mib, "processor_seconds": busy / steps}

    def report(self, results: list[dict[str, Any]]) -> str:
        return "\n".join(self._table(result) for result in results)

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws nothing."""

    def _table(self, result: dict[str, Any]) -> str:
        rows = []
        for candidate in result["candidates"]:
            runs = candidate["runs"]
            milliseconds = [run["seconds"] * 1e3 for run in runs]
            sent = [run["mib"] for run in runs if run["mib"] is not None]
            rows.append(
                [
                    candidate["name"],
                    f"{median(milliseconds):.1f}",
                    f"{min(milliseconds):.1f} to {max(milliseconds):.1f}",
                    number(median(sent) if sent else None, ".2f"),
                    f"{median(run['processor_seconds'] for run in runs) * 1e3:.1f}",
                ]
            )
        headings = ["", "ms a step", "of all rounds", "MiB sent a step", "processor ms"]
        return f"""### {result["replicas"]} replicas of {self.mib:g} MiB

A step computes {self.step_ms:g} ms, and replicas average every {self.period} steps; streaming, {self.fragments}
fragments in turns, each under {self.overlap_steps} steps. Medians of {self.rounds} rounds; MiB are those of the last
replica's interface, and the processor time is that of its threads, of which none is the lighthouse's.

{table(headings, rows)}"""


class Meeting:
    """Replicas that wait for each other at a store, as they have no process group in common."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store, self._count = store, 0

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all; waits for them. They are written as JSON."""
        self._count += 1
        keys = [f"{self._count}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(value))
        self._store.wait(keys, timedelta(seconds=TIMEOUT_S))
        return [json.loads(self._store.get(key)) for key in keys]

    def end(self) -> None:
        """The last call of each; the first one, whose process has the store, returns when no other asks it any more."""
        if self.rank == 0:
            self._store.wait([f"{rank} ends" for rank in range(1, self.size)], timedelta(seconds=TIMEOUT_S))
        else:
            self._store.set(f"{self.rank} ends", "")


#: Ends a step.
Update = Callable[[], object]

#: Called with a model, its optimizer, the lighthouse and the replicas.
Candidate = Callable[[nn.Sequential, Optimizer, str, Meeting], AbstractContextManager[Update]]


@contextmanager
def _alone(model: nn.Module, optimizer: Optimizer, address: str, meeting: Meeting) -> Iterator[Update]:
    yield optimizer.step


@contextmanager
def _torchft(
    model: nn.Sequential, optimizer: Optimizer, address: str, meeting: Meeting, **settings: Any
) -> Iterator[Update]:
    # Weights that differ would be sent to the name of the host, which emulated hosts have in common.
    with diloco(model, optimizer, address, meeting.rank, same_weights=True, timeout_s=TIMEOUT_S, **settings):
        yield optimizer.step


@contextmanager
def _ours(model: nn.Module, optimizer: Optimizer, address: str, meeting: Meeting, **settings: Any) -> Iterator[Update]:
    replicas: dict[str, Any] = {"lighthouse": address, "num_replicas": meeting.size, "timeout_s": TIMEOUT_S}
    sync = LocalSGD(model, optimizer, outer_optimizer="nesterov", **replicas, **settings)
    sync.join()
    try:
        yield sync.step
    finally:
        sync.detach()


def _together(of_replicas: list[dict[str, Any]]) -> dict[str, Any]:
    return {**of_replicas[-1], "seconds": max(one["seconds"] for one in of_replicas)}


def _sent_bytes() -> int | None:
    """Returns what this host has sent through its interface so far; None if it is not an emulated one."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is None:
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return None


if __name__ == "__main__":
    sys.exit(command.main("benchmarks.replicas:Replicas"))
