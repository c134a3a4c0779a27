"""One line that says what the network costs a training that runs, and what would take fewer seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.dtensors import ELEMENTWISE, is_sharded
from lightning_pipesync.core.private_names import overrides
from lightning_pipesync.core.torch_private import is_compiled
from lightning_pipesync.fabric.private import scaler_of
from lightning_pipesync.lab.bench.timing import StepRecorder
from lightning_pipesync.lab.plan.measure import all_reduce_by, codec_speed
from lightning_pipesync.lab.plan.predictions import groups_of, is_baseline
from lightning_pipesync.lab.predictions.cluster import BackendCost, Cluster, MeasuredCost, compression_of
from lightning_pipesync.lab.predictions.entry import Prediction
from lightning_pipesync.lab.predictions.registry import lab_of
from lightning_pipesync.lab.predictions.work import MethodWork, Profile, Work
from lightning_pipesync.lightning.sync import HOOKS
from lightning_pipesync.training.registry import METHODS

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: Nothing is advised that takes less than this share off a step; the line is repeated after so many further steps.
WORTH, AGAIN = 0.1, 1000

#: The steps that an :class:`Advisor` records, without those before which it has seen so many.
STEPS, WARM_UP = 100, 20

#: Nothing is measured for shorter steps, in seconds: the training would pause for longer than one.
LEAST_STEP_S = 0.25

#: The codecs that may be advised, and the bytes of which they are timed.
CODECS, CODED = ("int4", "int8"), 2**20

#: All-reduces that show what messages cost, with each codec, and their bytes.
PROBES, PROBE = 4, 2**16

#: Seconds a byte in which Pipe-SGD copies gradients, updates weights and predicts them, on slow processors.
PIPE_SGD_S = 1e-8

#: What tells a training from others: its method, codec, and rank of low-rank gradients.
Training = tuple[str, str, int | None]


@dataclass(frozen=True)
class Advice:
    """``instead`` takes ``saved`` seconds off a step of ``seconds``, in which the network is waited for ``waited``."""

    instead: str
    seconds: float
    waited: float
    saved: float
    num_steps: int  # of the training so far
    began: float = field(default_factory=perf_counter)

    def line(self, seconds: float | None = None) -> str | None:
        """Returns the line where a step takes ``seconds`` now; None: it does not hold.

        What a step takes less than it did, it is taken to wait less for the network.
        """
        seconds = seconds or self.seconds
        less = max(0.0, self.seconds - seconds)
        waited, saved = self.waited - less, self.saved - less
        if saved < WORTH * seconds:
            return None
        gain = f"would take {seconds / (seconds - saved):.2g} times fewer seconds"
        return f"The network takes {waited / seconds:.0%} of a step. {self.instead.format(gain)}"

    def last_line(self, num_steps: int) -> str | None:
        """Returns the line after so many steps, at the end; None: they are few, or it does not hold any more."""
        taken = num_steps - self.num_steps
        return self.line((perf_counter() - self.began) / taken) if taken >= AGAIN else None


def advice(
    training: Training,
    optimizer: Optimizer,
    pace: Sequence[tuple[float, float]],
    work: Work,
    cluster: Cluster,
    num_steps: int = 0,
) -> Advice | None:
    """Returns what would take fewer seconds, by the predictions of a plan; None: nothing is worth it.

    A step now takes what was measured, or what is predicted of it if that is less. Costs count as higher by their
    errors. Of methods that are about as fast it is the one that trains best. The topology is the usual one: others need
    a plan.

    Args:
        training: that runs.
        pace: of each rank the seconds of a step, with all between two, and those of these that it waits. What the rank
            waits for which all others wait, it waits for the network.
        work: of a rank; its computation is the same now as with what is advised.
        num_steps: of the training so far.
    """
    groups = groups_of(work, cluster.with_errors(1))
    predictions = [one for group in groups for one in group if "topology" not in one.settings]
    seconds, waited = max(took for took, _ in pace), min(waits for _, waits in pace)
    as_predicted = (one.seconds for one in predictions if _training(one) == training)
    now = min(work.seconds + waited, min(as_predicted, default=math.inf))
    found: dict[Training, tuple[Prediction, str]] = {}  # the fastest of each, those that train best first
    for one in predictions:
        other, quality = _training(one), None if is_baseline(one) else lab_of(one.method).quality(one, optimizer)
        if quality is not None and other != training and now - one.seconds >= WORTH * seconds:
            found[other] = min((one, quality), found.get(other, (one, quality)), key=lambda each: each[0].seconds)
    if not found:
        return None
    fastest = min(one.seconds for one, _ in found.values())
    best, quality = next((one, words) for one, words in found.values() if one.seconds - fastest < WORTH * seconds)
    settings = ", ".join(f"{name}={value!r}" for name, value in best.settings.items())
    instead = f"`{METHODS[best.method].__name__}Strategy({settings})` {{}} {quality}; `pipesync plan` measures it."
    return Advice(instead, seconds, waited, now - best.seconds, num_steps)


def _training(prediction: Prediction) -> Training:
    settings = prediction.settings
    return prediction.method, settings.get("compression", "none"), settings.get("low_rank")


def is_usual(trainer: Trainer) -> bool:
    """Returns whether all that may be advised can train a Trainer's module, and runs as predicted.

    So it has one optimizer, of a known kind, and dense fp32 weights, which each rank has as a whole; no loss scaler;
    and no hooks of the user's for which each step waits for all weights.
    """
    module, callbacks = trainer.lightning_module, trainer.callbacks  # type: ignore[attr-defined]
    return (
        [type(optimizer) in ELEMENTWISE for optimizer in trainer.optimizers] == [True]
        and module.automatic_optimization
        and scaler_of(trainer.precision_plugin) is None
        and all(parameter.dtype == torch.float32 for parameter in module.parameters() if parameter.requires_grad)
        and not any(isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse for one in module.modules())
        and not (is_sharded(module) or is_compiled(module))
        and not any(overrides(owner, *HOOKS) for owner in (module, *callbacks))
    )


class ComputingClock(Clock):
    """Stands still while the training waits for communication."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(torch.device("cpu"))
        self._traffic = traffic

    @override
    def now(self) -> float:
        return perf_counter() - self._traffic.total_seconds_waited


