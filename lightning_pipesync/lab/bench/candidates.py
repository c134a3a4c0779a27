"""What benchmarks compare: ways to train a model, by registered methods and by their alternatives, which are timed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.parameters import device_of
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.named_settings import resolved_settings, split_method, unknown_method
from lightning_pipesync.lab.bench.timing import Timed, time_round_robin
from lightning_pipesync.lab.predictions.cluster import compression_of
from lightning_pipesync.lab.predictions.entry import BenchCandidate
from lightning_pipesync.lab.predictions.registry import lab_of
from lightning_pipesync.training.registry import METHODS

#: Makes a candidate for a model; a collective call.
MakeCandidate = Callable[[BenchModel], "Candidate"]

#: Runs the passes of a step: called with what computes the loss, and with what raises if they are not needed.
RunPasses = Callable[[Callable[[], Tensor], Callable[[], object]], Any]

#: Every candidate trains with SGD, learning rate and momentum, unless its model has an optimizer.
LEARNING_RATE, MOMENTUM = 1e-3, 0.9

#: The way out for methods that nobody has registered.
OWN_METHODS = "For a method of yours: pipesync --import MODULE ..., which names the module that registers it."

#: The name of the step without communication.
ALONE = "no communication"

#: The name of what methods between replicas in shards are compared with.
HSDP = "FSDP2 on both (HSDP)"


class Candidate(ABC):
    """A way to train a model, the same on all ranks; its attributes are those of :class:`BenchCandidate`.

    ``transport`` carries its communication; None: another library communicates.
    """

    limit = "compute"
    compression = 1.0
    segments: int | None = None
    period = 1
    transport: Transport | None = None

    def __init__(self, name: str, model: BenchModel) -> None:
        self.name, self.model = name, model
        self.batch = model.make_batch(dist.get_rank())

    @abstractmethod
    def step(self) -> None:
        """Takes one training step on the model's batch."""

    def prepare(self) -> dict[str, Any] | None:
        """Runs before all measurements; returns the result of a search, if there is one."""
        return None

    def begin(self) -> None:
        """Takes steps until the operations in flight are those of the steady state."""
        self.step()

    def drain(self) -> None:  # noqa: B027 - most have nothing in flight between two steps
        """Waits for the operations in flight after a step."""

    def close(self) -> None:  # noqa: B027
        """Ends threads and process groups."""


class Trainable(Candidate):
    """A module, the model's or a wrapper of it, and an optimizer: DDP, FSDP2, ZeRO, or without communication.

    It trains on given batches, too.
    """

    def __init__(
        self, name: str, model: BenchModel, module: nn.Module, limit: str, optimizer: Optimizer | None = None
    ) -> None:
        super().__init__(name, model)
        self.module, self.limit = module, limit
        self.run_passes: RunPasses = forward_and_backward
        own = model.optimizer(model.module) if model.optimizer else sgd(module.parameters())
        self.optimizer = optimizer or own

    def step(self, batch: Any = None) -> None:
        """Takes one training step on a batch, or on the model's."""
        self.compute_gradient(batch)
        self.update()

    def compute_gradient(self, batch: Any = None, check: Callable[[], object] = lambda: None) -> Any:
        """Runs forward and backward pass, and returns the loss; ``check`` raises if the passes are not needed."""
        self.optimizer.zero_grad()
        batch = self.batch if batch is None else batch
        return self.run_passes(lambda: self.model.loss(self.module, batch), check)

    def update(self) -> None:
        """Updates the weights."""
        self.optimizer.step()


class MethodCandidate(Trainable):
    """A method that synchronizes what a training loop computes, as it has ``declared``."""

    def __init__(self, model: BenchModel, method: Callable[..., Any], declared: BenchCandidate) -> None:
        super().__init__(declared.name, model, model.module, declared.limit)
        self.declared, self.segments, self.period = declared, declared.segments, declared.period
        self.sync = method(model.module, self.optimizer, declared.config)
        self.transport = self.sync.transport
        self.compression = compression_of(declared.codec, self.transport.world_size)

    def step(self, batch: Any = None) -> None:
        self.declared.before_step(self.sync)
        super().step(batch)

    def update(self) -> None:
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


def make_candidate(name: str, declared: BenchCandidate, **arguments: Any) -> MakeCandidate:
    """Returns a factory of the candidate that a method declares, with further ``arguments`` of the method."""
    method: Any = METHODS[name]
    kind = PipelineCandidate if method.makes_passes else MethodCandidate
    return partial(kind, method=partial(method, **arguments), declared=declared)


