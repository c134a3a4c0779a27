"""What the ranks compute in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.layer_limits import LayerTimes
from lightning_pipesync.core.parameters import device_of
from lightning_pipesync.core.torch_private import tensors_in
from lightning_pipesync.lab.bench.candidates import without_communication
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.profile import Profile, profile_step
from lightning_pipesync.lab.plan.layers import LayerWork, measure_layers
from lightning_pipesync.lab.plan.units import milliseconds
from lightning_pipesync.methods.gradients.hyperparameters import current
from lightning_pipesync.methods.pipe_sgd.prediction import PredictedWeights, TrialStep

#: A rank is slow whose computation takes longer than a median rank's by more than this share of it, than this share of
#: a step of DDP, and than these seconds, which are noise.
SLOW_SHARE, SHARE_OF_STEP, NOISE_S = 0.15, 0.05, 0.005

#: How often the prediction of weights is measured.
PREDICTIONS = 5


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step.

    Attributes:
        profile: its parts.
        prediction: seconds in which Pipe-SGD predicts weights, and copies gradients to and from its buffers.
        own_pace: seconds of a step on average where each rank takes steps at its own pace, over those of the slowest.
        layers: of a model that a pipeline splits by layers.
        own: by method, seconds that it adds to a step's computation, see :func:`measure_own_work`.
        activation_bytes: what a forward pass keeps for the backward pass, but for weights and the batch; 0 if unknown.
        refused: by name of a :class:`Prediction` why its method, by its own rules, cannot train this model.
    """

    profile: Profile
    prediction: float = 0.0
    own_pace: float = 1.0
    layers: Sequence[LayerWork] = ()
    own: Mapping[str, float] = field(default_factory=dict)
    activation_bytes: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Work:
        """Returns what ``dataclasses.asdict`` was made of."""
        profile = {**saved["profile"], "tensors": [LayerTimes(**one) for one in saved["profile"]["tensors"]]}
        layers = [LayerWork(**layer) for layer in saved["layers"]]
        return cls(**{**saved, "profile": Profile(**profile), "layers": layers})

    @property
    def seconds(self) -> float:
        """Seconds of a step without communication."""
        return self.profile.forward + self.profile.backward + self.profile.update

    def profile_with(self, method: str) -> Profile:
        """Returns the profile with what a method adds, evenly distributed over the gradients."""
        own, number = self.own.get(method, 0.0), max(1, len(self.profile.tensors))
        tensors = [
            replace(tensor, ready=tensor.ready + own * i / number) for i, tensor in enumerate(self.profile.tensors, 1)
        ]
        return replace(self.profile, backward=self.profile.backward + own, tensors=tensors)

    def seconds_with(self, method: str) -> float:
        """Seconds of a step with what a method adds, without communication."""
        return self.seconds + self.own.get(method, 0.0) + (self.prediction if method == "pipe_sgd" else 0.0)


def measure_work(model: BenchModel) -> Work:
    """Measures what a step takes on this rank; a collective call, as all ranks are to compute at the same time."""
    dist.barrier()
    candidate = without_communication(model)
    profile = profile_step(candidate)
    prediction = seconds_of_prediction(candidate.module, candidate.optimizer)
    activations = activation_bytes(model, candidate.batch)
    return Work(profile, prediction, layers=measure_layers(model, candidate.batch), activation_bytes=activations)


def slowest(everyones: Sequence[Work]) -> Work:
    """Returns the work of the rank whose computation takes longest, with what the others' is beside it."""
    longest = max(everyones, key=lambda work: work.seconds)
    together = len(everyones) / sum(1 / work.seconds for work in everyones)
    prediction = max(work.prediction for work in everyones)
    return replace(longest, prediction=prediction, own_pace=together / longest.seconds)


def slow_ranks(everyones: Sequence[Work], names: Sequence[str], step: float) -> list[str]:
    """Returns who is slow, a sentence each.

    Args:
        everyones: work, by rank.
        names: of the ranks.
        step: seconds of a step of DDP, in which a wait of a few milliseconds may not matter.
    """
    seconds = [work.seconds for work in everyones]
    usual, others = sorted(seconds)[(len(seconds) - 1) // 2], "the other" if len(seconds) == 2 else "most"
    return [
        f"{name}: its computation takes {milliseconds(own)}, and that of {others} {milliseconds(usual)}: all others "
        "wait for it. Look for other processes there, too many threads, or a slower processor."
        for name, own in zip(names, seconds, strict=True)
        if own - usual > max(SLOW_SHARE * usual, SHARE_OF_STEP * step, NOISE_S)
    ]


def activation_bytes(model: BenchModel, batch: Any) -> int:
    """Returns the bytes that a forward pass keeps for the backward pass, besides weights, buffers and the batch.

    0 if that is unknown: some transforms of ``torch.func`` do not allow to look.
    """
    module = model.module
    given = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers(), *tensors_in(batch))}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model.loss(module, batch)
    except RuntimeError:
        return 0
    del loss
    return sum(num_bytes for address, num_bytes in kept.items() if address not in given)


def seconds_of_prediction(module: nn.Module, optimizer: Optimizer) -> float:
    """Returns the seconds of Pipe-SGD's own work on the gradients that a step has left."""
    pairs = [(p, p.grad) for p in module.parameters() if p.grad is not None]
    parameters, gradients = [p for p, _ in pairs], [grad for _, grad in pairs]
    predicted, bucket = PredictedWeights(optimizer), Bucket(parameters)
    step = TrialStep({id(p): grad for p, grad in pairs}, current(optimizer))
    clock = Clock(device_of(module))
    moments = [clock.now()]
    for _ in range(PREDICTIONS):
        bucket.pack_gradients(parameters)
        bucket.unpack(gradients)
        predicted.use([step])
        predicted.forget()
        moments.append(clock.now())
    return median(clock.seconds_between(*pair) for pair in pairwise(moments))
