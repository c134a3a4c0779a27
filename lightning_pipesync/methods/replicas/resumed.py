"""Replicas that begin together, each from a checkpoint of its own."""

from __future__ import annotations

from lightning_pipesync.core.comm.transport import Transport

#: (k, n): a checkpoint is that of the k-th of n replicas, with that part of the outer state.
Part = tuple[int, int]


def tell_part(transport: Transport, part: Part | None) -> list[int]:
    """Tells all ranks whose checkpoint this one has; returns a number for each rank's, 0 for none; a collective call.

    No two of the first 254 parts have the same number.
    """
    return transport.exchange_flags(_number(part)).wait()


def goes_on(transport: Transport, part: Part | None, of_first: Part, first: int) -> bool:
    """Returns whether this rank goes on from its own checkpoint, beside rank ``first``, which goes on from its own.

    So it does if both are of the same number of replicas, and nobody before it has the same part. ``part`` is None if
    there is no checkpoint of the same step. A collective call of all that begin: ``first`` calls :func:`tell_part`.
    """
    if part is not None and part[1] != of_first[1]:
        part = None
    numbers = tell_part(transport, part)
    return part is not None and _number(part) not in (numbers[first], *numbers[: transport.rank])


def _number(part: Part | None) -> int:
    return 0 if part is None else min(part[0] + 1, 255)