class Advisor(StepRecorder):
    """Records the first steps of a training by a strategy of this package.

    They show how fast the network is: what a rank has sent took no longer than it has waited and computed. So the
    training pauses for a few messages only.
    """

    def __init__(self, trainer: Trainer, method: Any) -> None:
        self._method, self._transport = method, method.transport
        # A hook of a module would be copied with it, with all that is here; parameters are copied without.
        parameters = nn.ParameterList(trainer.lightning_module.parameters())
        super().__init__(parameters, ComputingClock(self._transport.traffic))

    @classmethod
    def of(cls, trainer: Trainer, method: Any) -> Advisor | None:
        """Returns the advisor of a training, the same on all ranks; None: nothing can be advised.

        Streams that wait for NCCL are not timed. Other methods must have the same data, and the same ranks.
        """
        config, transport = method.config, method.transport
        fits = (
            not method.makes_passes
            and method.in_lockstep
            and transport.device.type == "cpu"
            and 1 < transport.world_size == transport.job.world_size
            and (config.num_jobs, config.injection, getattr(config, "ranks_per_replica", 1)) == (None, None, 1)
            and config.partition != "work_queue"
            and not config.is_arranged
            and is_usual(trainer)
        )
        return cls(trainer, method) if fits else None

    @override
    def end(self) -> bool:
        """Ends a batch; returns whether all steps are recorded."""
        super().end()
        if self.num_steps <= WARM_UP:
            self._began = self._spent()
        return self.num_steps == STEPS

    @override
    def profile(self) -> Profile:
        """Returns the profile, in which weights are needed in the opposite order of their gradients."""
        found = super().profile()
        forward, backward = found.forward, found.backward
        tensors = [replace(one, needed=forward * (1 - one.ready / backward)) for one in found.tensors]
        return replace(found, tensors=tensors)

    def advice(self, num_steps: int) -> Advice | None:
        """Returns what rank 0 is to say after the last of the steps; a collective call."""
        self.close()
        self._method.settle()
        transport, config = self._transport, self._method.config
        own = [(now - then) / (STEPS - WARM_UP) for now, then in zip(self._spent(), self._began, strict=True)]
        pace = transport.job.gather_objects(own[:2])
        seconds, waited = max(took for took, _ in pace), min(waits for _, waits in pace)
        if waited < WORTH * seconds or seconds < LEAST_STEP_S:
            return None
        probes = measure_latency(transport)
        if transport.rank:
            return None
        work = Work(self.profile())
        work = replace(work, measured={"pipe_sgd": MethodWork(PIPE_SGD_S * work.num_bytes)})
        *_, sent, operations = own
        cluster = cluster_of(transport.world_size, sent, operations, waited + work.seconds, probes)
        training = (self._method.name, str(config.compression), config.low_rank)
        return None if cluster is None else advice(training, self._method.optimizers[0], pace, work, cluster, num_steps)

    def _spent(self) -> tuple[float, ...]:
        """Returns the seconds so far, and those of them that were waited; bytes that were sent, and operations."""
        traffic = self._transport.traffic
        num_bytes = traffic.total_bytes_sent + traffic.bytes_beside
        return perf_counter(), traffic.total_seconds_waited, num_bytes, traffic.num_operations


def measure_latency(transport: Transport) -> dict[str, float]:
    """Returns by codec the seconds of a small all-reduce; a collective call.

    Nothing may be in flight. What is waited does not count in the method's metrics.
    """
    flat, found, traffic = torch.zeros(PROBE // 4), {}, transport.traffic
    waited = dict(traffic.seconds_waited)
    with traffic.beside_steps():
        for codec in ("none", *CODECS):
            all_reduce, moments = all_reduce_by(transport, codec), [perf_counter()]
            for _ in range(1 + PROBES):
                all_reduce(flat).wait()
                moments.append(perf_counter())
            found[codec] = median(end - begin for begin, end in pairwise(moments[1:]))
    traffic.seconds_waited = waited
    return found


def cluster_of(
    world_size: int, sent: float, operations: float, busy: float, probes: Mapping[str, float]
) -> Cluster | None:
    """Returns the costs on a network that was busy so many seconds for ``operations`` with so many bytes ``sent``.

    With the seconds of ``probes`` by codec, these are two equations for alpha and beta. In each half of an all-reduce
    with a codec a rank encodes and decodes as many values as there are, at most. None: messages, not bytes, take the
    time, which no codec saves.
    """
    others = world_size - 1
    in_messages, in_probes = operations * probes["none"] / 2, operations * PROBE * others / world_size
    if busy <= in_messages or sent <= in_probes:
        return None
    beta, costs = (busy - in_messages) / (sent - in_probes), {}
    for codec, seconds in probes.items():
        coding = 0.0 if codec == "none" else world_size / others / codec_speed(codec, "cpu", CODED)
        of_codec = beta / compression_of(codec, world_size) + coding
        alpha = max(0.0, seconds / 2 / others - PROBE / world_size * of_codec)
        costs[codec] = MeasuredCost(alpha, of_codec)
    link = costs["none"]
    return Cluster(world_size, 1 / beta, BackendCost(link.alpha, link.beta), link, costs, has_trees=False)
