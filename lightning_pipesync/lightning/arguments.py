"""The arguments of the Trainer's strategies: the settings of each method.

Written by docs/strategy_classes.py: change a method's settings instead, and run it.
"""

from __future__ import annotations

from typing import Literal

from torch import device
from torch.optim import Optimizer

from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.fabric.distribution import CheckpointIO, ClusterEnvironment
from lightning_pipesync.lightning.distribution import Accelerator, Precision
from lightning_pipesync.lightning.pipeline import PipelineStrategyMixin
from lightning_pipesync.lightning.sync import SyncStrategyMixin
from lightning_pipesync.training.strategies import passes_to


class DeARStrategyMixin(SyncStrategyMixin):
    """Synchronous SGD whose all-reduce is split in two, hidden under the backward pass and the next forward pass.

    Args:
        update: ``replicated``: all-gathers gradients, and each rank updates all weights, as in the paper. ``sharded``:
            each rank updates its shard of the weights, and all-gathers weights; for element-wise optimizers (SGD, Adam,
            AdamW, RMSprop, Adagrad, NAdam, RAdam, Adamax, ASGD); not with ``topology="tree"``. None: ``sharded`` for
            these where gradients are not gathered under backward, with another ``overlap``, compression or several
            optimizers; otherwise, and on a tree, ``replicated``.
        elementwise: Classes of further element-wise optimizers, which step on whole buckets, and can be sharded.
        overlap: Where the all-gathers run. ``eager``: averaged gradients are gathered under backward already where the
            network would idle, unless ``update="sharded"``, compressed, or with several optimizers. ``forward``:
            all-gathers start after the last reduce-scatter, and run under the next forward pass (the paper, Section
            III-B). ``none``: they end before ``step()`` returns. See ``update=None``, which depends on it.
        wait_for_hooks: Whether a step waits for the weights under a Trainer with hooks of yours, in the module or in a
            callback, between a step and the next forward pass, so that they may read and write weights as with DDP.
            False, if they do not touch weights: communication stays hidden under the next forward pass.
        fusion: Tensor fusion (Section IV): ``bo``: buckets up to a size that Bayesian optimization finds during
            training (DeAR-BO); ``buffer``: up to ``bucket_mb`` (DeAR-FB); ``layers``: of ``num_layers`` neighboring
            layers (DeAR-NL); ``none``: a bucket for every tensor. ``random`` and ``grid`` search in other ways.
        bucket_mb: Maximum bucket size in MiB; in a search, that of the first trial.
        edge_mb: Maximum size in MiB of the first and of the last bucket, which nothing hides; sizes double towards the
            middle, up to ``bucket_mb``. None: the same for all buckets. A search finds its own.
        search_mb: Smallest and largest bucket size of a search, in MiB; at most the size of the model. None: 1 to 100,
            as in the paper; of a model of less than 40 MiB from a fortieth.
        trial_steps: Steps of a trial of the search; fewer with a size that is clearly worse.
        max_trials: Maximum number of trials of a search, which ends earlier if it has converged.
        tuning_file: JSON file to which rank 0 writes the trials of a search, and from which a search of the same model
            and number of ranks resumes.
        num_layers: Layers of a bucket, with ``fusion="layers"``.
        compression: Codec of both halves: none, bf16, fp16, truncate16, fp8, int8, int4, int2, topk, chunked_topk.
        error_feedback: Whether the error of a lossy codec, or of ``low_rank``, is added to the next values.
        low_rank: Rank r of the factors P and Q, with P Q^T near the gradient, that are averaged in place of the
            gradients of weights with two dimensions or more, where both together have fewer values. None: gradients are
            averaged as they are.
        low_rank_method: With ``low_rank``: ``acp_sgd`` averages one factor in a step, P and Q in turns, in one
            all-reduce; ``power_sgd`` averages both, Q once P is known: about twice the bytes and the latency, and a
            better approximation.
        topology: ``flat``: every rank exchanges with every other. ``torus2d``: along rows of neighbors, then across the
            rows, for hosts with several accelerators, or in racks; the codec is used across rows only. ``tree``: reduce
            and broadcast on a double binary tree over Gloo, for many ranks, or small buckets; the codec is used in the
            broadcast only. ``auto``: with a lossy codec, where each of several hosts has the same number of neighboring
            ranks, two or more, a torus with a row for each host; otherwise flat.
        torus_columns: Ranks in a row of the torus, such as those of a host or a rack. None: as square as possible; with
            a strategy, the ranks of a host, if there are several.
        timeout_s: Seconds after which a rank that does not answer counts as lost.
        check_messages: Whether Gloo's messages have checksums, so that one which was damaged on its way ends the
            training, with an error that names the rank which has sent it.
        accelerator: as in DDPStrategy.
        parallel_devices: as in DDPStrategy.
        cluster_environment: as in DDPStrategy.
        checkpoint_io: as in DDPStrategy.
        precision_plugin: as in DDPStrategy.
        process_group_backend: as in DDPStrategy; with ``"gloo"``, CUDA tensors are sent through host memory.
        start_method: as in DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        ranks_per_replica: Number of neighboring ranks that hold a replica of a sharded model together, such as those of
            a host. With more than one, the strategy makes a device mesh ("replicas", "data_parallel",
            "tensor_parallel"), by which the model is to be sharded, and synchronizes along "replicas".
        tensor_parallel_size: Number of neighboring ranks of a replica that get the same batches: the size of
            "tensor_parallel" in the mesh. It must divide ``ranks_per_replica``; the quotient is the size of
            "data_parallel".

    Raises:
        ValueError: a setting is unknown or out of its range.
    """

    name = "dear"

    @passes_to(SyncStrategyMixin)
    def __init__(
        self,
        update: Literal["sharded", "replicated"] | None = None,
        elementwise: tuple[type[Optimizer], ...] = (),
        overlap: Literal["eager", "forward", "none"] = "eager",
        wait_for_hooks: bool = True,
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
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ranks_per_replica: int = 1,
        tensor_parallel_size: int = 1,
    ) -> None: ...


