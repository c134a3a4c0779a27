"""The candidates of the benchmark of a training step that are methods of this package."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.lab.bench.candidate import Candidate, sgd
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.named_settings import parse_named
from lightning_pipesync.methods.dear import DeAR, DeARConfig
from lightning_pipesync.methods.local_sgd import LocalSGD, LocalSGDConfig
from lightning_pipesync.methods.pipe_sgd import PipeSGD, PipeSGDConfig
from lightning_pipesync.methods.selsync import SelSync, SelSyncConfig
from lightning_pipesync.methods.servers import ParameterServer, ParameterServerConfig
from lightning_pipesync.methods.sync_method import SyncMethod

#: Makes a candidate for a model.
MakeCandidate = Callable[[BenchModel], Candidate]

#: The settings of each method that can be compared.
CONFIG_TYPES = {
    "dear": DeARConfig,
    "local_sgd": LocalSGDConfig,
    "parameter_server": ParameterServerConfig,
    "pipe_sgd": PipeSGDConfig,
    "selsync": SelSyncConfig,
}


class WithMethod(Candidate):
    """A method of this package.

    Args:
        model: the model that it trains.
        name: the name in tables.
        method: the class of the method.
        config: its settings.
        limit: the property of :class:`StepCost` that bounds the time of its step from below.
    """

    def __init__(self, model: BenchModel, name: str, method: type[SyncMethod], config: Any, limit: str) -> None:
        super().__init__(name, model)
        self.limit = limit
        self.optimizer = sgd(model.module.parameters())
        self.sync = method(model.module, self.optimizer, config)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model.loss(self.model.module, self.batch).backward()
        self.sync.step()

    def prepare(self) -> dict[str, Any] | None:
        if not isinstance(self.sync, DeAR):
            return None
        started = time.perf_counter()
        steps = 0
        while not (self.sync.tuned and self.sync.planned):
            self.step()
            steps += 1
        if not self.sync.trials:
            return None
        took, fusion = time.perf_counter() - started, self.sync.fusion
        tried = len({trial.seconds for trial in self.sync.trials})  # equal buckets are measured once
        return {"trials": tried, "steps": steps, "seconds": took, "size": fusion.bucket_mb, "edge": fusion.edge_mb}

    def drain(self) -> None:
        self.sync.flush()
        self.sync.resume()

    def close(self) -> None:
        self.sync.detach()


class WithPipeSGD(WithMethod):
    """Pipe-SGD, whose all-reduce runs under the next step."""

    def __init__(self, model: BenchModel, name: str, config: PipeSGDConfig) -> None:
        super().__init__(model, name, PipeSGD, config, "pipe_sgd")
        self.sync: PipeSGD
        numel = sum(parameter.numel() for parameter in model.module.parameters())
        self.compression = 4 * numel / get_codec(config.compression).wire_bytes(numel, torch.float32)
        self.segments = config.segments if config.pipeline_level == 2 else 1

    def begin(self) -> None:
        self.step()  # its gradient may have started within the backward pass
        self.step()

    def drain(self) -> None:
        self.sync.drain()


class WithLocalSGD(WithMethod):
    """Local SGD, whose averages may run under the steps that follow."""

    def __init__(self, model: BenchModel, name: str, config: LocalSGDConfig) -> None:
        super().__init__(model, name, LocalSGD, config, "compute")
        self.period = config.period if isinstance(config.period, int) else 1
        self._overlaps = config.overlap_steps > 0

    def begin(self) -> None:
        for _ in range(self.period if self._overlaps else 0):
            self.step()


def with_method(text: str, bucket_mb: Sequence[float], known: Iterable[str]) -> list[MakeCandidate]:
    """Returns factories of the candidates of a method of this package.

    DeAR has one for each bucket size, unless its settings name ``bucket_mb`` or a ``fusion``. SelSync has one whose
    steps are all synchronized, for each bucket size if they are hidden under forward, and, without settings, one whose
    steps are all local. The others have one.

    Args:
        text: ``NAME`` or ``NAME:SETTING=VALUE,...``.
        bucket_mb: bucket sizes in MiB.
        known: what else can be compared, for an error's message.

    Raises:
        ValueError: the method or a setting is unknown, or a value out of its range.
    """
    name, _, settings = text.partition(":")
    if name not in CONFIG_TYPES:
        raise ValueError(f"methods: {text!r} is not known; there are {', '.join([*CONFIG_TYPES, *known])}.")
    shown = f" ({settings.replace(',', ', ')})" if settings else ""

    def parse(**fixed: Any) -> Any:
        return parse_named(text, CONFIG_TYPES, fixed)

    sizes: list[tuple[str, dict[str, Any]]] = [(f", {size:g} MiB", {"bucket_mb": size}) for size in bucket_mb]
    if name == "local_sgd":
        return [partial(WithLocalSGD, name=f"local SGD{shown}", config=parse())]
    if name == "parameter_server":
        config = parse()
        return [partial(WithMethod, name=f"servers{shown}", method=ParameterServer, config=config, limit="serial")]
    if name == "pipe_sgd":
        return [partial(WithPipeSGD, name=f"Pipe-SGD{shown}", config=parse())]
    if name == "selsync":
        if not parse().overlaps or "bucket_mb=" in settings:
            sizes = [("", {})]
        limit = "under_forward" if parse().overlaps else "serial"
        named = [(f"synchronized step{size}", parse(delta=0.0, **fixed), limit) for size, fixed in sizes]
        named += [] if settings else [("local step", parse(delta=1e9), "compute")]
        return [
            partial(WithMethod, name=f"SelSync{shown}, {kind}", method=SelSync, config=config, limit=limit)
            for kind, config, limit in named
        ]
    if "fusion=" in settings or "bucket_mb=" in settings:
        sizes = [("", {})]
    fixed_fusion = {} if "fusion=" in settings else {"fusion": "buffer"}
    configs = [(f"DeAR{shown}{size}", parse(**fixed_fusion, **fixed)) for size, fixed in sizes]
    return [
        partial(WithMethod, name=of, method=DeAR, config=config, limit="eager" if config.gathers_early else "dear")
        for of, config in configs
    ]
