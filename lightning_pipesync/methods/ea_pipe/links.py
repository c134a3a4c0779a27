"""How the stages of a pipeline are connected."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_pipesync.core.channel import LocalChannel, Receiver, Sender
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.ea_pipe.config import EAPipeConfig

_WIRE_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Numbers of the channels between two stages.
_ACTIVATIONS, _GRADIENTS = 0, 1


@dataclass(frozen=True)
class Links:
    """The channels of a stage; None where there is no neighbor."""

    activations_in: Receiver | None = None
    activations_out: Sender | None = None
    gradients_in: Receiver | None = None
    gradients_out: Sender | None = None


def rank_of(stage: int, num_stages: int) -> int:
    """Returns the rank of a stage, or the stage of a rank: the loss is on rank 0, which logs."""
    return num_stages - 1 - stage


def make_links(transport: Transport | None, num_stages: int, config: EAPipeConfig) -> list[tuple[int, Links]]:
    """Returns the stages of this process, with their channels: all of them if there is no ``transport``."""
    wire_dtype = _WIRE_DTYPES[config.compression]
    if transport is None:
        forward = [None, *(LocalChannel(wire_dtype) for _ in range(1, num_stages)), None]
        back = [None, *(LocalChannel(wire_dtype) for _ in range(1, num_stages)), None]
        return [(n, Links(forward[n], forward[n + 1], back[n + 1], back[n])) for n in range(num_stages)]
    window = (config.replicas or num_stages) + 1
    stage = rank_of(transport.rank, num_stages)
    before, after = rank_of(stage - 1, num_stages), rank_of(stage + 1, num_stages)
    is_first, is_last = stage == 0, stage == num_stages - 1
    links = Links(
        None if is_first else transport.channel_from(before, _ACTIVATIONS),
        None if is_last else transport.channel_to(after, _ACTIVATIONS, wire_dtype=wire_dtype, window=window),
        None if is_last else transport.channel_from(after, _GRADIENTS),
        None if is_first else transport.channel_to(before, _GRADIENTS, wire_dtype=wire_dtype, window=window),
    )
    return [(stage, links)]
