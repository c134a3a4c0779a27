"""Horovod's tensor fusion, by size and time (Sergeev and Del Balso, arXiv 1802.05799)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bayes_opt import BayesianOptimization
from torch import Tensor

from benchmarks.baselines.over_transport import OverTransport
from lightning_pipesync.core.buckets import Bucket, Fusion, plan_buckets
from lightning_pipesync.core.comm.handle import Promise, Worker
from lightning_pipesync.core.parameters import hook_gradient
from lightning_pipesync.lab.bench.models import BenchModel

#: Its defaults: MiB of the fusion buffer, and milliseconds of a cycle.
FUSION_MB, CYCLE_MS = 64.0, 1.0

#: Sizes and cycles among which the search chooses, and the number of its trials and of the steps of each.
SIZES_MB, CYCLES_MS = (0.25, 64.0), (0.5, 50.0)
TRIALS, STEPS = 12, 2


class Horovod(OverTransport):
    """Once a cycle the ranks find out which gradients are ready on all of them, and average these, fused.

    Args:
        model: the model that it trains.
        name: the name in tables.
    """

    def __init__(self, model: BenchModel, name: str = "Horovod") -> None:
        super().__init__(name, model, "baseline")
        self.fusion_mb, self.cycle_ms = FUSION_MB, CYCLE_MS
        self._worker = Worker("pipesync-horovod")
        self._index = {id(parameter.tensor): index for index, parameter in enumerate(self.in_ready_order)}
        self._ready = [False] * len(self._index)
        self._buffers: dict[tuple[int, ...], Bucket] = {}  # kept, like its fusion buffer
        self.hooks = [hook_gradient(parameter.tensor, self._gradient_is_ready) for parameter in self.in_ready_order]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._ready = [False] * len(self._index)
        averaged: Promise[None] = Promise()
        self._worker.submit(lambda: averaged.run(self._average))
        self.backward()
        averaged.wait()
        self.optimizer.step()

    def close(self) -> None:
        self._worker.close(10.0)
        super().close()

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        self._ready[self._index[id(parameter)]] = True

    def _average(self) -> None:
        """Averages all gradients of a step, on the thread."""
        left = list(range(len(self._ready)))
        while left:
            time.sleep(self.cycle_ms / 1000)
            missing = self.transport.union([not self._ready[index] for index in left]).wait()
            ready = [index for index, is_missing in zip(left, missing, strict=True) if not is_missing]
            left = [index for index, is_missing in zip(left, missing, strict=True) if is_missing]
            named = [self.in_ready_order[index] for index in ready]
            for group in plan_buckets(named, Fusion(bucket_mb=self.fusion_mb)):
                self._all_reduce([parameter.tensor for parameter in group])

    def _all_reduce(self, tensors: Sequence[Tensor]) -> None:
        key = tuple(self._index[id(tensor)] for tensor in tensors)
        if key not in self._buffers:
            self._buffers[key] = Bucket(tensors)
        self._buffers[key].pack_gradients(tensors)
        self.transport.all_reduce(self._buffers[key].flat, mean=True).wait()
        self._buffers[key].unpack([tensor.grad for tensor in tensors if tensor.grad is not None])


class TunedHorovod(Horovod):
    """Horovod with its autotuning: Bayesian optimization of the size of the buffer and the length of a cycle."""

    def __init__(self, model: BenchModel) -> None:
        super().__init__(model, "Horovod, bo")

    def prepare(self) -> dict[str, Any] | None:
        search = BayesianOptimization(
            None, {"size": SIZES_MB, "cycle": CYCLES_MS}, random_state=0, verbose=0, allow_duplicate_points=True
        )
        started = time.perf_counter()
        self.step()
        trials: list[tuple[float, dict[str, float]]] = []
        for number in range(TRIALS):
            default = {"size": FUSION_MB, "cycle": CYCLE_MS}
            point = self.transport.gather_objects(default if number == 0 else search.suggest())[0]
            self.fusion_mb, self.cycle_ms = point["size"], point["cycle"]
            begun = time.perf_counter()
            for _ in range(STEPS):
                self.step()
            seconds = max(self.transport.gather_objects((time.perf_counter() - begun) / STEPS))
            search.register(point, 1 / seconds)
            trials.append((seconds, point))
        _, best = min(trials, key=lambda trial: trial[0])
        self.fusion_mb, self.cycle_ms = best["size"], best["cycle"]
        took = time.perf_counter() - started
        return {"trials": TRIALS, "steps": 1 + TRIALS * STEPS, "seconds": took, "size": self.fusion_mb, "edge": None}