class EAPipeStrategyMixin(PipelineStrategyMixin):
    """Trains a model as a pipeline without bubbles, with one stage in each process.

    Args:
        elastic_force: alpha: the fraction of their distance by which a replica and the master are pulled together (Eq.
            1). The paper uses 0.1, 0.3 and 0.5; with a weak force the replicas of many stages drift apart.
        period: tau: the number of a replica's mini-batches between two pulls (Algorithm 1).
        algorithm: ``ea_pipe``; or an algorithm that the paper compares it with: ``pipedream`` (weight stashing and
            vertical sync), ``naive`` (Fig. 1a), ``spectrain`` (weight prediction), or the synchronous ``gpipe`` and
            ``1f1b``. Also ``weight_stashing`` without vertical sync, the default of PipeDream.
        module: Name of the submodule of a LightningModule that is divided. None: its only ``nn.Sequential``.
        split: The layers of each stage: ``balanced`` by their measured time; by their number of ``parameters``; or the
            indices of the first layers of the second and all later stages. For a model that is not an
            ``nn.Sequential``: the names of the submodules with which the second and all later stages begin, in the
            order in which they are called.
        replicas: The number of mini-batches in flight, each with a replica of the weights. None: the number of stages
            (N), as in the paper, which keeps all stages busy if communication takes no time. More replicas hide the
            communication.
        micro_batches: The number of micro-batches of ``gpipe`` and ``1f1b``. None: the number of stages.
        prediction_smoothing: The smoothing of the updates from which ``spectrain`` predicts weights; 0: the last update
            alone. None: 0 if the optimizer has a momentum, else 0.9.
        num_pipelines: The number of pipelines side by side, which divide the training data: each has an equal part of
            the ranks, two stages or more.
        average: What pipelines side by side have in common. ``gradients``: each mini-batch updates with the mean
            gradient of all pipelines, as a mini-batch of all their samples does. ``elastic``: each pipeline trains by
            itself, and its weights and a reference model attract each other (AvgPipe); with ``ea_pipe``, ``gpipe`` and
            ``1f1b``.
        average_period: With ``average="elastic"``: the number of mini-batches between two averages.
        average_force: With ``average="elastic"``: the share of their distance by which a pipeline and the reference
            attract each other, at most 1 / ``num_pipelines``. ``auto``: 0.9 / ``num_pipelines`` (EASGD).
        neighbors: What neighboring ranks have, such as those of a host: the ``stages`` of one pipeline, so that
            averages go between hosts; or the same stage of all ``pipelines``, so that activations do.
        compression: The dtype in which activations and their gradients are sent: bf16, fp16, or none: the dtype that
            they have.
        seed: The seed of the random numbers of layers and the loss, such as dropout, which depend only on it, the
            mini-batch and the stage.
        timeout_s: Seconds after which a rank that does not answer counts as lost.
        check_messages: Whether Gloo's messages have checksums, so that one which was damaged on its way ends the
            training, with an error that names the rank which has sent it. Not those with activations of ``gpipe`` and
            ``1f1b``, which PyTorch's schedules send.
        accelerator: as in DDPStrategy.
        parallel_devices: as in DDPStrategy.
        cluster_environment: as in DDPStrategy.
        checkpoint_io: as in DDPStrategy.
        precision_plugin: as in DDPStrategy.
        process_group_backend: as in DDPStrategy; with ``"gloo"``, CUDA tensors are sent through host memory.
        start_method: as in DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Raises:
        ValueError: a setting is unknown or out of its range.
    """

    name = "ea_pipe"

    @passes_to(PipelineStrategyMixin)
    def __init__(
        self,
        elastic_force: float = 0.5,
        period: int = 1,
        algorithm: Literal[
            "ea_pipe", "pipedream", "weight_stashing", "naive", "spectrain", "gpipe", "1f1b"
        ] = "ea_pipe",
        module: str | None = None,
        split: Literal["balanced", "parameters"] | tuple[int, ...] | tuple[str, ...] = "balanced",
        replicas: int | None = None,
        micro_batches: int | None = None,
        prediction_smoothing: float | None = None,
        num_pipelines: int = 1,
        average: Literal["gradients", "elastic"] = "gradients",
        average_period: int = 1,
        average_force: float | Literal["auto"] = "auto",
        neighbors: Literal["stages", "pipelines"] = "stages",
        compression: Literal["none", "bf16", "fp16"] = "none",
        seed: int = 0,
        timeout_s: float = 1800.0,
        check_messages: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None: ...


class LocalSGDStrategyMixin(SyncStrategyMixin):
    """Local steps on each rank's weights, which are averaged every ``period`` steps.

    Args:
        period: H: each fragment is averaged every so many steps. 1: after every step. ``"0.25 epoch"``: that share of
            an epoch's steps (E of FedAvg). ``"selsync"``: when the gradient has changed enough on some rank (SelSync,
            Algorithm 1); then ``delta``, ``lssr``, ``window`` and ``smoothing`` apply, and the next fragment in turn is
            averaged.
        participation: C of FedAvg: the share of the ranks, or groups, drawn anew in each round, whose weights are
            averaged, in (0, 1]. All ranks continue from that average.
        neighbors: With whom a rank, or group, averages in a round, and continues from that average (gossip). ``all``:
            all have the same weights then. ``ring``: the two beside it in a ring (D-PSGD). ``random_pairs``: one other,
            drawn anew in each round; of an odd number one is left out.
        ranks_per_replica: Number of neighboring ranks that train one replica together, such as those of a host: their
            gradients are averaged in each step. The groups are averaged as single ranks are otherwise. It must divide
            the number of ranks.
        lr_scale: Factor on the optimizer's learning rate in local steps. ``auto``: for torch's Adam, AdamW, NAdam and
            RAdam as measured, from 1 to the root of the number of replicas, so that a step, which the noise of a rank's
            batch shortens, is as long as with averaged gradients; 1 for others.
        warmup_steps: Steps at the beginning whose gradients are averaged, as DDP does (post-local SGD).
        outer_optimizer: What moves the global weights, with global weights minus the replicas' average as their
            gradient. ``none``: they become the average. ``sgd``, ``nesterov`` (DiLoCo) and ``adam``: torch's optimizer
            of that name. ``elastic``: replicas and global weights attract each other (EASGD; EAMSGD, if the optimizer
            has Nesterov momentum).
        outer_lr: Learning rate of the outer optimizer. ``auto``: 0.7 for ``nesterov``, as in DiLoCo, 1 for ``sgd``,
            0.001 for ``adam``.
        outer_momentum: Momentum of ``sgd`` and ``nesterov``, in [0, 1). ``auto``: 0.9 for ``nesterov``, as in DiLoCo, 0
            for ``sgd``.
        elastic_force: alpha of EASGD, in (0, 1): the share of its distance to the global weights by which a replica is
            attracted, and they by it. ``auto``: 0.9 / number of replicas. With ``lighthouse`` it is 1 / number of
            replicas at most, whoever comes.
        fragments: Number of pieces of the model, in the order of its layers, which are averaged in turns within a
            period (Streaming DiLoCo): the peak traffic falls by this factor.
        overlap_steps: tau of Streaming DiLoCo: steps under which the average of a fragment runs before it is applied,
            at most ``period``. 0: the step waits for it.
        mixing_factor: With ``overlap_steps``: what stays of a rank's weights when an average is applied. A number in
            [0, 1]: that share (alpha of Streaming DiLoCo, Eq. 3). ``progress``: what they have moved since the average
            started is added to it (CoCoD-SGD).
        delta: With ``period="selsync"``: threshold on the relative gradient change. ``auto``: so that the share
            ``lssr`` of the steps is local.
        lssr: With ``period="selsync"`` and ``delta="auto"``: the target share of local steps, in [0, 1).
        window: With ``period="selsync"``: steps over which the squared gradient norm is smoothed.
        smoothing: With ``period="selsync"``: smoothing factor of the moving average, in (0, 1].
        average_optimizer_states: Whether the optimizers' states are averaged at the end of each period, too. Otherwise
            they stay as they are.
        compression: Codec of the averages: none, bf16, fp16, truncate16, fp8, int8, int4, int2, topk, chunked_topk. It
            encodes the difference to the global weights.
        error_feedback: Whether the error of a lossy codec is added to the next values that it encodes.
        residual_decay: With ``error_feedback``: the factor on an error before the next values are added to it, in (0,
            1] (beta of SparseLoCo, where it stands for the outer momentum). ``auto``: 0.95 for ``chunked_topk``, as in
            SparseLoCo; 1 for others, which forgets nothing.
        topology: ``flat``: every rank exchanges with every other. ``torus2d``: along rows of neighbors, then across the
            rows, for hosts with several accelerators, or in racks; the codec is used across rows only. ``tree``: reduce
            and broadcast on a double binary tree over Gloo, for many ranks, or small buckets; the codec is used in the
            broadcast only. ``auto``: with a lossy codec, where each of several hosts has the same number of neighboring
            ranks, two or more, a torus with a row for each host; otherwise flat.
        torus_columns: Ranks in a row of the torus, such as those of a host or a rack. None: as square as possible; with
            a strategy, the ranks of a host, if there are several.
        partition: Order of the training data: ``defdp`` is the framework's order; ``seldp`` rotates chunks (SelSync,
            Section III-D).
        full_pass: With ``seldp``: whether an epoch covers all chunks, instead of one chunk, 1 / ranks of the data.
        injection: Data injection for non-IID data: (alpha, beta) of SelSync, Section III-E.
        bucket_mb: Maximum bucket size in MiB. A bucket is exchanged in one collective.
        timeout_s: Seconds after which a rank that does not answer counts as lost.
        check_messages: Whether Gloo's messages have checksums, so that one which was damaged on its way ends the
            training, with an error that names the rank which has sent it. With ``lighthouse`` the round is repeated,
            with a warning that names the replica.
        lighthouse: ``host:port`` of the lighthouse of replicas that are jobs of their own, and come and go. None: that
            of the environment variable ``PIPESYNC_LIGHTHOUSE``, which ``pipesync launch`` sets; without it all replicas
            are in this job.
        num_replicas: With ``lighthouse``: the number of replicas that the training begins with. None: that of the
            environment variable ``PIPESYNC_NUM_REPLICAS``, or 1.
        checkpoint_replicas: Whether a checkpoint holds each rank's weights and optimizer state besides the average.
            Without them it is smaller by a factor of the number of ranks, and a resumed run starts from the average.
        accelerator: as in DDPStrategy.
        parallel_devices: as in DDPStrategy.
        cluster_environment: as in DDPStrategy.
        checkpoint_io: as in DDPStrategy.
        precision_plugin: as in DDPStrategy.
        process_group_backend: as in DDPStrategy; with ``"gloo"``, CUDA tensors are sent through host memory.
        start_method: as in DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        tensor_parallel_size: Number of neighboring ranks of a replica that get the same batches: the size of
            "tensor_parallel" in the mesh. It must divide ``ranks_per_replica``; the quotient is the size of
            "data_parallel".

    Raises:
        ValueError: a setting is unknown or out of its range.
    """

    name = "local_sgd"

    @passes_to(SyncStrategyMixin)
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
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        tensor_parallel_size: int = 1,
    ) -> None: ...


