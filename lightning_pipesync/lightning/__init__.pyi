# Written by docs/strategy_classes.py.
from typing import Literal

from torch import device
from torch.optim import Optimizer

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.fabric.distribution import CheckpointIO, ClusterEnvironment
from lightning_pipesync.lightning.callback import PipeSyncCallbackMixin
from lightning_pipesync.lightning.distribution import Accelerator, Callback, DDPStrategy, Precision
from lightning_pipesync.lightning.pipeline import PipelineStrategyMixin
from lightning_pipesync.lightning.step_report import StepReportMixin
from lightning_pipesync.lightning.sync import SyncStrategyMixin
from lightning_pipesync.lightning.trace import TraceCallbackMixin
from lightning_pipesync.training.strategies import Strategies

class PipeSyncCallback(PipeSyncCallbackMixin, Callback): ...
class StepReport(StepReportMixin, Callback): ...
class TraceCallback(TraceCallbackMixin, Callback): ...

class _Strategy(DDPStrategy):
    callback_class: type[Callback]

class DeARStrategy(SyncStrategyMixin, _Strategy):
    def __init__(
        self,
        update: Literal["sharded", "replicated"] | None = ...,
        elementwise: tuple[type[Optimizer], ...] = ...,
        overlap: Literal["eager", "forward", "none"] = ...,
        wait_for_hooks: bool = ...,
        fusion: Literal["bo", "random", "grid", "buffer", "layers", "none"] = ...,
        bucket_mb: float = ...,
        edge_mb: float | None = ...,
        search_mb: tuple[float, float] | None = ...,
        trial_steps: int = ...,
        max_trials: int = ...,
        tuning_file: str | None = ...,
        num_layers: int = ...,
        compression: Codec | str = ...,
        error_feedback: bool = ...,
        low_rank: int | None = ...,
        low_rank_method: Literal["acp_sgd", "power_sgd"] = ...,
        topology: Literal["auto", "flat", "torus2d", "tree"] = ...,
        torus_columns: int | None = ...,
        timeout_s: float = ...,
        accelerator: Accelerator | None = ...,
        parallel_devices: list[device] | None = ...,
        cluster_environment: ClusterEnvironment | None = ...,
        checkpoint_io: CheckpointIO | None = ...,
        precision_plugin: Precision | None = ...,
        process_group_backend: str | None = ...,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = ...,
        ranks_per_replica: int = ...,
        tensor_parallel_size: int = ...,
    ) -> None: ...

class EAPipeStrategy(PipelineStrategyMixin, _Strategy):
    def __init__(
        self,
        elastic_force: float = ...,
        period: int = ...,
        algorithm: Literal["ea_pipe", "pipedream", "weight_stashing", "naive", "spectrain", "gpipe", "1f1b"] = ...,
        module: str | None = ...,
        split: Literal["balanced", "parameters"] | tuple[int, ...] | tuple[str, ...] = ...,
        replicas: int | None = ...,
        micro_batches: int | None = ...,
        prediction_smoothing: float | None = ...,
        num_pipelines: int = ...,
        average: Literal["gradients", "elastic"] = ...,
        average_period: int = ...,
        average_force: float | Literal["auto"] = ...,
        neighbors: Literal["stages", "pipelines"] = ...,
        compression: Literal["none", "bf16", "fp16"] = ...,
        seed: int = ...,
        timeout_s: float = ...,
        accelerator: Accelerator | None = ...,
        parallel_devices: list[device] | None = ...,
        cluster_environment: ClusterEnvironment | None = ...,
        checkpoint_io: CheckpointIO | None = ...,
        precision_plugin: Precision | None = ...,
        process_group_backend: str | None = ...,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = ...,
    ) -> None: ...

class LocalSGDStrategy(SyncStrategyMixin, _Strategy):
    def __init__(
        self,
        period: int | str = ...,
        participation: float = ...,
        neighbors: Literal["all", "ring", "random_pairs"] = ...,
        ranks_per_replica: int = ...,
        lr_scale: float | Literal["auto"] = ...,
        warmup_steps: int = ...,
        outer_optimizer: Literal["none", "sgd", "nesterov", "adam", "elastic"] = ...,
        outer_lr: float | Literal["auto"] = ...,
        outer_momentum: float | Literal["auto"] = ...,
        elastic_force: float | Literal["auto"] = ...,
        fragments: int = ...,
        overlap_steps: int = ...,
        mixing_factor: float | Literal["progress"] = ...,
        delta: float | Literal["auto"] = ...,
        lssr: float = ...,
        window: int = ...,
        smoothing: float = ...,
        average_optimizer_states: bool = ...,
        compression: Codec | str = ...,
        error_feedback: bool = ...,
        residual_decay: float | Literal["auto"] = ...,
        topology: Literal["auto", "flat", "torus2d", "tree"] = ...,
        torus_columns: int | None = ...,
        partition: Literal["seldp", "defdp"] = ...,
        full_pass: bool = ...,
        injection: tuple[float, float] | None = ...,
        bucket_mb: float = ...,
        timeout_s: float = ...,
        lighthouse: str | None = ...,
        num_replicas: int | None = ...,
        checkpoint_replicas: bool = ...,
        accelerator: Accelerator | None = ...,
        parallel_devices: list[device] | None = ...,
        cluster_environment: ClusterEnvironment | None = ...,
        checkpoint_io: CheckpointIO | None = ...,
        precision_plugin: Precision | None = ...,
        process_group_backend: str | None = ...,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = ...,
        tensor_parallel_size: int = ...,
    ) -> None: ...

