"""When a training step computes and when it communicates, as it happened (DeAR, Fig. 2)."""

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

from lightning_pipesync.bench.bandwidth import measure_bandwidth
from lightning_pipesync.bench.contestants import Contestant, WithMethod, Wrapped, makers
from lightning_pipesync.bench.step import StepSettings, emulated_builder
from lightning_pipesync.core.handle import Handle, Promise
from lightning_pipesync.core.parameters import modules_with_parameters


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        kind: forward or backward; reduce-scatter, all-gather or all-reduce.
        number: which layer, in the order of execution, or which operation of this kind.
        start: seconds.
        end: seconds.
    """

    kind: str
    number: int
    start: float
    end: float


class Recorder:
    """Notes what a contestant computes and communicates on this rank."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._counts: dict[str, int] = {}
        self._backward: dict[int, list[float]] = {}  # by layer, when it began and when a gradient was ready

    def watch(self, contestant: Contestant) -> None:
        """Hooks onto the modules that have parameters of their own, and onto the communication."""
        for number, module in enumerate(modules_with_parameters(contestant.model.module)):
            started: list[float] = []
            module.register_forward_pre_hook(lambda *_, started=started: started.append(time.perf_counter()))
            module.register_forward_hook(
                lambda *_, number=number, started=started: self._note("forward", number, started.pop())
            )
            module.register_full_backward_pre_hook(partial(self._backward_goes_on, number))
            for parameter in module.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(partial(self._backward_goes_on, number))
        if isinstance(contestant, WithMethod):
            for name in ("reduce_scatter", "all_gather", "all_reduce"):
                self._watch_operation(contestant.sync.transport, name)
        elif isinstance(contestant, Wrapped) and isinstance(contestant.module, nn.parallel.DistributedDataParallel):
            contestant.module.register_comm_hook(None, lambda _, bucket: self._all_reduce(bucket))

    def end_step(self) -> None:
        """Notes the backward pass."""
        for number, moments in self._backward.items():
            self.spans.append(Span("backward", number, moments[0], moments[-1]))
        self._backward.clear()

    def _backward_goes_on(self, number: int, *_: Any) -> None:
        self._backward.setdefault(number, []).append(time.perf_counter())

    def _note(self, kind: str, number: int, start: float) -> None:
        self.spans.append(Span(kind, number, start, time.perf_counter()))

    def _begin(self, kind: str) -> Callable[[], None]:
        """Starts an operation; returns what ends it."""
        number, start = self._counts.get(kind, 0), time.perf_counter()
        self._counts[kind] = number + 1
        return lambda: self._note(kind, number, start)

    def _watch_operation(self, transport: Any, name: str) -> None:
        operation, kind = getattr(transport, name), name.replace("_", "-")

        def watched(*args: Any, **settings: Any) -> Handle[Tensor]:
            end = self._begin(kind)
            handle, promise = operation(*args, **settings), Promise[Tensor]()

            def watch() -> None:  # on a thread: whoever waits may come later than the result
                promise.run(handle.wait)
                end()

            threading.Thread(target=watch, daemon=True).start()
            return Handle(promise.wait)

        setattr(transport, name, watched)

    def _all_reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """DDP's own: the average of a bucket."""
        end, buffer = self._begin("all-reduce"), bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None

        def finish(future: Future[list[Tensor]]) -> Tensor:
            end()
            return future.value()[0]

        return work.get_future().then(finish)


def measure_timeline(settings: StepSettings, progress: Callable[[str], object]) -> dict[str, Any]:
    """Records some steps of every contestant, one contestant after the other; a collective call.

    Returns:
        Settings, and for each contestant what rank 0 did: its ``spans`` within these steps, in seconds since the
        first one began, and ``steps``, when each of them ended.
    """
    build = emulated_builder(settings, settings.ratios[0], measure_bandwidth())
    torch.manual_seed(0)
    timelines = []
    for contestant in [make(build()) for make in makers(settings.methods, settings.bucket_mb)]:
        contestant.prepare()
        timelines.append({"name": contestant.name, **record(contestant, settings.steps)})
        contestant.close()
        progress(contestant.name)
    return {"settings": asdict(settings), "world_size": dist.get_world_size(), "timelines": timelines}


def record(contestant: Contestant, num_steps: int, warmup: int = 3) -> dict[str, Any]:
    """Returns the ``spans`` of some steps on this rank, and when the ``steps`` ended; a collective call."""
    recorder = Recorder()
    recorder.watch(contestant)
    for _ in range(warmup):
        contestant.step()
        recorder.end_step()
    dist.barrier()
    began, ends = time.perf_counter(), []
    recorder.spans.clear()
    for _ in range(num_steps):
        contestant.step()
        recorder.end_step()
        ends.append(time.perf_counter() - began)
    contestant.drain()
    within = [(s, max(0.0, s.start - began), min(ends[-1], s.end - began)) for s in recorder.spans]
    spans = [asdict(Span(s.kind, s.number, start, end)) for s, start, end in within if start < end]
    return {"spans": spans, "steps": ends}