class ParameterServerStrategyMixin(SyncStrategyMixin):
    """SGD with parameter servers: learners push gradients at their own pace, and servers update the weights by them.

    Args:
        policy: When the servers update the weights. ``sync``: when all learners have pushed a gradient. ``k_sync``:
            when ``k`` learners have; the others' passes are cancelled. ``k_batch_sync``: after ``k`` gradients, whoever
            pushed them; the passes under way are cancelled. ``k_async`` and ``k_batch_async``: the same, and no pass is
            cancelled. ``async``: after each gradient. ``n_softsync``: after every ranks / ``n`` gradients. ``ssp``:
            after each gradient, and no learner is more than ``staleness_bound`` gradients ahead of the slowest one.
            ``downpour``: learners take local steps of plain SGD, push the sum of their gradients every ``n_push``
            steps, each of which is an update, and fetch weights every ``n_fetch`` steps, both under computation.
            ``easgd``: each learner trains a replica with its own optimizer, and every ``period`` steps the replica and
            the servers' weights attract each other. ``diloco``: each learner trains with its own optimizer, and pushes
            every ``period`` steps how far they have moved the weights that it had fetched; when ``k`` learners have,
            and ``grace_s`` seconds later, an outer optimizer moves the servers' weights by the mean of that, in which
            each learner counts by its steps.
        k: K of ``k_sync``, ``k_batch_sync``, ``k_async`` and ``k_batch_async``: the gradients of an update; the quorum
            of ``diloco``. None: as many as there are learners.
        n: n of ``n_softsync``, about the mean staleness: 1 is similar to ``sync``, the number of learners is ``async``.
        staleness_bound: s of ``ssp``: maximum number of gradients that a learner may be ahead of the slowest one.
        n_push: Steps of ``downpour`` from one push to the next.
        n_fetch: Steps of ``downpour`` from one fetch to the next.
        period: tau of ``easgd``, H of ``diloco``: steps of a learner from one exchange with the servers to the next.
        elastic_force: alpha of ``easgd``, in (0, 1): the share of their distance by which a replica and the servers'
            weights move. ``auto``: 0.9 / number of learners.
        overlap_steps: Steps of ``diloco`` under which the servers' new weights are on their way, at most ``period``;
            what a learner has moved meanwhile is added to them. 0: it waits for them.
        grace_s: Seconds for which an update of ``diloco`` waits for further learners once ``k`` have pushed.
        outer_lr: Learning rate of the outer optimizer of ``diloco``, which is SGD with Nesterov momentum.
        outer_momentum: Its momentum, in [0, 1). With a ``k`` well below the number of learners set less: each of them
            is moved on by the momentum of the others.
        servers: Number of servers: the first ranks, each with a share of the weights; they also train. None: all ranks.
        independent_shards: Whether each server of ``async`` and ``downpour`` applies gradients in the order in which
            they reach it, and answers at once, without a word with the other servers. The shards of the weights that a
            learner fetches may then have had different updates (Dean et al., NIPS 2012, Section 4.1).
        dedicated_servers: Whether the servers only serve, as in the papers, and the other ranks train. In plain loops.
        staleness_lr: How the learning rate depends on the staleness of gradients, the number of updates since the
            weights at which they were computed. ``mean``: it is divided by the mean staleness so far, where that is
            above 1. ``gradient``: each gradient counts by 1 / staleness. ``distance``: each counts by
            ``distance_bound`` over the squared distance of the weights from those at which it was computed, 1 at most
            (Dutta et al., AISTATS 2018, Eq. 13); the servers keep the weights of each learner for that.
        distance_bound: C / eta_max of that rule: the squared distance above which the learning rate falls.
        delay_compensation: How stale gradients are compensated. ``momentum``: learners get weights predicted by
            momentum alone, as many updates ahead as gradients have been stale on average (SpecTrain). ``dc_asgd``: the
            servers add to each gradient the Taylor expansion for the distance that the weights have moved since; they
            keep the weights of each learner for that.
        dc_lambda: lambda of DC-ASGD: how much of the gradient's outer product stands for the Hessian.
        elementwise: Classes of further element-wise optimizers, which can be divided among several servers.
        compression: Codec of the gradients: none, bf16, fp16, truncate16, fp8, int8, int4, int2, topk, chunked_topk.
        error_feedback: Whether the error of a lossy codec is added to the next values that it encodes.
        fetch_compression: Codec of the weights that learners fetch, as differences to those that they have; the servers
            keep these for each learner. A flush sends the weights as they are.
        keep_log: Whether rank 0 keeps the log of all updates, from which the run can be replayed.
        partition: Which rank trains on which data: ``defdp`` is the framework's order, with the same number of batches
            for all. ``work_queue``: each rank asks for its next batch, so that an epoch is the whole data set, whoever
            trains on which part of it. Except in a Trainer, with ``prepare_train_loader``.
        on_lost_rank: What the others do when a rank is lost. ``raise``: they raise an error that names it.
            ``continue``: they train without it, unless it serves weights; in plain loops, where not all ranks serve.
            ``auto``: they continue where they can, if the policy is asynchronous: not with ``sync``, ``k_sync``,
            ``k_batch_sync`` and ``ssp``.
        timeout_s: Seconds after which a rank that is not heard of counts as lost.
        check_messages: Whether Gloo's messages have checksums, so that one which was damaged on its way ends the
            training, with an error that names the rank which has sent it.
        accelerator: as in DDPStrategy.
        parallel_devices: as in DDPStrategy.
        cluster_environment: as in DDPStrategy.
        checkpoint_io: as in DDPStrategy.
        precision_plugin: as in DDPStrategy.
        process_group_backend: as in DDPStrategy; with ``"gloo"``, CUDA tensors are sent through host memory.
        start_method: as in DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        ranks_per_replica: Number of neighboring ranks that hold a replica of a sharded model together, such as those of
            a host. With more than one, the strategy makes a device mesh ("replicas", "data_parallel",
            "tensor_parallel"), by which the model is to be sharded, and synchronizes along "replicas".
        tensor_parallel_size: Number of neighboring ranks of a replica that get the same batches: the size of
            "tensor_parallel" in the mesh. It must divide ``ranks_per_replica``; the quotient is the size of
            "data_parallel".

    Raises:
        ValueError: a setting is unknown or out of its range.
    """

    name = "parameter_server"

    @passes_to(SyncStrategyMixin)
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
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ranks_per_replica: int = 1,
        tensor_parallel_size: int = 1,
    ) -> None: ...


