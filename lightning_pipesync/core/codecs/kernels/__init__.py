"""Codecs as Triton kernels, which import Triton: see `shards_of`."""

from __future__ import annotations

from lightning_pipesync.core.codecs.codec import Codec
from lightning_pipesync.core.codecs.elementwise import BF16, FP16, NoCompression, Truncate16
from lightning_pipesync.core.codecs.kernels.chunked_topk import ChunkedTopKShards
from lightning_pipesync.core.codecs.kernels.elementwise import ElementwiseShards
from lightning_pipesync.core.codecs.kernels.scaled import ScaledShards
from lightning_pipesync.core.codecs.scaled import FP8, Int2, Int4, Int8
from lightning_pipesync.core.codecs.shards import Shards
from lightning_pipesync.core.codecs.sparse import ChunkedTopK

#: By the codecs themselves: a subclass may encode otherwise.
KERNELS: dict[type[Codec], type[Shards]] = {
    NoCompression: ElementwiseShards,
    BF16: ElementwiseShards,
    FP16: ElementwiseShards,
    Truncate16: ElementwiseShards,
    FP8: ScaledShards,
    Int8: ScaledShards,
    Int4: ScaledShards,
    Int2: ScaledShards,
    ChunkedTopK: ChunkedTopKShards,
}
