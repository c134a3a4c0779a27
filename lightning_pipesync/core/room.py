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


def rows_of(flat: Tensor, number: int, size: int) -> Tensor:
    """Returns shards as rows, shape ``[number, size]``.

    It is a view if they are of one size, or there is room behind ``flat``; otherwise a copy padded with zeros.
    """
    padded = with_room(flat, number * size)
    if padded is None:
        padded = torch.nn.functional.pad(flat, (0, number * size - flat.numel()))
    return padded.view(number, size)


def copy_back(rows: Tensor, flat: Tensor) -> Tensor:
    """Copies ``rows`` to ``flat`` if :func:`rows_of` has made a copy of it; returns ``flat``."""
    return flat if with_room(flat, rows.numel()) is not None else flat.copy_(rows.view(-1)[: flat.numel()])
