"""Traces of some steps by ``torch.profiler``, on all threads of all ranks, in one file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.profiler import profile, schedule

from lightning_pipesync.core.files import replacing
from lightning_pipesync.core.torch_private import all_threads

#: In Chrome's format, as ``torch.profiler`` exports it: ``traceEvents``, whose times are in µs.
Trace: TypeAlias = dict[str, Any]


class TraceRecorder:
    """Records ``num_steps`` steps of this rank on all of its threads, after ``first_step`` steps, at least 1.

    The profiler warms up in the step before. ``trace`` is None until the steps, or some of them, are recorded.
    """

    def __init__(self, first_step: int, num_steps: int) -> None:
        self.trace: Trace | None = None
        self._profile = profile(
            schedule=schedule(skip_first=first_step - 1, wait=0, warmup=1, active=num_steps, repeat=1),
            on_trace_ready=self._keep,
            experimental_config=all_threads(),
        )

    def start(self) -> None:
        self._profile.start()

    def end_step(self) -> None:
        self._profile.step()

    def stop(self) -> None:
        """Ends the recording, if it has not ended yet."""
        self._profile.stop()

    def _keep(self, _: object) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            self.trace = json.loads(path.read_text())


def gather_traces(trace: Trace | None) -> list[Trace | None]:
    """Returns all ranks' traces, by rank, on rank 0, and nothing on others; a collective call on the default group."""
    if not dist.is_initialized():
        return [trace]
    sent = zlib.compress(json.dumps(trace).encode(), level=1)
    received: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(sent, received)
    return [json.loads(zlib.decompress(of_rank)) for of_rank in received or ()]


def write_merged(path: Path, runs: Mapping[str, Sequence[Trace | None]]) -> None:
    """Writes the traces of ``runs``, by name and rank, to one file. Each run begins at 0.

    A rank has a track for each thread, under the name of the run and its rank; further ones for each GPU's streams.
    The ranks' times are as far apart as the clocks of their hosts.
    """
    events: list[Trace] = []
    for run, traces in runs.items():
        bases = {rank: trace["baseTimeNanoseconds"] for rank, trace in enumerate(traces) if trace is not None}
        ranks = [
            (rank, _events(trace, (bases[rank] - min(bases.values())) / 1e3))
            for rank, trace in enumerate(traces)
            if trace is not None
        ]
        start = min((event["ts"] for _, of_rank in ranks for event in of_rank if "ts" in event), default=0.0)
        for rank, of_rank in ranks:
            events += _renamed(of_rank, f"{run} rank {rank}".strip(), start, first_pid=len(events) + 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(trace: Trace, later: float) -> list[Trace]:
    """Returns the events of processes and GPUs ``later`` µs later, and their tracks, without a time."""
    events = []
    for event in trace["traceEvents"]:
        if isinstance(event.get("pid"), int):
            event = dict(event)
            if event["ph"] == "M":
                del event["ts"]
            else:
                event["ts"] += later
            events.append(event)
    return events


def _renamed(events: Sequence[Trace], name: str, start: float, first_pid: int) -> list[Trace]:
    """Returns events after ``start``, with ids that no other rank has, and tracks that are named after the rank."""
    labels = {event["pid"]: event["args"]["labels"] for event in events if event["name"] == "process_labels"}
    threads, pids = _thread_names(events), dict[int, int]()
    renamed = []
    for event in events:
        old = event["pid"]
        if event["name"] == "thread_name" and event["args"]["name"] != threads.get((old, event["tid"])):
            continue
        pid = pids.setdefault(old, first_pid + len(pids))
        event = {**event, "pid": pid}
        if "ts" in event:
            event["ts"] -= start
        if "id" in event:  # of an arrow from a launch to its kernel
            event["id"] = f"{first_pid}.{event['id']}"
        if event["name"] == "process_name":
            event["args"] = {"name": name if labels.get(old, "CPU") == "CPU" else f"{name}, {labels[old]}"}
        elif event["name"] == "process_sort_index":
            event["args"] = {"sort_index": pid}
        renamed.append(event)
    return renamed


def _thread_names(events: Sequence[Trace]) -> dict[tuple[int, int], str]:
    """Returns the name of each thread with events, by process and thread.

    A trace also names the threads of former traces, and one of its threads twice: the other name is its process's.
    """
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    alive = {(event["pid"], event["tid"]) for event in events if "ts" in event}
    names: dict[tuple[int, int], str] = {}
    for event in events:
        key = event["pid"], event.get("tid", 0)
        if event["name"] == "thread_name" and key in alive:
            name = event["args"]["name"]
            names[key] = names.get(key, name) if name.endswith(f"({processes.get(key[0])})") else name
    return names
