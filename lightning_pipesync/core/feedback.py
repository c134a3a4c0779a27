"""Error feedback: a codec's error is added to the next values that it encodes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import shard_numel, zeros_with_room
from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.codecs.blocks import addend, blocks
from lightning_pipesync.core.codecs.codec import accumulation_dtype


class ErrorFeedback:
    """The residuals of a flat buffer that is exchanged repeatedly with a lossy codec.

    A lossy all-reduce compresses twice: each rank compresses its values before the reduce-scatter, and the owner of a
    shard the reduced shard before the all-gather. Each compression has its own residual. It compresses once if all
    ranks gather what each has encoded (:attr:`Codec.gathered`).

    Attributes:
        contribution: residual of this rank's values, shape ``[numel]``. On a torus it is zero outside of the slice that
            this rank sums for its row.
        shard: residual of the reduced shard that this rank owns, shape ``[ceil(numel / world_size)]``; None if only
            this rank's values are compressed.
        idle: True for values that this rank does not have in this exchange, which are zero, shape ``[numel]``: what was
            not sent of them stays, see :func:`kept`; None: it has all.
    """

    idle: Tensor | None = None

    def __init__(self, flat: Tensor, world_size: int, gathered: bool = True) -> None:
        dtype = accumulation_dtype(flat.dtype)
        self.contribution = zeros_with_room(flat.numel(), world_size, dtype, flat.device)
        self.shard: Tensor | None = None
        if gathered:
            self.shard = torch.zeros(shard_numel(flat.numel(), world_size), dtype=dtype, device=flat.device)

    def of_slice(self, part: slice, num_shards: int) -> ErrorFeedback:
        """Returns the residuals of a slice of the buffer, which ``num_shards`` ranks exchange: views."""
        view = copy.copy(self)
        view.contribution = self.contribution[part]
        view.idle = None if self.idle is None else self.idle[part]
        if self.shard is not None:
            view.shard = self.shard[: shard_numel(view.contribution.numel(), num_shards)]
        return view

    def without(self, idle: Tensor) -> ErrorFeedback:
        """Returns the same residuals for an exchange in which this rank does not have some values, see ``idle``."""
        view = copy.copy(self)
        view.idle = idle
        return view

    def decay(self, factor: float) -> None:
        """Multiplies the residuals, before the next values are added: SparseLoCo's beta; 1: nothing is forgotten."""
        for residual in (self.contribution, self.shard):
            if residual is not None and factor != 1:
                residual.mul_(factor)

    def state_dict(self) -> dict[str, Tensor]:
        state = {"contribution": self.contribution}
        return state if self.shard is None else {**state, "shard": self.shard}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.contribution.copy_(state["contribution"])
        if self.shard is not None:
            self.shard.copy_(state["shard"])


@contextmanager
def kept(residual: Tensor | None, source: Tensor, idle: Tensor | None) -> Iterator[None]:
    """Context manager in which residuals are zero where values are ``idle`` and their ``source`` is zero.

    A parameter that no rank has a gradient of is not updated: what is sent of its residual would be lost.
    """
    if residual is None or idle is None:
        yield
        return
    stays = idle & (source == 0)
    before = torch.where(stays, residual, 0)
    residual.masked_fill_(stays, 0)
    yield
    residual.add_(before)


def encode_with_feedback(
    codec: Codec, source: Tensor, wire: Tensor, residual: Tensor | None, idle: Tensor | None = None
) -> None:
    """Encodes ``source`` plus ``residual``, and sets ``residual`` to the error of this encoding.

    Error feedback of Seide et al. 2014 and Karimireddy et al. 2019 (EF-SGD): over many steps the decoded values add up
    to the sources, up to the last residual. Both tensors change in place: ``source`` becomes the encoded sum. Entries
    of the residual that are not finite become zero, so that an overflow does not affect later steps.

    Args:
        residual: the error so far, of the shape of ``source``, zero before the first call. For a ``source`` in bf16 or
            fp16 keep it in fp32: then the rounding of the sum is fed back, too. None: plain ``codec.encode``.
        idle: as of :class:`ErrorFeedback`.
    """
    if residual is None:
        codec.encode(source, wire)
        return
    with kept(residual, source, idle):
        for block in blocks(source):
            total = residual[..., block].add_(addend(source[..., block], residual.dtype))
            source[..., block].copy_(total)
        codec.encode(source, wire)
        codec.decode_add(wire, residual, source.dtype, alpha=-1)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
