"""What Ray Train needs of a strategy."""

from __future__ import annotations

from ray import train
from ray.train.lightning import RayDDPStrategy
from typing_extensions import override


class RayStrategy(RayDDPStrategy):
    """Base of the strategies for workers of Ray Train; follows a Trainer's strategy in the bases.

    Ray starts the workers, gives them their ranks and devices, and makes the default process group.
    """

    @property
    @override
    def num_processes(self) -> int:
        """The number of workers on this machine: the Trainer's ``devices`` do not say, on a CPU."""
        return int(train.get_context().get_local_world_size())
