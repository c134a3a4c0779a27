"""The stages of a pipeline: who has which, what it computes when, and its channels to its neighbors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from lightning_pipesync.core.comm.channel import LocalChannel, Receiver, Sender
from lightning_pipesync.core.comm.collectives import Collectives
from lightning_pipesync.core.comm.groups import DifferentLinesError
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.ea_pipe.config import EAPipeConfig

_WIRE_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
#: The numbers of the channels between two stages.
_ACTIVATIONS, _GRADIENTS = 0, 1


@dataclass(frozen=True)
class Schedule:
    """The mini-batches of one stage and their replicas (paper, Figs. 1 and 2, Section III-B).

    It makes ``lag`` forward passes, then one forward and one backward pass in turn.
    """

    stage: int  # n, from 0
    num_stages: int  # N
    num_replicas: int  # mini-batches in flight at the first stage, N in the paper

    @property
    def lag(self) -> int:
        """The number of forward passes by which this stage is ahead of its backward passes.

        With one set of weights, so many updates are between both passes of a mini-batch. N - 1 - stage in the paper.
        More replicas are spread evenly over the links between stages.
        """
        links = self.num_stages - 1
        return -(-(links - self.stage) * (self.num_replicas - 1) // links) if links else 0

    def replica(self, step: int) -> int:
        """Returns the index of the replica that mini-batch ``step`` (both from 0) uses in every stage."""
        return step % self.num_replicas

    def is_due(self, step: int, period: int) -> bool:
        """Returns whether the replica is pulled after mini-batch ``step`` (from 0): ceil(t / N) mod tau = 0."""
        return (step // self.num_replicas + 1) % period == 0

    @property
    def versions_after(self) -> int:
        """The updates of this stage between its backward pass of a mini-batch and that of the first stage.

        There is a backward pass of another mini-batch in every second slot (SpecTrain, Section 3.2).
        """
        return self.stage // 2


@dataclass(frozen=True)
class Channels:
    """The channels of a stage to its neighbors; None at the ends of the pipeline."""

    activations_in: Receiver | None = None
    activations_out: Sender | None = None
    gradients_in: Receiver | None = None
    gradients_out: Sender | None = None

    def close(self, timeout_s: float) -> None:
        for end in (self.activations_in, self.gradients_in, self.activations_out, self.gradients_out):
            if end is not None:
                end.close(timeout_s)


def rank_of(stage: int, num_stages: int) -> int:
    """Returns the place of a stage in its pipeline, or the stage of a place.

    Rank 0, which logs, has the first place, with the last stage and the loss.
    """
    return num_stages - 1 - stage


def line_of(place: int, num_stages: int, config: EAPipeConfig) -> Sequence[int]:
    """Returns the ranks, one of each pipeline, that have a place in their pipeline."""
    count = config.num_pipelines
    if config.neighbors == "stages":
        return range(place, count * num_stages, num_stages)
    return range(place * count, (place + 1) * count)


def make_transport(device: torch.device, config: EAPipeConfig, backend: str | None) -> Transport:
    """Returns the transport among the ranks that have the same stage in several pipelines; of one pipeline, all ranks.

    Raises:
        ValueError: on every rank: the ranks cannot form the pipelines, or do not agree on them.
        RuntimeError: ``torch.distributed`` is not initialized.
    """
    count, line = config.num_pipelines, None
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    num_stages, left = divmod(num_ranks, count)
    if count > 1:
        fits = num_stages > 1 and not left
        place = dist.get_rank() % num_stages if config.neighbors == "stages" else dist.get_rank() // count
        line = line_of(place, num_stages, config) if fits else []
    try:
        return Transport(device, timeout_s=config.timeout_s, backend=backend, replicas=line)
    except DifferentLinesError as error:
        possible = [str(number) for number in range(1, num_ranks // 2 + 1) if num_ranks % number == 0]
        raise ValueError(
            f"num_pipelines={count!r} and neighbors={config.neighbors!r} must divide the {num_ranks} ranks into "
            "pipelines of two or more stages, and be the same on all ranks: set num_pipelines to one of "
            f"{', '.join(possible) or '1'}."
        ) from error


def places_of(transport: Transport) -> Collectives:
    """Returns the collectives among the ranks of this rank's pipeline, whose places there are their ranks."""
    return transport.shards or transport


def make_channels(transport: Transport | None, num_stages: int, config: EAPipeConfig) -> list[tuple[int, Channels]]:
    """Returns the stages of this process and their channels: all stages if ``transport`` is None."""
    wire_dtype = _WIRE_DTYPES[config.compression]
    if transport is None:
        forward = [None, *(LocalChannel(wire_dtype) for _ in range(1, num_stages)), None]
        back = [None, *(LocalChannel(wire_dtype) for _ in range(1, num_stages)), None]
        return [(n, Channels(forward[n], forward[n + 1], back[n + 1], back[n])) for n in range(num_stages)]
    window = (config.replicas or num_stages) + 1
    pipeline = places_of(transport)
    stage = rank_of(pipeline.rank, num_stages)
    is_first, is_last = stage == 0, stage == num_stages - 1
    before = -1 if is_first else pipeline.ranks[rank_of(stage - 1, num_stages)]
    after = -1 if is_last else pipeline.ranks[rank_of(stage + 1, num_stages)]
    to = partial(transport.channel_to, wire_dtype=wire_dtype, window=window)
    channels = Channels(
        None if is_first else transport.channel_from(before, _ACTIVATIONS, what="activations"),
        None if is_last else to(after, _ACTIVATIONS, what="activations"),
        None if is_last else transport.channel_from(after, _GRADIENTS, what="gradients"),
        None if is_first else to(before, _GRADIENTS, what="gradients"),
    )
    return [(stage, channels)]
