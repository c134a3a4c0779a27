"""Codecs: the wire formats of floating-point values."""

from __future__ import annotations

from functools import cache

from lightning_pipesync.core.codecs.codec import Codec
from lightning_pipesync.core.codecs.elementwise import BF16, FP16, NoCompression, Truncate16
from lightning_pipesync.core.codecs.scaled import FP8, Int2, Int4, Int8
from lightning_pipesync.core.codecs.sparse import ChunkedTopK, TopK
from lightning_pipesync.core.names import did_you_mean

__all__ = [
    "BF16",
    "CODECS",
    "FP8",
    "FP16",
    "ChunkedTopK",
    "Codec",
    "Int2",
    "Int4",
    "Int8",
    "NoCompression",
    "TopK",
    "Truncate16",
    "get_codec",
]

#: Every codec by its name.
CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (NoCompression, BF16, FP16, Truncate16, FP8, Int8, Int4, Int2, TopK, ChunkedTopK)
}


def get_codec(codec: str | Codec) -> Codec:
    """Returns the codec of that name with its default settings; a `Codec` passes through.

    Raises:
        ValueError: no codec has that name.
    """
    if isinstance(codec, Codec):
        return codec
    if codec not in CODECS:
        names = ", ".join(map(repr, CODECS))
        raise ValueError(
            f"compression={codec!r} is not known: use a Codec or one of {names}.{did_you_mean(codec, CODECS)}"
        )
    return _default(codec)


@cache
def _default(name: str) -> Codec:
    return CODECS[name]()
