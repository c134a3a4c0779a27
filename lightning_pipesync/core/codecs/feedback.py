"""Error feedback: what a codec drops in one step is sent in later ones."""

from __future__ import annotations

from torch import Tensor

from lightning_pipesync.core.codecs.blocks import as_dtype, blocks
from lightning_pipesync.core.codecs.codec import Codec


def encode_with_feedback(codec: Codec, source: Tensor, wire: Tensor, residual: Tensor | None) -> None:
    """Encodes `source` plus what earlier calls dropped, and keeps in `residual` what this one drops.

    Error feedback of Seide et al. 2014 and Karimireddy et al. 2019 (EF-SGD): over many steps the decoded values add up
    to the sources, but for the last residual. `residual` has the shape of `source` and is zero before the first call;
    both change in place: `source` becomes what was encoded. If `source` is bf16 or fp16, keep the residual in fp32:
    then what is rounded off their sum is fed back too. Entries of the residual that are not finite become zero, so that
    one overflow is sent once and does not poison later steps. Without a residual this is `codec.encode`.
    """
    if residual is None:
        codec.encode(source, wire)
        return
    for block in blocks(source):
        total = residual[block].add_(as_dtype(source[block], residual.dtype))
        source[block].copy_(total)
        total.neg_()
    codec.encode(source, wire)
    # The residual is total - decoded; by way of decoded - total it needs no buffer for decoded.
    codec.decode_add(wire, residual, source.dtype)
    for block in blocks(residual):
        residual[block].neg_().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
