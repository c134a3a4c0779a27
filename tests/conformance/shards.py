"""The loops in which FSDP2 shards the network within a replica, of which there are several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.conformance.loops import AccelerateLoop, FabricLoop, PlainLoop, Settings, rank_of_process
from tests.conformance.methods import Method
from tests.conformance.training import Options, flat_state, network

WHOLE = StateDictOptions(full_state_dict=True)


def device_mesh(options: Options) -> DeviceMesh:
    size = (options.ranks // options.ranks_per_replica, options.ranks_per_replica)
    return init_device_mesh(options.device, size, mesh_dim_names=("replicas", "shards"))


def shard(layers: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Shards the first layer, and the others together."""
    fully_shard(layers[0], mesh=mesh)
    fully_shard(layers, mesh=mesh)
    return layers


class ShardedPlainLoop(PlainLoop):
    """A loop without a framework; without a method, FSDP2 averages the gradients along both dimensions of the mesh.

    Its checkpoints are a consolidated one, and a file for each rank.
    """

    def make_network(self, method: Method | None, seed: int) -> nn.Sequential:
        mesh = device_mesh(self.options)
        return shard(network(self.options, seed), mesh if method is None else mesh["shards"])

    def without_method(self, model: nn.Sequential) -> nn.Module:
        return model

    def no_sync(self) -> AbstractContextManager[Any]:
        return self._within_replicas() if self.sync is None else self.sync.no_sync()

    @contextmanager
    def _within_replicas(self) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_all_reduce(False)
        yield
        self.model.set_requires_all_reduce(True)

    def save(self, path: Path) -> None:
        assert self.sync is not None
        self.sync.flush()
        with self.sync.given_back():
            model, optimizers = get_state_dict(self.model, self.optimizers, options=WHOLE)
        schedulers = [scheduler.state_dict() for scheduler in self.schedulers]
        own = {"rng": torch.get_rng_state(), "schedulers": schedulers, "pipesync": self.sync.state_dict()}
        torch.save({"model": model, "optimizers": optimizers, **own}, f"{path}-{rank_of_process()}")
        self.sync.resume()

    def load(self, path: Path) -> None:
        assert self.sync is not None
        saved = torch.load(f"{path}-{rank_of_process()}", weights_only=True)
        self.sync.detach()
        states = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizers"]}
        set_state_dict(self.model, self.optimizers, **states, options=WHOLE)
        self.sync = self.attach()
        for scheduler, state in zip(self.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.sync.load_state_dict(saved["pipesync"])
        torch.set_rng_state(saved["rng"])


class ShardedFabricLoop(FabricLoop):
    """A loop in Fabric's words, of a network that is sharded before it is set up."""

    def make_network(self, seed: int) -> nn.Sequential:
        return shard(network(self.options, seed), device_mesh(self.options)["shards"])


class ShardedAccelerateLoop(AccelerateLoop):
    """A loop in Accelerate's words, by its own FSDP2."""

    def sharding(self) -> Settings:
        AcceleratorState._reset_state(reset_partial_state=True)  # which has the device mesh of the one before
        ranks = self.options.ranks_per_replica
        return {
            "parallelism_config": ParallelismConfig(dp_replicate_size=self.options.ranks // ranks, dp_shard_size=ranks),
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="no_wrap", state_dict_type="FULL_STATE_DICT"
            ),
        }

    @staticmethod
    def saved_weights(path: Path) -> Tensor:
        return flat_state(torch.load(path / "pytorch_model_fsdp.bin", weights_only=True))
