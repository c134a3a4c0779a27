"""The arguments of Fabric's strategies: the settings of each method.

Written by docs/strategy_classes.py: change a method's settings instead, and run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import device
from torch.distributed import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.fabric.distribution import Accelerator, CheckpointIO, ClusterEnvironment, Precision
from lightning_pipesync.fabric.strategy import PipeSyncFabricStrategyMixin
from lightning_pipesync.training.strategies import passes_to


class DeARFabricStrategyMixin(PipeSyncFabricStrategyMixin):
    """Synchronous SGD whose all-reduce is split in two, hidden under the backward pass and the next forward pass.

    The settings are those of :class:`DeARConfig`, as in :class:`DeARStrategy`.
    The other arguments are those of DDPStrategy and :class:`FabricLayout`.
    """

    name = "dear"

    @passes_to(PipeSyncFabricStrategyMixin)
    def __init__(
        self,
        update: Literal["sharded", "replicated"] | None = None,
        elementwise: tuple[type[Optimizer], ...] = (),
        overlap: Literal["eager", "forward", "none"] = "eager",
        fusion: Literal["bo", "random", "grid", "buffer", "layers", "none"] = "bo",
        bucket_mb: float = 25.0,
        edge_mb: float | None = None,
        search_mb: tuple[float, float] | None = None,
        trial_steps: int = 10,
        max_trials: int = 20,
        tuning_file: str | None = None,
        num_layers: int = 4,
        compression: Codec | str = "none",
        error_feedback: bool = True,
        low_rank: int | None = None,
        low_rank_method: Literal["acp_sgd", "power_sgd"] = "acp_sgd",
        topology: Literal["auto", "flat", "torus2d", "tree"] = "auto",
        torus_columns: int | None = None,
        timeout_s: float = 1800.0,
        check_messages: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ranks_per_replica: int = 1,
        tensor_parallel_size: int = 1,
        parallelize_fn: Callable[[Module, DeviceMesh], Module] | None = None,
    ) -> None: ...


class LocalSGDFabricStrategyMixin(PipeSyncFabricStrategyMixin):
    """Local steps on each rank's weights, which are averaged every ``period`` steps.

    The settings are those of :class:`LocalSGDConfig`, as in :class:`LocalSGDStrategy`.
    The other arguments are those of DDPStrategy and :class:`FabricLayout`.
    """

    name = "local_sgd"

    @passes_to(PipeSyncFabricStrategyMixin)
    def __init__(
        self,
        period: int | str = 16,
        participation: float = 1.0,
        neighbors: Literal["all", "ring", "random_pairs"] = "all",
        ranks_per_replica: int = 1,
        lr_scale: float | Literal["auto"] = "auto",
        warmup_steps: int = 0,
        outer_optimizer: Literal["none", "sgd", "nesterov", "adam", "elastic"] = "none",
        outer_lr: float | Literal["auto"] = "auto",
        outer_momentum: float | Literal["auto"] = "auto",
        elastic_force: float | Literal["auto"] = "auto",
        fragments: int = 1,
        overlap_steps: int = 0,
        mixing_factor: float | Literal["progress"] = "progress",
        delta: float | Literal["auto"] = "auto",
        lssr: float = 0.8,
        window: int = 25,
        smoothing: float = 0.16,
        average_optimizer_states: bool = False,
        compression: Codec | str = "none",
        error_feedback: bool = True,
        residual_decay: float | Literal["auto"] = "auto",
        topology: Literal["auto", "flat", "torus2d", "tree"] = "auto",
        torus_columns: int | None = None,
        partition: Literal["seldp", "defdp"] = "defdp",
        full_pass: bool = False,
        injection: tuple[float, float] | None = None,
        bucket_mb: float = 25.0,
        timeout_s: float = 1800.0,
        check_messages: bool = False,
        lighthouse: str | None = None,
        num_replicas: int | None = None,
        checkpoint_replicas: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        tensor_parallel_size: int = 1,
        parallelize_fn: Callable[[Module, DeviceMesh], Module] | None = None,
    ) -> None: ...


class ParameterServerFabricStrategyMixin(PipeSyncFabricStrategyMixin):
    """SGD with parameter servers: learners push gradients at their own pace, and servers update the weights by them.

    The settings are those of :class:`ParameterServerConfig`, as in :class:`ParameterServerStrategy`.
    The other arguments are those of DDPStrategy and :class:`FabricLayout`.
    """

    name = "parameter_server"

    @passes_to(PipeSyncFabricStrategyMixin)
    def __init__(
        self,
        policy: Literal[
            "sync",
            "k_sync",
            "k_batch_sync",
            "k_async",
            "k_batch_async",
            "async",
            "n_softsync",
            "ssp",
            "downpour",
            "easgd",
            "diloco",
        ] = "k_batch_async",
        k: int | None = None,
        n: int = 1,
        staleness_bound: int = 3,
        n_push: int = 1,
        n_fetch: int = 1,
        period: int = 10,
        elastic_force: Literal["auto"] | float = "auto",
        overlap_steps: int = 0,
        grace_s: float = 0.0,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        servers: int | None = None,
        independent_shards: bool = False,
        dedicated_servers: bool = False,
        staleness_lr: Literal["none", "mean", "gradient", "distance"] = "none",
        distance_bound: float = 0.005,
        delay_compensation: Literal["none", "momentum", "dc_asgd"] = "none",
        dc_lambda: float = 0.04,
        elementwise: tuple[type[Optimizer], ...] = (),
        compression: Codec | str = "none",
        error_feedback: bool = True,
        fetch_compression: Codec | str = "none",
        keep_log: bool = False,
        partition: Literal["defdp", "work_queue"] = "defdp",
        on_lost_rank: Literal["auto", "raise", "continue"] = "auto",
        timeout_s: float = 1800.0,
        check_messages: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ranks_per_replica: int = 1,
        tensor_parallel_size: int = 1,
        parallelize_fn: Callable[[Module, DeviceMesh], Module] | None = None,
    ) -> None: ...


class PipeSGDFabricStrategyMixin(PipeSyncFabricStrategyMixin):
    """The all-reduce of one step runs under the next ones: gradients are exactly ``staleness`` steps stale.

    The settings are those of :class:`PipeSGDConfig`, as in :class:`PipeSGDStrategy`.
    The other arguments are those of DDPStrategy and :class:`FabricLayout`.
    """

    name = "pipe_sgd"

    @passes_to(PipeSyncFabricStrategyMixin)
    def __init__(
        self,
        staleness: int = 1,
        compression: Codec | str = "none",
        error_feedback: bool = True,
        low_rank: int | None = None,
        low_rank_method: Literal["acp_sgd", "power_sgd"] = "acp_sgd",
        topology: Literal["auto", "flat", "torus2d", "tree"] = "auto",
        torus_columns: int | None = None,
        pipeline_level: Literal[1, 2] = 1,
        segments: int = 4,
        warmup_steps: int = 0,
        bucket_mb: float | None = None,
        delay_compensation: Literal["prediction", "momentum", "staleness", "distance", "none"] = "prediction",
        distance_constant: float = 1.0,
        checkpoint_own_gradients: bool = True,
        timeout_s: float = 1800.0,
        check_messages: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ranks_per_replica: int = 1,
        tensor_parallel_size: int = 1,
        parallelize_fn: Callable[[Module, DeviceMesh], Module] | None = None,
    ) -> None: ...


class SelSyncFabricStrategyMixin(PipeSyncFabricStrategyMixin):
    """Local steps, synchronized only when some rank's gradient changes by more than delta.

    The settings are those of :class:`SelSyncConfig`, as in :class:`SelSyncStrategy`.
    The other arguments are those of DDPStrategy and :class:`FabricLayout`.
    """

    name = "selsync"

    @passes_to(PipeSyncFabricStrategyMixin)
    def __init__(
        self,
        delta: float | Literal["auto"] = "auto",
        lssr: float = 0.8,
        aggregation: Literal["parameters", "gradients"] = "parameters",
        average: Literal["all_reduce", "server"] = "all_reduce",
        overlap: Literal["forward", "none"] = "none",
        window: int = 25,
        smoothing: float = 0.16,
        outer_lr: float = 1.0,
        outer_momentum: float | Literal["auto"] = "auto",
        partition: Literal["seldp", "defdp"] = "seldp",
        full_pass: bool = False,
        injection: tuple[float, float] | None = None,
        compression: Codec | str = "none",
        error_feedback: bool = True,
        low_rank: int | None = None,
        low_rank_method: Literal["acp_sgd", "power_sgd"] = "acp_sgd",
        topology: Literal["auto", "flat", "torus2d", "tree"] = "auto",
        torus_columns: int | None = None,
        bucket_mb: float = 25.0,
        timeout_s: float = 1800.0,
        check_messages: bool = False,
        checkpoint_replicas: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ranks_per_replica: int = 1,
        tensor_parallel_size: int = 1,
        parallelize_fn: Callable[[Module, DeviceMesh], Module] | None = None,
    ) -> None: ...