class PipeSGDStrategyMixin(SyncStrategyMixin):
    """The all-reduce of one step runs under the next ones: gradients are exactly ``staleness`` steps stale.

    Args:
        staleness: k: by how many steps the update is later than its gradient (Algorithm 1). 0: synchronous SGD. The
            paper's optimum is 1: larger values hide no more communication, and slow convergence.
        compression: Codec of the all-reduce: none, bf16, fp16, truncate16, fp8, int8, int4, int2, topk, chunked_topk.
            Each rank compresses its gradient once.
        error_feedback: Whether the error of a lossy codec, or of ``low_rank``, is added to the next values; not in the
            paper.
        low_rank: Rank r of the factors P and Q, with P Q^T near the gradient, that are averaged in place of the
            gradients of weights with two dimensions or more, where both together have fewer values. None: gradients are
            averaged as they are.
        low_rank_method: With ``low_rank``: ``acp_sgd`` averages one factor in a step, P and Q in turns, in one
            all-reduce; ``power_sgd`` averages both, Q once P is known: about twice the bytes and the latency, and a
            better approximation.
        topology: ``flat``: every rank exchanges with every other. ``torus2d``: along rows of neighbors, then across the
            rows, for hosts with several accelerators, or in racks; the codec is used across rows only. ``tree``: reduce
            and broadcast on a double binary tree over Gloo, for many ranks, or small buckets; the codec is used in the
            broadcast only. ``auto``: with a lossy codec, where each of several hosts has the same number of neighboring
            ranks, two or more, a torus with a row for each host; otherwise flat.
        torus_columns: Ranks in a row of the torus, such as those of a host or a rack. None: as square as possible; with
            a strategy, the ranks of a host, if there are several.
        pipeline_level: 1: the all-reduce starts after the backward pass; 2: that of each of ``segments`` when it is
            ready (Fig. 7).
        segments: L: number of segments of about the same size into which level 2 divides the gradient.
        warmup_steps: Synchronous steps before the pipeline fills.
        bucket_mb: Maximum bucket size in MiB at level 1. None: one bucket for each dtype.
        drain: Whether the end of training applies the last ``staleness`` gradients, which the paper drops.
        delay_compensation: How the delay is compensated. ``prediction``: gradients are computed at the weights after
            the updates in flight, which each rank predicts with its own gradients; ``momentum``: predicted with
            gradients of zero (SpecTrain). Or by a smaller learning rate (lecture, "Staleness Dependent Learning Rate"):
            ``staleness``: divided by the number of updates that the gradient is late, which needs ``staleness`` of at
            least 2; ``distance``: at most ``distance_constant`` over the squared distance that the weights have moved
            since. ``none``: not at all, as in the paper.
        distance_constant: C of ``delay_compensation="distance"``.
        checkpoint_own_gradients: Whether a checkpoint holds each rank's own part of the gradients in flight, with which
            it predicts: ``staleness`` times the weights for every rank. Without them a resumed run predicts its first
            steps with the averages.
        timeout_s: Seconds after which a rank that does not answer counts as lost.
        check_messages: Whether Gloo's messages have checksums, so that one which was damaged on its way ends the
            training, with an error that names the rank which has sent it.
        accelerator: as in DDPStrategy.
        parallel_devices: as in DDPStrategy.
        cluster_environment: as in DDPStrategy.
        checkpoint_io: as in DDPStrategy.
        precision_plugin: as in DDPStrategy.
        process_group_backend: as in DDPStrategy; with ``"gloo"``, CUDA tensors are sent through host memory.
        start_method: as in DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        ranks_per_replica: Number of neighboring ranks that hold a replica of a sharded model together, such as those of
            a host. With more than one, the strategy makes a device mesh ("replicas", "data_parallel",
            "tensor_parallel"), by which the model is to be sharded, and synchronizes along "replicas".
        tensor_parallel_size: Number of neighboring ranks of a replica that get the same batches: the size of
            "tensor_parallel" in the mesh. It must divide ``ranks_per_replica``; the quotient is the size of
            "data_parallel".

    Raises:
        ValueError: a setting is unknown or out of its range.
    """

    name = "pipe_sgd"

    @passes_to(SyncStrategyMixin)
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
        drain: bool = False,
        delay_compensation: Literal["prediction", "momentum", "staleness", "distance", "none"] = "prediction",
        distance_constant: float = 1.0,
        checkpoint_own_gradients: bool = True,
        timeout_s: float = 1800.0,
        check_messages: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ranks_per_replica: int = 1,
        tensor_parallel_size: int = 1,
    ) -> None: ...


