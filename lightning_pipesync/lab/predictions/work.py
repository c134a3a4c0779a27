"""What a rank computes in a training step: the data from which steps with other methods are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_pipesync.core.buckets import MIB, MOST_BUCKETS
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.predictions.limits import LayerTimes, end_of_pipeline

#: The default size of DDP's buckets, in MiB, which is always considered.
DEFAULT_MB = 25.0


@dataclass(frozen=True)
class Profile:
    """One rank's step without communication, in seconds."""

    forward: float
    backward: float  # until the last gradient is ready
    update: float
    tensors: Sequence[LayerTimes]  # in the order in which their gradients become ready

    def seconds_with_all_reduces(self, ready: Sequence[float], all_reduces: Sequence[float]) -> float:
        """Returns the seconds of a step with all-reduces, one after the other, under the backward pass.

        Args:
            ready: when each of them may start, since backward began.
            all_reduces: the seconds that each takes.
        """
        return self.forward + max(self.backward, end_of_pipeline(ready, all_reduces)) + self.update


def predict_ddp(profile: Profile, link: LinkCost, world_size: int, bucket_mb: float) -> float:
    """Returns the predicted seconds of a step of DDP, with serial all-reduces of its buckets, each once it is full."""
    ready, durations, filled = [], [], 0
    for i, tensor in enumerate(profile.tensors):
        filled += tensor.num_bytes
        if filled >= bucket_mb * MIB or i == len(profile.tensors) - 1:
            ready.append(tensor.ready)
            durations.append(link.all_reduce(filled, world_size))
            filled = 0
    return profile.seconds_with_all_reduces(ready, durations)


@dataclass(frozen=True)
class LayerWork:
    seconds: float  # of both passes of a mini-batch
    parameter_bytes: int
    output_bytes: int  # for a mini-batch


@dataclass(frozen=True)
class MethodWork:
    """What a method has measured of the user's model, on one rank."""

    seconds: float = 0.0  # that it adds to a step, besides what it adds to that of a stand-in
    layers: Sequence[LayerWork] = ()  # among which a pipeline divides the model; empty if it cannot
    low_rank_seconds: float = 0.0  # of products with low-rank factors of the gradients in a step; 0 if there are none


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step."""

    profile: Profile
    #: By method, what it has measured of the model.
    measured: Mapping[str, MethodWork] = field(default_factory=dict)
    #: Seconds of a step on average where each rank takes steps at its own pace, over those of the slowest rank.
    pace: float = 1.0
    #: By method, seconds that it adds to a step, measured with stand-ins of the model.
    added: Mapping[str, float] = field(default_factory=dict)
    #: What a forward pass keeps for the backward pass, but for weights and the batch; 0 if unknown.
    activation_bytes: int = 0
    #: Of a model that FSDP2 has sharded: the bytes of this rank's gradients in each of its groups.
    groups: Sequence[int] = ()
    #: By name of a prediction why its method, by its own rules, cannot train this model.
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of a step without communication."""
        return self.profile.forward + self.profile.backward + self.profile.update

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.profile.tensors)

    def measured_by(self, method: str) -> MethodWork:
        return self.measured.get(method, MethodWork())

    def profile_with(self, method: str, further: float = 0.0) -> Profile:
        """Returns the profile with what a method adds, and ``further`` seconds, evenly over the gradients."""
        added, number = self.added.get(method, 0.0) + further, max(1, len(self.profile.tensors))
        tensors = [
            replace(tensor, ready=tensor.ready + added * i / number) for i, tensor in enumerate(self.profile.tensors, 1)
        ]
        return replace(self.profile, backward=self.profile.backward + added, tensors=tensors)

    def seconds_with(self, method: str) -> float:
        """Seconds of a step with what a method adds, without communication."""
        return self.seconds + self.added.get(method, 0.0) + self.measured_by(method).seconds

    def bucket_sizes(self) -> list[float]:
        """Returns bucket sizes in MiB, ascending: powers of two, and DDP's default.

        They give from :data:`MOST_BUCKETS` buckets to one.
        """
        total = self.num_bytes / MIB
        largest = total if total <= DEFAULT_MB else 2 * total  # otherwise the default holds all
        powers = (2.0**exponent for exponent in range(-6, 20))
        return sorted({DEFAULT_MB, *(size for size in powers if total / MOST_BUCKETS <= size < largest)})
