"""The outer step: moves the agreed weights towards the average of the replicas (DiLoCo, arXiv 2311.08105; SlowMo)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipesync.core.torch_private import map_tensors

#: Returns an optimizer of some tensors.
MakeOptimizer = Callable[[list[Tensor]], Optimizer]


class OuterStep:
    """Steps an optimizer of torch's on the agreed weights, of which each rank updates its own shards.

    The outer gradient is the agreed weights minus the average of the replicas (DiLoCo, Algorithm 1, lines 12 to 14), so
    that SGD with a learning rate of 1 sets the agreed weights to that average. A rank has the state of its shards only.

    Args:
        shards: this rank's shards of flat buffers with the agreed weights.
        make: returns the outer optimizer of some of them; it must be element-wise.
    """

    def __init__(self, shards: Sequence[Tensor], make: MakeOptimizer) -> None:
        self._shards = list(shards)
        self._optimizers = [make([shard]) for shard in self._shards]

    @torch.no_grad()
    def step(self, index: int, movement: Tensor) -> Tensor:
        """Takes a step on one of the shards, and returns it.

        Args:
            index: index of the shard.
            movement: the average of the replicas minus the agreed weights, of the shard.
        """
        shard = self._shards[index]
        shard.grad = -movement
        self._optimizers[index].step()
        shard.grad = None
        return shard

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizers' state of this rank's shards, on the CPU; the agreed weights are not included."""
        return {"states": [self.state_of(index) for index in range(len(self._optimizers))]}

    def state_of(self, index: int) -> Any:
        """Returns a copy on the CPU of the state of one shard."""
        state = self._optimizers[index].state_dict()["state"]
        return map_tensors(lambda tensor: tensor.to("cpu", copy=True), state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank.

        Raises:
            ValueError: the state is of a version in which every rank had the whole of it.
        """
        if "states" not in state:
            raise ValueError(
                "The outer step's state in this checkpoint is of an earlier version: remove the key 'pipesync' from it "
                "to start from the averaged weights."
            )
        for optimizer, saved in zip(self._optimizers, state["states"], strict=True):
            optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})
