"""Codecs as Triton kernels, which import Triton: see `shards_of`."""

from __future__ import annotations

from lightning_pipesync.core.codecs.chunked_topk import ChunkedTopK
from lightning_pipesync.core.codecs.codec import Codec
from lightning_pipesync.core.codecs.elementwise import BF16, FP16, NoCompression, Truncate16
from lightning_pipesync.core.codecs.fp8 import FP8
from lightning_pipesync.core.codecs.int2 import Int2
from lightning_pipesync.core.codecs.int4 import Int4
from lightning_pipesync.core.codecs.int8 import Int8
from lightning_pipesync.core.codecs.kernels.chunked_topk import ChunkedTopKShards
from lightning_pipesync.core.codecs.kernels.elementwise import ElementwiseShards
from lightning_pipesync.core.codecs.kernels.scaled import ScaledShards
from lightning_pipesync.core.codecs.kernels.topk import TopKShards
from lightning_pipesync.core.codecs.shards import Shards
from lightning_pipesync.core.codecs.topk import TopK

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
    TopK: TopKShards,
    ChunkedTopK: ChunkedTopKShards,
}