class SelSyncStrategyMixin(SyncStrategyMixin):
    """Local steps, synchronized only when some rank's gradient changes by more than delta.

    Args:
        delta: Threshold on the relative gradient change (Section III-B). 0: every step is synchronized; ``inf``: none
            is. ``auto``: delta follows the largest change over all ranks, so that the share ``lssr`` of the steps is
            local.
        lssr: With ``delta="auto"``: the target share of local steps (Eq. 4), in [0, 1).
        aggregation: What a synchronized step averages (Section III-C): the updated parameters, or the gradients before
            the update.
        average: How a synchronized step averages parameters. ``all_reduce``: each rank sums a share. ``server``: rank 0
            is the parameter server of Algorithm 1, to which all push, and from which they pull the average; its link
            carries 2 (ranks - 1) times the parameters. It has no codec, outer step or overlap.
        overlap: With ``aggregation="parameters"``: where a synchronized step's average runs. ``none``: before
            ``step()`` returns; ``forward``: under the next forward pass, in which each module waits for its weights
            only. Then set a smaller ``bucket_mb``, and in a plain loop let nothing else read or write weights right
            after a step. A model with compiled modules gets ``none``.
        wait_for_hooks: Whether a step waits for the weights under a Trainer with hooks of yours, in the module or in a
            callback, between a step and the next forward pass, so that they may read and write weights as with DDP.
            False, if they do not touch weights: communication stays hidden under the next forward pass.
        window: Steps over which the squared gradient norm is smoothed (Section III-A).
        smoothing: Smoothing factor of the moving average, in (0, 1]. The paper uses number of ranks / 100, 0.16 for its
            16 ranks; then the meaning of ``delta`` depends on the number of ranks.
        outer_lr: With ``aggregation="parameters"``: learning rate of the outer step from the weights of the last
            synchronized step to the average of the replicas. 1: to the average, as in the paper.
        outer_momentum: With ``aggregation="parameters"``: Nesterov momentum of the outer steps, in [0, 1), as in DiLoCo
            and SlowMo. ``auto``: 0.3 with ``delta="auto"`` and an optimizer with ``betas`` such as Adam, whose steps
            are shorter because of the noise of a rank's batch; otherwise, and with ``average="server"``, 0.
        partition: Order of the training data (Section III-D): ``seldp`` rotates the chunks; ``defdp`` is the
            framework's order.
        full_pass: With ``seldp``: whether an epoch covers all chunks, instead of one chunk, 1 / ranks of the data.
        injection: Data injection for non-IID data: (alpha, beta) of Section III-E. At each step a share alpha of the
            ranks sends a share beta of its batch to all ranks. Eq. 3 reduces the batch size, so that the cumulative one
            stays.
        compression: Codec of a synchronized step: none, bf16, fp16, truncate16, fp8, int8, int4, int2, topk,
            chunked_topk. With parameter aggregation it encodes the difference to the parameters of the last
            synchronized step.
        error_feedback: Whether the error of a lossy codec, or of ``low_rank``, is added to the next values.
        low_rank: Rank r of the factors P and Q, with P Q^T near the gradient, that are averaged in place of the
            gradients of weights with two dimensions or more, where both together have fewer values. None: gradients are
            averaged as they are.
        low_rank_method: With ``low_rank``: ``acp_sgd`` averages one factor in a step, P and Q in turns, in one
            all-reduce; ``power_sgd`` averages both, Q once P is known: about twice the bytes and the latency, and a
            better approximation. Both need ``aggregation="gradients"``.
        topology: ``flat``: every rank exchanges with every other. ``torus2d``: along rows of neighbors, then across the
            rows, for hosts with several accelerators, or in racks; the codec is used across rows only. ``tree``: reduce
            and broadcast on a double binary tree over Gloo, for many ranks, or small buckets; the codec is used in the
            broadcast only. ``auto``: with a lossy codec, where each of several hosts has the same number of neighboring
            ranks, two or more, a torus with a row for each host; otherwise flat.
        torus_columns: Ranks in a row of the torus, such as those of a host or a rack. None: as square as possible; with
            a strategy, the ranks of a host, if there are several.
        bucket_mb: Maximum bucket size in MiB. A bucket is exchanged in one collective, and awaited as a whole.
        timeout_s: Seconds after which a rank that does not answer counts as lost.
        check_messages: Whether Gloo's messages have checksums, so that one which was damaged on its way ends the
            training, with an error that names the rank which has sent it. With ``lighthouse`` the round is repeated,
            with a warning that names the replica.
        checkpoint_replicas: Whether a checkpoint holds each rank's weights and optimizer state besides the average.
            Without them it is smaller by a factor of the number of ranks, and a resumed run starts from the average.
        accelerator: as in DDPStrategy.
        parallel_devices: as in DDPStrategy.
        cluster_environment: as in DDPStrategy.
        checkpoint_io: as in DDPStrategy.
        precision_plugin: as in DDPStrategy.
        process_group_backend: as in DDPStrategy; with ``"gloo"``, CUDA tensors are sent through host memory.
        start_method: as in DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        ranks_per_replica: Number of neighboring ranks that hold a replica of a sharded model together, such as those of
            a host. With more than one, the strategy makes a device mesh ("replicas", "data_parallel",
            "tensor_parallel"), by which the model is to be sharded, and synchronizes along "replicas".
        tensor_parallel_size: Number of neighboring ranks of a replica that get the same batches: the size of
            "tensor_parallel" in the mesh. It must divide ``ranks_per_replica``; the quotient is the size of
            "data_parallel".

    Raises:
        ValueError: a setting is unknown or out of its range.
    """

    name = "selsync"

    @passes_to(SyncStrategyMixin)
    def __init__(
        self,
        delta: float | Literal["auto"] = "auto",
        lssr: float = 0.8,
        aggregation: Literal["parameters", "gradients"] = "parameters",
        average: Literal["all_reduce", "server"] = "all_reduce",
        overlap: Literal["forward", "none"] = "none",
        wait_for_hooks: bool = True,
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
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ranks_per_replica: int = 1,
        tensor_parallel_size: int = 1,
    ) -> None: ...
