"""The device mesh of a strategy, as Lightning's ModelParallelStrategy has one, and models that Fabric shards by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipesync.core.dtensors import is_sharded
from lightning_pipesync.fabric.job import JobMixin
from lightning_pipesync.fabric.private import materialize
from lightning_pipesync.methods.method import parameters_of
from lightning_pipesync.training.registry import METHODS
from lightning_pipesync.training.replica_layout import REPLICAS, ReplicaLayout

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as _Base
else:
    _Base = object

ParallelizeFn = Callable[[nn.Module, DeviceMesh], nn.Module]


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


@dataclass(frozen=True)
class FabricLayout(ReplicaLayout):
    """The sizes of the device mesh, and what shards a model by it."""

    parallelize_fn: ParallelizeFn | None = None
    """Shards a model that is set up by the device mesh, and returns it, as that of Lightning's
    ``ModelParallelStrategy``. None: it may be sharded before it is set up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallelize_fn is not None and self.ranks_per_replica == 1:
            raise ValueError(
                "parallelize_fn shards a model among the ranks of a replica, and ranks_per_replica=1: set it to the "
                "number of ranks that hold a replica together, such as those of a host."
            )


class ShardedModelMixin(DeviceMeshMixin, _Base):
    """Shards models that are set up, and gives memory to those that were made on the meta device."""

    layout_type = FabricLayout
    layout: FabricLayout
    _way_to_shard = "pass parallelize_fn=..., or shard it before fabric.setup() by fabric.strategy.device_mesh"

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """As in DDPStrategy; with ``empty_init`` and a device mesh on the meta device, until the model is set up."""
        if not empty_init or self.layout.ranks_per_replica == 1:
            return super().module_init_context(empty_init)
        stack = ExitStack()
        stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Leaves a model on the meta device, or one that is still to be sharded, where it is, until it is set up."""
        if self.layout.parallelize_fn is None and not is_sharded(module):
            super().module_to_device(module)

    def _parallelized(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        """Returns a model that is sharded, if it is to be, with memory and on the device; ``optimizers`` train it."""
        shard = self.layout.parallelize_fn
        if shard is not None and not is_sharded(module):
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            parallelized = shard(module, self.device_mesh)
            if not isinstance(parallelized, nn.Module):
                raise ValueError(f"parallelize_fn must return the model, got {parallelized!r}.")
            for optimizer in optimizers:
                _follow(optimizer, names, dict(module.named_parameters()))
            module = parallelized
        if shard is not None or is_sharded(module):
            materialize(module, self.root_device)
            module.to(self.root_device)
        return module


def _follow(optimizer: Optimizer, names: dict[int, str], sharded: dict[str, nn.Parameter]) -> None:
    """Gives an optimizer the parameters that have taken the place of those with the ids in ``names``."""
    if optimizer.state and any(id(parameter) in names for parameter in parameters_of(optimizer)):
        raise ValueError(
            f"{type(optimizer).__name__} has a state of whole parameters, which parallelize_fn shards now: load its "
            "state after fabric.setup(), as by fabric.load()."
        )
    for group in optimizer.param_groups:
        group["params"] = [
            sharded[names[id(parameter)]] if id(parameter) in names else parameter for parameter in group["params"]
        ]
