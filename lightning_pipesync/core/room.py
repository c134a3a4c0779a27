"""Room behind the values of a flat buffer, so that ranks divide it into shards of one size without a copy."""

from __future__ import annotations

import torch
from torch import Tensor


def zeros_with_room(numel: int, num_shards: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns ``numel`` zeros, 1-D, and behind them room for up to ``num_shards - 1`` values.

    With it they divide into ``num_shards`` shards of one size, and into as many as any divisor of that number, such as
    the ranks of a row. It is marked in the storage, so that views that end with the last value have the room, too.
    """
    whole = torch.zeros(numel + -numel % num_shards, dtype=dtype, device=device)
    whole.untyped_storage().room_begins = numel * whole.element_size()  # type: ignore[attr-defined]
    return whole[:numel]


def with_room(flat: Tensor, numel: int) -> Tensor | None:
    """Returns a view of ``flat``, 1-D, and the room behind it, ``numel`` values in all; None without enough room.

    The values in the room are undefined: whoever reads them sets them before.
    """
    if numel == flat.numel():
        return flat
    storage, begin = flat.untyped_storage(), flat.storage_offset()
    values_end, end = ((begin + count) * flat.element_size() for count in (flat.numel(), numel))
    if getattr(storage, "room_begins", None) != values_end or end > storage.nbytes():
        return None
    return flat.as_strided((numel,), (1,))
