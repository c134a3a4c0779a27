"""The device mesh of a strategy, by which a model is sharded: as that of Lightning's ModelParallelStrategy."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_pipesync.core.dtensors import is_sharded
from lightning_pipesync.fabric.job import JobMixin
from lightning_pipesync.training.registry import METHODS
from lightning_pipesync.training.replica_layout import REPLICAS, ReplicaLayout


class DeviceMeshMixin(JobMixin):
    """Makes the device mesh of a :class:`ReplicaLayout` with several ranks in a replica, and divides the data by it.

    Attributes:
        layout_type: the class of the layout, whose fields are arguments of the strategy.
        layout: the layout; the strategy sets it.
    """

    layout_type: ClassVar[type[ReplicaLayout]] = ReplicaLayout
    layout: ReplicaLayout
    _mesh: DeviceMesh | None = None

    def __init__(self, **arguments: Any) -> None:
        taken = self.layout_type.taken_from(arguments, METHODS[self.name].config_type)
        super().__init__(**arguments)
        self.layout = self.layout_type.of(self.config, taken)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all ranks: its dimensions are "replicas", "data_parallel" and "tensor_parallel".

        Raises:
            RuntimeError: ``ranks_per_replica`` is 1, or the processes have not begun yet.
        """
        if self._mesh is None:
            raise RuntimeError(
                f"strategy={self.name!r} has a device mesh once all processes have begun, if a replica has several "
                f"ranks, and ranks_per_replica is {self.layout.ranks_per_replica}."
            )
        return self._mesh

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.layout.ranks_per_replica > 1 and self._mesh is None:
            self._mesh = self.layout.device_mesh(self.root_device.type)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        rank, number = self._place_of_data
        return {"num_replicas": number, "rank": rank}

    @property
    def _place_of_data(self) -> tuple[int, int]:
        """This rank among those that divide the data, and their number."""
        return self.layout.place_of_data(self.global_rank, self.world_size)

    def _replicas_of(self, module: nn.Module) -> DeviceMesh | None:
        """Returns the dimension of the mesh along which a module is replicated; None if there is no mesh for it.

        Raises:
            ValueError: it is not sharded, and the method has no other use for ``ranks_per_replica``.
        """
        if self._mesh is None:
            return None
        if is_sharded(module):
            return self._mesh[REPLICAS]
        if "ranks_per_replica" in self.config.__dataclass_fields__:
            return None
        raise ValueError(
            f"ranks_per_replica={self.layout.ranks_per_replica} is for a model that is sharded, and this "
            f"{type(module).__name__} is not: {self._way_to_shard}, as by fully_shard(model, "
            "mesh=device_mesh['data_parallel']), or set ranks_per_replica=1."
        )

    #: How a user shards a model, for a message.
    _way_to_shard: ClassVar[str]
