"""A recorded timeline of computation and communication in training steps (DeAR, Fig. 2)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from lightning_pipesync.core.comm.handle import Handle, Promise
from lightning_pipesync.core.parameters import modules_with_parameters
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.candidate import Candidate
from lightning_pipesync.lab.bench.candidates import Wrapped, makers
from lightning_pipesync.lab.bench.step import StepSettings, emulated_builder
from lightning_pipesync.lab.bench.with_method import WithMethod
from lightning_pipesync.lab.papers.baselines import OverTransport


@dataclass(frozen=True)
class Span:
    """A span of computation or communication.

    Attributes:
        kind: forward or backward; reduce-scatter, all-gather or all-reduce.
        number: the index of the layer in the order of execution, or of the operation of this kind.
        start: start in seconds.
        end: end in seconds.
    """

    kind: str
    number: int
    start: float
    end: float


class Recorder:
    """Records the computation and the communication of a candidate on this rank."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._counts: dict[str, int] = {}
        self._backward: dict[int, list[float]] = {}  # by layer: its start, and when its gradients were ready

    def watch(self, candidate: Candidate) -> None:
        """Registers hooks on the modules with parameters of their own, and on the communication."""
        for number, module in enumerate(modules_with_parameters(candidate.model.module)):
            started: list[float] = []
            module.register_forward_pre_hook(lambda *_, started=started: started.append(time.perf_counter()))
            module.register_forward_hook(
                lambda *_, number=number, started=started: self._note("forward", number, started.pop())
            )
            module.register_full_backward_pre_hook(partial(self._record_backward, number))
            for parameter in module.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(partial(self._record_backward, number))
        if isinstance(candidate, WithMethod | OverTransport):
            transport = candidate.transport if isinstance(candidate, OverTransport) else candidate.sync.transport
            for name in ("reduce_scatter", "all_gather", "all_reduce"):
                self._watch_operation(transport, name)
        elif isinstance(candidate, Wrapped) and isinstance(candidate.module, nn.parallel.DistributedDataParallel):
            candidate.module.register_comm_hook(None, lambda _, bucket: self._all_reduce(bucket))

    def end_step(self) -> None:
        """Records the spans of the backward pass."""
        for number, moments in self._backward.items():
            self.spans.append(Span("backward", number, moments[0], moments[-1]))
        self._backward.clear()

    def _record_backward(self, number: int, *_: Any) -> None:
        self._backward.setdefault(number, []).append(time.perf_counter())

    def _note(self, kind: str, number: int, start: float) -> None:
        self.spans.append(Span(kind, number, start, time.perf_counter()))

    def _begin(self, kind: str) -> Callable[[], None]:
        """Starts the span of an operation; returns a function that ends it."""
        number, start = self._counts.get(kind, 0), time.perf_counter()
        self._counts[kind] = number + 1
        return lambda: self._note(kind, number, start)

    def _watch_operation(self, transport: Any, name: str) -> None:
        operation, kind = getattr(transport, name), name.replace("_", "-")

        def watched(*args: Any, **settings: Any) -> Handle[Tensor]:
            end = self._begin(kind)
            handle, promise = operation(*args, **settings), Promise[Tensor]()

            def watch() -> None:  # on a thread, because the result may be ready before anyone waits for it
                promise.run(handle.wait)
                end()

            threading.Thread(target=watch, daemon=True).start()
            return Handle(promise.wait)

        setattr(transport, name, watched)

    def _all_reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Averages a bucket, as DDP does by default."""
        end, buffer = self._begin("all-reduce"), bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None

        def finish(future: Future[list[Tensor]]) -> Tensor:
            end()
            return future.value()[0]

        return work.get_future().then(finish)


def measure_timeline(settings: StepSettings, progress: Callable[[str], object]) -> dict[str, Any]:
    """Records some steps of every candidate, one candidate after the other; a collective call.

    Returns:
        Settings, and for each candidate the ``spans`` of these steps on rank 0, in seconds since the start of the first
        one, and ``steps``: the ends of the steps.
    """
    build = emulated_builder(settings, settings.ratios[0], measure_bandwidth())
    torch.manual_seed(0)
    timelines = []
    for candidate in [make(build()) for make in makers(settings.methods, settings.bucket_mb)]:
        candidate.prepare()
        timelines.append({"name": candidate.name, **record(candidate, settings.steps)})
        candidate.close()
        progress(candidate.name)
    return {"settings": asdict(settings), "world_size": dist.get_world_size(), "timelines": timelines}


def record(candidate: Candidate, num_steps: int, warmup: int = 3) -> dict[str, Any]:
    """Returns the ``spans`` of some steps on this rank, and the ends of the ``steps``; a collective call."""
    recorder = Recorder()
    recorder.watch(candidate)
    for _ in range(warmup):
        candidate.step()
        recorder.end_step()
    dist.barrier()
    began, ends = time.perf_counter(), []
    recorder.spans.clear()
    for _ in range(num_steps):
        candidate.step()
        recorder.end_step()
        ends.append(time.perf_counter() - began)
    candidate.drain()
    within = [(s, max(0.0, s.start - began), min(ends[-1], s.end - began)) for s in recorder.spans]
    spans = [asdict(Span(s.kind, s.number, start, end)) for s, start, end in within if start < end]
    return {"spans": spans, "steps": ends}
