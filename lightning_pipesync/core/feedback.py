"""Error feedback: what a codec dropped is added to what is encoded next."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_pipesync.core.shards import accumulation_dtype, shard_numel


class ErrorFeedback:
    """The residuals of one flat buffer that is exchanged again and again with a lossy codec.

    A lossy all-reduce compresses twice: each rank its own values before the reduce-scatter, the owner of a shard the
    reduced shard before the all-gather. Each place keeps its own residual.

    Attributes:
        contribution: residual of this rank's values, shape ``[numel]``.
        shard: residual of the reduced shard that this rank owns, shape ``[ceil(numel / world_size)]``.
    """

    def __init__(self, flat: Tensor, world_size: int) -> None:
        dtype = accumulation_dtype(flat.dtype)
        self.contribution = torch.zeros(flat.numel(), dtype=dtype, device=flat.device)
        self.shard = torch.zeros(shard_numel(flat.numel(), world_size), dtype=dtype, device=flat.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns both residuals."""
        return {"contribution": self.contribution, "shard": self.shard}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from the residuals that :meth:`state_dict` returned."""
        self.contribution.copy_(state["contribution"])
        self.shard.copy_(state["shard"])
