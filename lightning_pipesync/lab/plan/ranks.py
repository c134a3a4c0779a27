"""What all ranks know of each other."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gathered(own: T) -> list[T]:
    """Returns what each rank has; a collective call."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return everyones