def time_candidates(
    candidates: Iterable[Candidate],
    num_steps: int,
    rounds: int,
    progress: Callable[[str], object] = lambda name: None,
    *,
    whole_periods: bool = True,
) -> dict[str, Timed]:
    """Times a step of each candidate by name, in turns, and closes them; a collective call.

    A measurement has ``num_steps`` steps, or with ``whole_periods`` as many periods of a candidate as that takes.
    ``progress`` is called with the name of each that was measured.
    """
    by_name = {candidate.name: candidate for candidate in candidates}
    periods = {name: made.period if whole_periods else 1 for name, made in by_name.items()}
    steps = {name: -(-num_steps // period) * period for name, period in periods.items()}

    def run(candidate: Candidate) -> None:
        for _ in range(steps[candidate.name]):
            candidate.step()

    def after(name: str) -> None:
        by_name[name].drain()
        progress(name)

    timed = time_round_robin(
        {name: partial(run, candidate) for name, candidate in by_name.items()},
        rounds,
        before=lambda name: by_name[name].begin(),
        after=after,
    )
    for candidate in by_name.values():
        candidate.close()
    return {name: measured.over(steps[name]) for name, measured in timed.items()}


def forward_and_backward(forward: Callable[[], Tensor], check: Callable[[], object]) -> Tensor:
    loss = forward()
    loss.backward()
    return loss


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    return SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


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


def ddp_name(bucket_mb: float) -> str:
    return f"DDP, {bucket_mb:g} MiB"


def without_communication(model: BenchModel) -> Trainable:
    """Each rank trains by itself: the time of computation alone, the limit of all methods."""
    return Trainable(ALONE, model, model.module, "compute")


def ddp(model: BenchModel, bucket_mb: float) -> Trainable:
    """``DistributedDataParallel``, which hides the all-reduce under backward."""
    return Trainable(ddp_name(bucket_mb), model, in_ddp(model.module, bucket_mb), "baseline")


def fsdp2(model: BenchModel, reshard: bool = False) -> Trainable:
    """FSDP2: reduce-scatter and all-gather, as in DeAR; with ``reshard`` one more all-gather, before backward."""
    mesh = init_device_mesh(device_of(model.module).type, (dist.get_world_size(),))
    return Trainable(
        "FSDP2, resharded" if reshard else "FSDP2", model, sharded(model, mesh, reshard).module, "two_halves"
    )


def sharded(model: BenchModel, mesh: DeviceMesh, reshard: bool = False) -> BenchModel:
    """Returns the model, whose layers FSDP2 shards along ``mesh``; along the second of two dimensions (HSDP)."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model.module, mesh=mesh, reshard_after_forward=False)
    return model


def hsdp(model: BenchModel) -> Trainable:
    """A model that FSDP2 has sharded along both dimensions: what methods between replicas are compared with."""
    return Trainable(HSDP, model, model.module, "baseline")


def zero(model: BenchModel, bucket_mb: float) -> Trainable:
    """DDP with ``ZeroRedundancyOptimizer``: each rank updates its part, and broadcasts it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

    module = in_ddp(model.module, bucket_mb)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), SGD, lr=LEARNING_RATE, momentum=MOMENTUM)
    return Trainable("DDP + ZeRO-1", model, module, "baseline", optimizer)


#: By name what this package's methods are compared with: a function of the bucket sizes in MiB.
ALTERNATIVES: dict[str, Callable[[Sequence[float]], list[MakeCandidate]]] = {
    "ddp": lambda sizes: [partial(ddp, bucket_mb=size) for size in sizes],
    "fsdp2": lambda _: [fsdp2],
    "fsdp2_resharded": lambda _: [partial(fsdp2, reshard=True)],
    "zero": lambda sizes: [partial(zero, bucket_mb=sizes[0])],
}


def compared() -> tuple[str, ...]:
    """Returns what is compared if the user names no methods."""
    return ("ddp", "fsdp2", "zero", *(name for name in METHODS if lab_of(name).compared_by_step))


def makers(methods: Sequence[str], bucket_mb: Sequence[float], **arguments: Any) -> list[MakeCandidate]:
    """Returns factories of candidates for each method, and of :data:`ALTERNATIVES` for each bucket size in MiB.

    A method is ``NAME`` or ``NAME:SETTING=VALUE,...``; ``arguments`` are further ones of each. Calling a factory is
    collective. ValueError if a method or a setting is unknown.
    """
    makers: list[MakeCandidate] = []
    for text in methods:
        name, preset, chosen = split_method(text)
        if text in ALTERNATIVES:
            makers += ALTERNATIVES[text](bucket_mb)
            continue
        if name not in METHODS:
            raise unknown_method(name, [*METHODS, *ALTERNATIVES], f" {OWN_METHODS}")
        entry = lab_of(name)
        shown = [*([text.partition(":")[0]] if preset else []), *filter(None, chosen.split(","))]
        label = f"{name} ({', '.join(shown)})" if shown else name
        settings = resolved_settings(text, METHODS[name].config_type)
        try:
            declared = entry.bench_candidates(label, settings, bucket_mb)
        except TypeError as error:
            raise ValueError(f"methods: a value in {text!r} is of the wrong type ({error}).") from error
        makers += [make_candidate(name, one, **arguments) for one in declared]
    return makers


def in_ddp(module: nn.Module, bucket_mb: float) -> DistributedDataParallel:
    """Returns the module in DDP, with the settings that its documentation recommends for speed."""
    return DistributedDataParallel(module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True)
