"""The settings of SGD with parameter servers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from torch.optim import SGD, Optimizer

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.wire import pickled
from lightning_pipesync.core.dtensors import ELEMENTWISE
from lightning_pipesync.methods.hyperparameters import current
from lightning_pipesync.methods.servers.policies import Policy, policies
from lightning_pipesync.methods.setting_types import Compression, OptimizerClasses, Seconds
from lightning_pipesync.methods.settings import Not, Settings

PolicyName = Literal[
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
]
StalenessLR = Literal["none", "mean", "gradient", "distance"]
DelayCompensation = Literal["none", "momentum", "dc_asgd"]
OnLostRank = Literal["auto", "raise", "continue"]

#: The policies that use a setting, if not all do.
_POLICIES_WITH = {
    "k": ("k_sync", "k_batch_sync", "k_async", "k_batch_async", "diloco"),
    "n": ("n_softsync",),
    "staleness_bound": ("ssp",),
    "n_push": ("downpour",),
    "n_fetch": ("downpour",),
    "period": ("easgd", "diloco"),
    "elastic_force": ("easgd",),
    "overlap_steps": ("diloco",),
    "grace_s": ("diloco",),
    "outer_lr": ("diloco",),
    "outer_momentum": ("diloco",),
}

#: Those in which no gradient is stale.
_FRESH = ("sync", "k_sync", "k_batch_sync")

#: The policies in which no learner waits for one that is slow or lost.
_ASYNCHRONOUS = ("k_async", "k_batch_async", "async", "n_softsync", "downpour", "easgd", "diloco")


@dataclass(frozen=True)
class Roles:
    """What the ranks of a job do."""

    num_servers: int  # the first ranks
    learners: range
    policy: Policy
    force: float  # alpha of EASGD
    survives_loss: bool  # of a rank that does not serve weights
    coordinators: range  # who decides in which order gradients are used: rank 0, or each server for its shard


@dataclass(frozen=True)
class ParameterServerConfig(Settings):
    """Settings of SGD with parameter servers (lecture "Distributed Deep Learning", SGD variants).

    Raises:
        ValueError: a setting is out of its range, or has no effect with the others; the message names it and its
            value.
    """

    acts_with = MappingProxyType(
        {
            **{name: {"policy": those} for name, those in _POLICIES_WITH.items()},
            "grace_s": {"policy": _POLICIES_WITH["grace_s"], "k": Not((None,))},
            "independent_shards": {"policy": ("async", "downpour"), "servers": Not((1,))},
            "staleness_lr": {"policy": Not((*_FRESH, "easgd"))},
            "distance_bound": {"staleness_lr": ("distance",)},
            "delay_compensation": {"policy": Not(_FRESH)},
            "dc_lambda": {"delay_compensation": ("dc_asgd",)},
        }
    )

    policy: PolicyName = "k_batch_async"
    """When the servers update the weights. ``sync``: when all learners have pushed a gradient. ``k_sync``: when ``k``
    learners have; the others' passes are cancelled. ``k_batch_sync``: after ``k`` gradients, whoever pushed them; the
    passes under way are cancelled. ``k_async`` and ``k_batch_async``: the same, and no pass is cancelled. ``async``:
    after each gradient. ``n_softsync``: after every ranks / ``n`` gradients. ``ssp``: after each gradient, and no
    learner is more than ``staleness_bound`` gradients ahead of the slowest one. ``downpour``: learners take local steps
    of plain SGD, push the sum of their gradients every ``n_push`` steps, each of which is an update, and fetch weights
    every ``n_fetch`` steps, both under computation. ``easgd``: each learner trains a replica with its own optimizer,
    and every ``period`` steps the replica and the servers' weights attract each other. ``diloco``: each learner trains
    with its own optimizer, and pushes every ``period`` steps how far they have moved the weights that it had fetched;
    when ``k`` learners have, and ``grace_s`` seconds later, an outer optimizer moves the servers' weights by the mean
    of that, in which each learner counts by its steps."""

    k: int | None = None
    """K of ``k_sync``, ``k_batch_sync``, ``k_async`` and ``k_batch_async``: the gradients of an update; the quorum of
    ``diloco``. None: as many as there are learners."""

    n: int = 1
    """n of ``n_softsync``, about the mean staleness: 1 is similar to ``sync``, the number of learners is ``async``."""

    staleness_bound: int = 3
    """s of ``ssp``: maximum number of gradients that a learner may be ahead of the slowest one."""

    n_push: int = 1
    """Steps of ``downpour`` from one push to the next."""

    n_fetch: int = 1
    """Steps of ``downpour`` from one fetch to the next."""

    period: int = 10
    """tau of ``easgd``, H of ``diloco``: steps of a learner from one exchange with the servers to the next."""

    elastic_force: Literal["auto"] | float = "auto"
    """alpha of ``easgd``, in (0, 1): the share of their distance by which a replica and the servers' weights move.
    ``auto``: 0.9 / number of learners."""

    overlap_steps: int = 0
    """Steps of ``diloco`` under which the servers' new weights are on their way, at most ``period``; what a learner has
    moved meanwhile is added to them. 0: it waits for them."""

    grace_s: float = 0.0
    """Seconds for which an update of ``diloco`` waits for further learners once ``k`` have pushed."""

    outer_lr: float = 0.7
    """Learning rate of the outer optimizer of ``diloco``, which is SGD with Nesterov momentum."""

    outer_momentum: float = 0.9
    """Momentum of the outer optimizer of ``diloco``, in [0, 1). With a ``k`` well below the number of learners set
    less: each of them is moved on by the momentum of the others."""

    servers: int | None = None
    """Number of servers: the first ranks, each with a share of the weights; they also train. None: all ranks."""

    independent_shards: bool = False
    """Whether each server of ``async`` and ``downpour`` applies gradients in the order in which they reach it, and
    answers at once, without a word with the other servers. The shards of the weights that a learner fetches may then
    have had different updates (Dean et al., NIPS 2012, Section 4.1)."""

    dedicated_servers: bool = False
    """Whether the servers only serve, as in the papers, and the other ranks train. In plain loops."""

    staleness_lr: StalenessLR = "none"
    """How the learning rate depends on the staleness of gradients, the number of updates since the weights at which
    they were computed. ``mean``: it is divided by the mean staleness so far, where that is above 1. ``gradient``: each
    gradient counts by 1 / staleness. ``distance``: each counts by ``distance_bound`` over the squared distance of the
    weights from those at which it was computed, 1 at most (Dutta et al., AISTATS 2018, Eq. 13); the servers keep the
    weights of each learner for that."""

    distance_bound: float = 0.005
    """C / eta_max of ``staleness_lr="distance"``: the squared distance above which the learning rate falls."""

    delay_compensation: DelayCompensation = "none"
    """How stale gradients are compensated. ``momentum``: learners get weights predicted by momentum alone, as many
    updates ahead as gradients have been stale on average (SpecTrain). ``dc_asgd``: the servers add to each
    gradient the Taylor expansion for the distance that the weights have moved since; they keep the weights of each
    learner for that."""

    dc_lambda: float = 0.04
    """lambda of ``delay_compensation="dc_asgd"``: how much of the gradient's outer product stands for the Hessian."""

    elementwise: OptimizerClasses = ()
    """Classes of further element-wise optimizers, which can be divided among several servers."""

    compression: Compression = "none"
    """Codec of the gradients: none, bf16, fp16, truncate16, fp8, int8, int4, int2, topk, chunked_topk."""

    error_feedback: bool = True
    """Whether the error of a lossy codec is added to the next values that it encodes."""

    keep_log: bool = False
    """Whether rank 0 keeps the log of all updates, from which the run can be replayed."""

    partition: Literal["defdp", "work_queue"] = "defdp"
    """Which rank trains on which data: ``defdp`` is the framework's order, with the same number of batches for all.
    ``work_queue``: each rank asks for its next batch, so that an epoch is the whole data set, whoever trains on which
    part of it. Except in a Trainer, with ``prepare_train_loader``."""

    on_lost_rank: OnLostRank = "auto"
    """What the others do when a rank is lost. ``raise``: they raise an error that names it. ``continue``: they train
    without it, unless it serves weights; in plain loops, where not all ranks serve. ``auto``: they continue where they
    can, if the policy is asynchronous: not with ``sync``, ``k_sync``, ``k_batch_sync`` and ``ssp``."""

    timeout_s: Seconds = 1800.0

    def __post_init__(self) -> None:
        super().__post_init__()
        codec = get_codec(self.compression)
        self._check_least(k=1, n=1, staleness_bound=0, n_push=1, n_fetch=1, period=1, overlap_steps=0, servers=1)
        self._check("distance_bound", 0 < self.distance_bound < math.inf, "a positive number")
        self._check("elastic_force", self.elastic_force == "auto" or 0 < self.elastic_force < 1, "'auto' or in (0, 1)")
        if self.policy == "diloco":
            most = f"at most period={self.period}, where a learner pushes again"
            self._check("overlap_steps", self.overlap_steps <= self.period, most)
        self._check("grace_s", 0 <= self.grace_s < math.inf, "at least 0 seconds")
        self._check("outer_lr", 0 < self.outer_lr < math.inf, "a positive number")
        self._check("outer_momentum", 0 <= self.outer_momentum < 1, "in [0, 1)")
        self._check("dc_lambda", 0 <= self.dc_lambda < math.inf, "at least 0")
        if self.dedicated_servers and self.servers is None:
            raise ValueError("dedicated_servers=True leaves no rank to train if all serve: set servers=1, or more.")
        moves = self.policy in ("downpour", "easgd", "diloco")
        of_one_version = f"is for weights of one version, and with independent_shards={self.independent_shards} shards"
        apart = f"{of_one_version} have versions of their own"
        learners = f"and with policy={self.policy!r} learners"
        at_servers = f"is for gradients at weights of the servers, {learners} compute them at their own"
        pushed = f"is for gradients, {learners} push weights"
        for name, is_refused, why in (
            ("delay_compensation", moves and self.delay_compensation != "none", at_servers),
            ("delay_compensation", self.independent_shards and self.delay_compensation == "momentum", apart),
            ("staleness_lr", moves and self.staleness_lr == "distance", at_servers),
            ("staleness_lr", self.independent_shards and self.staleness_lr == "distance", apart),
            ("compression", self.policy == "easgd" and not codec.lossless, pushed),
        ):
            if is_refused:
                raise ValueError(f"{name}={getattr(self, name)!r} {why}: set {name}='none'.")
        if self.policy == "diloco" and codec.gathered and self.outer_momentum:
            raise ValueError(
                f"outer_momentum={self.outer_momentum!r} is another momentum beside the residuals of "
                f"compression={str(self.compression)!r}: set outer_momentum=0.0, or compression='int4'."
            )

    def for_framework(self) -> ParameterServerConfig:
        for name, is_refused, why, instead in (
            ("on_lost_rank", self.on_lost_rank == "continue", "communicate by themselves, among all ranks", "raise"),
            ("dedicated_servers", self.dedicated_servers, "count on a batch on each rank", False),
        ):
            if is_refused:
                setting = f"{name}={getattr(self, name)!r}"
                raise ValueError(
                    f"{setting} is for plain loops: a Trainer, Fabric and Accelerate {why}. Use "
                    f"ParameterServer(model, optimizer, {setting}) in a loop, or set {name}={instead!r}."
                )
        return replace(self, on_lost_rank="raise")

    def roles(self, world_size: int) -> Roles:
        """Returns what the ranks do; raises a ValueError that names a setting that is for other numbers of ranks."""
        servers = world_size if self.servers is None else self.servers
        if servers > world_size:
            raise ValueError(f"servers={servers!r} is more than the {world_size} ranks.")
        if self.dedicated_servers and servers == world_size:
            raise ValueError(
                f"servers={servers!r} with dedicated_servers=True leaves none of the {world_size} ranks to train: "
                "start more ranks, or set dedicated_servers=False."
            )
        if self.on_lost_rank == "continue" and servers == world_size:
            raise ValueError(
                f"on_lost_rank='continue' is for ranks that serve no weights, and with servers={self.servers!r} all of "
                f"the {world_size} ranks serve: set servers=1, so that rank 0 serves all, or on_lost_rank='raise'."
            )
        learners = range(servers if self.dedicated_servers else 0, world_size)
        force = 0.9 / len(learners) if self.elastic_force == "auto" else float(self.elastic_force)
        continues = self.on_lost_rank == "continue" or (self.on_lost_rank == "auto" and self.policy in _ASYNCHRONOUS)
        survives, coordinators = continues and servers < world_size, range(servers if self.independent_shards else 1)
        return Roles(servers, learners, self.policy_for(len(learners)), force, survives, coordinators)

    def policy_for(self, learners: int) -> Policy:
        """Returns the policy with a number of learners; raises a ValueError if ``k`` or ``n`` is more than that."""
        for name in ("k", "n"):
            value = getattr(self, name)
            if self.policy in _POLICIES_WITH[name] and value is not None and value > learners:
                raise ValueError(f"{name}={value!r} of policy={self.policy!r} is more than the {learners} learners.")
        k = learners if self.k is None else self.k
        return policies(learners, k, self.n, self.staleness_bound, self.grace_s > 0)[self.policy]

    def outer_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns the outer optimizer of ``diloco``, with the parameter groups of a learner's optimizer."""
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        return SGD(groups, self.outer_lr, self.outer_momentum, nesterov=self.outer_momentum > 0)

    def check_optimizer(self, optimizer: Optimizer, num_servers: int) -> None:
        """Raises a ValueError if an optimizer cannot run on the servers.

        Several servers need one that is known to be element-wise, and hyper-parameters are sent with each gradient.
        """
        if num_servers > 1 and not self.is_elementwise(optimizer):
            names = ", ".join(cls.__name__ for cls in ELEMENTWISE)
            raise ValueError(
                f"servers={self.servers!r} divides tensors among {num_servers} servers, and {type(optimizer).__name__} "
                f"is not known to be element-wise, as {names} are: set servers=1, or name its class in elementwise= "
                "if it is."
            )
        for index, group in enumerate(current(optimizer)):
            for name, value in group.items():
                try:
                    pickled(value)
                except TypeError as error:
                    raise ValueError(
                        f"{name} of group {index} of {type(optimizer).__name__} is {value!r}, and cannot be sent to "
                        f"the servers: {error} Use another method, or a number, a string or a tensor in its place."
                    ) from None

    def is_elementwise(self, optimizer: Optimizer) -> bool:
        return type(optimizer) in (*ELEMENTWISE, *self.elementwise)

    @property
    def lost_with_other_ranks(self) -> str | None:
        return {
            "easgd": "all replicas begin from the servers' weights",
            "diloco": "the learners' optimizers, and the outer one, begin anew",
        }.get(self.policy)

    @property
    def needs_as_many_ranks(self) -> bool:
        """Whether a run resumes only with as many ranks as before: residuals differ between ranks."""
        return self.uses_error_feedback
