"""Which parameters have a gradient on some rank."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.transport import Transport


class Presence:
    """Which parameters have a gradient in one step: on this rank, and, once that is known, on any.

    Most models use the same parameters in every step. So a rank tells the others in one byte, which travels with the
    gradient, whether it differs from what was the case when all ranks last compared; they compare again only then.

    Args:
        own: for each parameter, whether this rank has a gradient.
        compared: what was the case on this rank when the ranks last compared, and on any.
        transport: the way to the other ranks.
    """

    def __init__(self, own: Sequence[bool], compared: tuple[list[bool], list[bool]], transport: Transport) -> None:
        self._own, self._compared, self._transport = list(own), compared, transport
        self._flags: Handle[list[int]] = transport.exchange_flags(self._own != compared[0])

    def settle(self) -> tuple[list[bool], list[bool]]:
        """Returns what is the case now on this rank, and on any; a collective call."""
        if any(self._flags.wait()):
            return self._own, self._transport.union(self._own).wait()
        return self._compared
