"""Exposed communication is what the training thread waited for, by kind, whatever the method."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.handle import Promise, Worker, on_worker_thread
from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.dear import DeAR
from lightning_pipesync.methods.ea_pipe import EAPipe
from lightning_pipesync.methods.pipe_sgd import PipeSGD
from lightning_pipesync.methods.selsync import SelSync
from tests.support.case_table import launch_cases
from tests.support.harness import on_ranks
from tests.support.lost_ranks import wait_for

#: Seconds for which another rank has waited when a late one comes.
LATE = 0.4
METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "dear": (DeAR, {"fusion": "none"}),
    "dear, replicated": (DeAR, {"fusion": "buffer", "update": "replicated"}),
    "selsync": (SelSync, {"delta": 0.0}),
    "selsync, gradients": (SelSync, {"delta": 0.0, "aggregation": "gradients"}),
    "pipe_sgd": (PipeSGD, {}),
    "pipe_sgd, level 2": (PipeSGD, {"staleness": 0, "pipeline_level": 2}),
    "ea_pipe": (EAPipe, {}),
}


def begun(kind: type, settings: dict[str, Any]) -> tuple[Any, Callable[[], object]]:
    """Returns a method, and what takes a step with it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    batch = torch.randn(6, 4), torch.randint(2, (6,))
    make = partial(torch.optim.SGD, lr=0.1)
    if kind is EAPipe:
        engine = EAPipe(model, nn.functional.cross_entropy, make, split="parameters", **settings)
        return engine, lambda: engine.train_batch(batch)
    sync = kind(model, make(model.parameters()), **settings)

    def step() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        sync.step()

    return sync, step


@contextmanager
def long_wait_touches(file: Path, traffic: Traffic) -> Iterator[None]:
    """Within this context a file tells the rank that comes late when this one has waited for it for LATE seconds."""
    waiting = traffic.waiting

    @contextmanager
    def telling(kind: str) -> Iterator[None]:
        with waiting(kind):
            timer = threading.Timer(LATE, file.touch)
            if not on_worker_thread():
                timer.start()
            yield
            timer.cancel()

    traffic.waiting = telling  # type: ignore[method-assign]
    yield
    traffic.waiting = waiting  # type: ignore[method-assign]


@contextmanager
def late_after(file: Path) -> Iterator[None]:
    """Begins this context when another rank has waited for LATE seconds."""
    wait_for(file.exists)
    yield


def measure(name: str, folder: Path) -> list[dict[str, float]]:
    """Returns what this rank has waited for in three steps, in the first of which one rank after the other is late."""
    method, step = begun(*METHODS[name])
    traffic = method.transport.traffic
    outcomes = []
    for late in range(2):
        for _ in range(3):
            step()
        dist.barrier()
        before, began = method.metrics()["exposed_seconds"], time.perf_counter()
        file = folder / f"{name} {late}"
        with late_after(file) if dist.get_rank() == late else long_wait_touches(file, traffic):
            for _ in range(3):
                step()
        wall = time.perf_counter() - began
        outcomes.append({"exposed": method.metrics()["exposed_seconds"] - before, "wall": wall})
    by_kind = traffic.seconds_waited
    assert method.metrics()["exposed_seconds"] == sum(by_kind.values())
    method.detach()
    return outcomes


def test_who_waits_for_a_late_rank_is_exposed_for_as_long(tmp_path: Path) -> None:
    outcomes = launch_cases({name: partial(measure, name, tmp_path) for name in METHODS}, 2)
    for name in METHODS:
        for rank, of_rank in enumerate(outcomes[name]):
            for late, outcome in enumerate(of_rank):
                assert outcome["exposed"] <= outcome["wall"], (name, rank, late)
                assert rank == late or outcome["exposed"] >= LATE, (name, rank, late)


def test_a_pipeline_in_one_process_waits_for_nobody() -> None:
    engine, step = begun(EAPipe, {"virtual_stages": 2})
    step()
    assert engine.metrics()["exposed_seconds"] == 0.0


def wait_beside_training(folder: Path) -> tuple[dict[str, float], dict[str, float], float]:
    """Returns what was waited for by a thread beside training, then by training itself, and how long that took."""
    transport = Transport(timeout_s=60)
    queue, begun = CommQueue("test", transport.device, transport.traffic), folder / "begun"
    if late := transport.rank == 1:
        wait_for(begun.exists)
        time.sleep(LATE)
    transport.traffic.seconds_waited.clear()
    reducing = queue.submit("all_reduce", lambda: transport.all_reduce(torch.ones(8)))
    queue.start_finishing()
    begun.touch()
    wait_for(lambda: reducing.done)
    beside = dict(transport.traffic.seconds_waited)
    began = time.perf_counter()
    waits: list[Callable[[], object]] = [
        lambda: transport.all_gather(torch.ones(8)).wait(),
        lambda: transport.exchange_flags(1).wait(),
        lambda: transport.gather_objects("here"),
        lambda: (queue.submit("reduce_scatter", lambda: transport.reduce_scatter(torch.ones(8))), queue.wait_all()),
        lambda: send(transport),
    ]
    for number, wait in enumerate(waits):
        dist.barrier()
        file = folder / str(number)
        with late_after(file) if late else long_wait_touches(file, transport.traffic):
            wait()
    wall = time.perf_counter() - began
    queue.close(60)
    transport.close()
    return beside, transport.traffic.seconds_waited, wall


def send(transport: Transport) -> None:
    """Has rank 0 send two messages, of which but one may be on its way."""
    if transport.rank == 0:
        channel = transport.channel_to(1, 0, window=1)
        channel.send(torch.ones(8))
        channel.send(torch.ones(8))
        channel.finish()
    else:
        receiver = transport.channel_from(0, 0)
        receiver.receive()
        receiver.receive()
        receiver.close(60)


def test_waiting_beside_training_is_not_exposed_and_each_kind_is_counted_by_itself(tmp_path: Path) -> None:
    beside, waited, wall = on_ranks(wait_beside_training, 2, tmp_path)[0]
    assert beside == {}
    kinds = ("all_gather", "flags", "objects", "reduce_scatter", "send")
    assert all(waited[kind] >= LATE for kind in kinds), waited
    assert sum(waited[kind] for kind in kinds) <= wall, waited


def waits(traffic: Traffic, *kinds: str) -> None:
    """Waits for several things at once, one within the other."""
    if not kinds:
        time.sleep(0.1)
        return
    with traffic.waiting(kinds[0]):
        waits(traffic, *kinds[1:])


def test_a_wait_within_another_counts_once_and_a_worker_not_at_all() -> None:
    traffic, done, worker = Traffic(), Promise[None](), Worker("test")
    began = time.perf_counter()
    waits(traffic, "outer", "inner")
    wall = time.perf_counter() - began
    worker.submit(lambda: done.run(lambda: waits(traffic, "beside")))
    done.wait()
    worker.close(60)
    assert set(traffic.seconds_waited) == {"outer"}
    assert 0.1 <= traffic.total_seconds_waited <= wall
    backward = threading.Thread(target=waits, args=(traffic, "hook"))  # as a thread of autograd runs hooks on CUDA
    backward.start()
    backward.join()
    assert traffic.seconds_waited["hook"] >= 0.1
