"""The channels between the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from lightning_pipesync.core.comm.channel import LocalChannel, Receiver, Sender
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.ea_pipe.config import EAPipeConfig

_WIRE_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
#: The numbers of the channels between two stages.
_ACTIVATIONS, _GRADIENTS = 0, 1


@dataclass(frozen=True)
class Channels:
    """The channels of a stage to its neighbors; None at the ends of the pipeline."""

    activations_in: Receiver | None = None
    activations_out: Sender | None = None
    gradients_in: Receiver | None = None
    gradients_out: Sender | None = None


def rank_of(stage: int, num_stages: int) -> int:
    """Returns the rank of a stage, or the stage of a rank. Rank 0, which logs, has the last stage and the loss."""
    return num_stages - 1 - stage


def make_channels(transport: Transport | None, num_stages: int, config: EAPipeConfig) -> list[tuple[int, Channels]]:
    """Returns the stages of this process and their channels: all stages if ``transport`` is None."""
    wire_dtype = _WIRE_DTYPES[config.compression]
    if transport is None:
        forward = [None, *(LocalChannel(wire_dtype) for _ in range(1, num_stages)), None]
        back = [None, *(LocalChannel(wire_dtype) for _ in range(1, num_stages)), None]
        return [(n, Channels(forward[n], forward[n + 1], back[n + 1], back[n])) for n in range(num_stages)]
    window = (config.replicas or num_stages) + 1
    stage = rank_of(transport.rank, num_stages)
    before, after = rank_of(stage - 1, num_stages), rank_of(stage + 1, num_stages)
    is_first, is_last = stage == 0, stage == num_stages - 1
    to = partial(transport.channel_to, wire_dtype=wire_dtype, window=window)
    channels = Channels(
        None if is_first else transport.channel_from(before, _ACTIVATIONS, what="activations"),
        None if is_last else to(after, _ACTIVATIONS, what="activations"),
        None if is_last else transport.channel_from(after, _GRADIENTS, what="gradients"),
        None if is_first else to(before, _GRADIENTS, what="gradients"),
    )
    return [(stage, channels)]
