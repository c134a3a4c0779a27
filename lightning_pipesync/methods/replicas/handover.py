"""What rank 0 hands over to a rank that comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.replicas.recovery import Snapshot, without_outer_state


@dataclass(frozen=True)
class Handover:
    """What a rank needs that comes back, besides its own model and settings, which must be the same.

    Attributes:
        described: settings and model, to be compared.
        tensors: all that the model has.
        optimizers: their states.
        followers: the tensors of each module that follows the weights, such as a running average.
        snapshot: to continue from.
    """

    described: Any
    tensors: list[Tensor]
    optimizers: list[dict[str, Any]]
    followers: list[list[Tensor]]
    snapshot: Snapshot

    def send(self, transport: Transport, ranks: Sequence[int]) -> None:
        """Sends it to ranks, which :meth:`receive` it."""
        for rank in ranks:
            transport.send_state({**vars(self), "snapshot": vars(self.snapshot)}, rank)

    @classmethod
    def receive(cls, transport: Transport) -> Handover:
        """Returns what rank 0 sends. The snapshot has no part of the outer optimizer's state."""
        received = transport.receive_state(0)
        return cls(**{**received, "snapshot": without_outer_state(Snapshot(**received["snapshot"]))})

    @torch.no_grad()
    def load(self, tensors: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> None:
        """Gives this rank's model and optimizers what rank 0's have."""
        for tensor, value in zip(tensors, self.tensors, strict=True):
            tensor.copy_(value)
        for optimizer, state in zip(optimizers, self.optimizers, strict=True):
            optimizer.load_state_dict(state)
