"""The candidates of the benchmarks that are methods: those of the registry, as they declare them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.core.cluster import compression_of
from lightning_pipesync.lab.bench.candidate import Candidate, Trainable, sgd
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.named_settings import parse_settings, split_method, unknown_method
from lightning_pipesync.methods.laboratory import BenchCandidate, LabEntry
from lightning_pipesync.training.registry import METHODS

#: The way out for methods that nobody has registered.
OWN_METHODS = "For a method of yours: pipesync --import MODULE ..., which names the module that registers it."

#: Makes a candidate for a model; a collective call.
MakeCandidate = Callable[[BenchModel], Candidate]


class MethodCandidate(Trainable):
    """A method that synchronizes what a training loop computes, as it has ``declared``."""

    def __init__(self, model: BenchModel, method: Callable[..., Any], declared: BenchCandidate) -> None:
        super().__init__(declared.name, model, model.module)
        self.declared, self.limit = declared, declared.limit
        self.segments, self.period = declared.segments, declared.period
        self.sync = method(model.module, self.optimizer, declared.config)
        self.transport = self.sync.transport
        self.compression = compression_of(declared.codec, self.transport.world_size)
        self._check_of_pass = declared.check_of_pass(self.sync)
        for group in self.optimizer.param_groups:
            group["lr"] *= declared.lr_scale

    def step(self, batch: Any = None) -> None:
        self.declared.before_step(self.sync)
        check = self._check_of_pass
        if check is None:
            super().step(batch)
            return

        def closure() -> Any:
            loss = self.compute_gradient(batch, check)
            self._clip()
            return loss

        self.sync.step(lambda: self.optimizer.step(closure))

    def update(self) -> None:
        self._clip()
        self.sync.step()

    def prepare(self) -> dict[str, Any] | None:
        return self.declared.prepare(self.sync, self.step)

    def begin(self) -> None:
        for _ in range(self.declared.warmup_steps):
            self.step()

    def drain(self) -> None:
        self.declared.drain(self.sync)

    def close(self) -> None:
        self.sync.detach()

    @contextmanager
    def consolidated(self) -> Iterator[nn.Module]:
        self.sync.flush()
        yield self.model.module
        self.sync.resume()

    @property
    def mib_sent(self) -> float:
        sent: float = self.sync.metrics()["mib_sent"]
        return sent

    @property
    def lssr(self) -> float | None:
        return self.sync.metrics().get("lssr")

    def _clip(self) -> None:
        if self.max_norm is not None:
            self.sync.clip(self.max_norm)


class PipelineCandidate(Candidate):
    """A pipeline of an ``nn.Sequential``, one stage per rank; a step is as many mini-batches as there are stages."""

    def __init__(self, model: BenchModel, method: Callable[..., Any], declared: BenchCandidate) -> None:
        super().__init__(declared.name, model)
        self._pipeline = method(model.module, None, sgd, declared.config)
        batches = [self.batch]
        dist.broadcast_object_list(batches)  # the first stage uses the input, the last one the target
        self.batch = batches[0]
        self._inputs = inputs_of(model, self.batch)

    def step(self) -> None:
        for _ in range(self._pipeline.num_stages):
            self._pipeline.feed(lambda: self._inputs, self._loss)
            if self._pipeline.backward():
                self._pipeline.step()

    def begin(self) -> None:
        for _ in range(3):  # until the steady state
            self.step()

    def drain(self) -> None:
        self._pipeline.flush()

    def close(self) -> None:
        self._pipeline.detach()

    def _loss(self, output: Any, part: Callable[[Any], Any]) -> Tensor:
        module: Any = self.model.module
        module.forward = lambda *_, **__: output  # it is there already
        try:
            return self.model.loss(module, self.batch)
        finally:
            del module.forward


def lab_of(name: str) -> LabEntry:
    """Returns what the laboratory knows of a registered method."""
    method = METHODS[name]
    return method.lab(method)


def make_candidate(name: str, declared: BenchCandidate, **arguments: Any) -> MakeCandidate:
    """Returns a factory of the candidate that a method declares, with further ``arguments`` of the method."""
    method: Any = METHODS[name]
    kind = PipelineCandidate if method.makes_passes else MethodCandidate
    return partial(kind, method=partial(method, **arguments), declared=declared)


def method_candidates(
    text: str, bucket_mb: Sequence[float], known: Iterable[str] = (), **arguments: Any
) -> list[MakeCandidate]:
    """Returns factories of the candidates that the method ``NAME`` or ``NAME:SETTING=VALUE,...`` declares.

    ``known`` is what else can be compared, for the message of the ValueError for an unknown name; ``arguments`` are
    further ones of the method.
    """
    name, preset, chosen = split_method(text)
    if name not in METHODS:
        raise unknown_method(name, [*METHODS, *known], f" {OWN_METHODS}")
    entry = lab_of(name)
    shown = [*([text.partition(":")[0]] if preset else []), *filter(None, chosen.split(","))]
    label = f"{entry.label} ({', '.join(shown)})" if shown else entry.label
    settings = {**preset, **parse_settings(text, METHODS[name].config_type)}
    try:
        declared = entry.bench_candidates(label, settings, bucket_mb)
    except TypeError as error:
        raise ValueError(f"methods: a value in {text!r} is of the wrong type ({error}).") from error
    return [make_candidate(name, one, **arguments) for one in declared]


def inputs_of(model: BenchModel, batch: Any) -> Any:
    """Returns what the loss of a model gives the module; runs a forward pass."""
    inputs: list[Any] = []
    handle = model.module.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        with torch.no_grad():
            model.loss(model.module, batch)
    finally:
        handle.remove()
    return inputs[0]