class ParameterServerStrategy(SyncStrategyMixin, _Strategy):
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
        ] = ...,
        k: int | None = ...,
        n: int = ...,
        staleness_bound: int = ...,
        n_push: int = ...,
        n_fetch: int = ...,
        period: int = ...,
        elastic_force: Literal["auto"] | float = ...,
        overlap_steps: int = ...,
        grace_s: float = ...,
        outer_lr: float = ...,
        outer_momentum: float = ...,
        servers: int | None = ...,
        independent_shards: bool = ...,
        dedicated_servers: bool = ...,
        staleness_lr: Literal["none", "mean", "gradient", "distance"] = ...,
        distance_bound: float = ...,
        delay_compensation: Literal["none", "momentum", "dc_asgd"] = ...,
        dc_lambda: float = ...,
        elementwise: tuple[type[Optimizer], ...] = ...,
        compression: Codec | str = ...,
        error_feedback: bool = ...,
        fetch_compression: Codec | str = ...,
        keep_log: bool = ...,
        partition: Literal["defdp", "work_queue"] = ...,
        on_lost_rank: Literal["auto", "raise", "continue"] = ...,
        timeout_s: float = ...,
        accelerator: Accelerator | None = ...,
        parallel_devices: list[device] | None = ...,
        cluster_environment: ClusterEnvironment | None = ...,
        checkpoint_io: CheckpointIO | None = ...,
        precision_plugin: Precision | None = ...,
        process_group_backend: str | None = ...,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = ...,
        ranks_per_replica: int = ...,
        tensor_parallel_size: int = ...,
    ) -> None: ...

class PipeSGDStrategy(SyncStrategyMixin, _Strategy):
    def __init__(
        self,
        staleness: int = ...,
        compression: Codec | str = ...,
        error_feedback: bool = ...,
        low_rank: int | None = ...,
        low_rank_method: Literal["acp_sgd", "power_sgd"] = ...,
        topology: Literal["auto", "flat", "torus2d", "tree"] = ...,
        torus_columns: int | None = ...,
        pipeline_level: Literal[1, 2] = ...,
        segments: int = ...,
        warmup_steps: int = ...,
        bucket_mb: float | None = ...,
        drain: bool = ...,
        delay_compensation: Literal["prediction", "momentum", "staleness", "distance", "none"] = ...,
        distance_constant: float = ...,
        checkpoint_own_gradients: bool = ...,
        timeout_s: float = ...,
        accelerator: Accelerator | None = ...,
        parallel_devices: list[device] | None = ...,
        cluster_environment: ClusterEnvironment | None = ...,
        checkpoint_io: CheckpointIO | None = ...,
        precision_plugin: Precision | None = ...,
        process_group_backend: str | None = ...,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = ...,
        ranks_per_replica: int = ...,
        tensor_parallel_size: int = ...,
    ) -> None: ...

class SelSyncStrategy(SyncStrategyMixin, _Strategy):
    def __init__(
        self,
        delta: float | Literal["auto"] = ...,
        lssr: float = ...,
        aggregation: Literal["parameters", "gradients"] = ...,
        average: Literal["all_reduce", "server"] = ...,
        overlap: Literal["forward", "none"] = ...,
        wait_for_hooks: bool = ...,
        window: int = ...,
        smoothing: float = ...,
        outer_lr: float = ...,
        outer_momentum: float | Literal["auto"] = ...,
        partition: Literal["seldp", "defdp"] = ...,
        full_pass: bool = ...,
        injection: tuple[float, float] | None = ...,
        compression: Codec | str = ...,
        error_feedback: bool = ...,
        low_rank: int | None = ...,
        low_rank_method: Literal["acp_sgd", "power_sgd"] = ...,
        topology: Literal["auto", "flat", "torus2d", "tree"] = ...,
        torus_columns: int | None = ...,
        bucket_mb: float = ...,
        timeout_s: float = ...,
        checkpoint_replicas: bool = ...,
        accelerator: Accelerator | None = ...,
        parallel_devices: list[device] | None = ...,
        cluster_environment: ClusterEnvironment | None = ...,
        checkpoint_io: CheckpointIO | None = ...,
        precision_plugin: Precision | None = ...,
        process_group_backend: str | None = ...,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = ...,
        ranks_per_replica: int = ...,
        tensor_parallel_size: int = ...,
    ) -> None: ...

STRATEGIES: Strategies
