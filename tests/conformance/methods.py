"""What each registered method declares for the conformance suite: the one place that a new method is added to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_pipesync import DeAR, EAPipe, LocalSGD, ParameterServer, PipeSGD, SelSync, register_method
from tests.conformance.example_method import Averaging

register_method(Averaging)

FRAMEWORKS = ("plain", "lightning", "fabric", "accelerate")


@dataclass(frozen=True)
class Method:
    """A method, as the suite trains with it.

    Args:
        name: under which it is registered.
        plain: what a plain loop constructs, with model, optimizers and settings.
        exact: settings in which it trains what DDP does; a pipeline: what its virtual stages do in one process.
        typical: settings that users choose, which may be inexact; each is saved and resumed.
        wrong: a setting, and a value that it cannot have.
        frameworks: those that have it.
        exact_in_trainer: settings with which a Trainer's batches are DDP's, in addition to ``exact``.
        own_norm: whether clipping returns the norm of this rank's gradient, as none has the mean.
        sharded_norm: whether the gradient's norm is a sum over shards: clipping by it is DDP's but for rounding.
        sharded: the indices of the typical settings that replicas of several ranks have; none if it refuses them.
        whole_tensors: whether an optimizer gets whole tensors to update, as Muon needs them.
        pipeline: whether it makes the forward and backward passes itself; all ranks then get the same batches.
    """

    name: str
    plain: Callable[..., Any]
    exact: dict[str, Any]
    typical: tuple[dict[str, Any], ...]
    wrong: tuple[str, Any]
    frameworks: tuple[str, ...] = FRAMEWORKS
    exact_in_trainer: dict[str, Any] = field(default_factory=dict)
    own_norm: bool = False
    sharded_norm: bool = False
    sharded: tuple[int, ...] = ()
    whole_tensors: bool = True
    pipeline: bool = False


METHODS = {
    method.name: method
    for method in (
        Method(
            "dear",
            DeAR,
            exact={"bucket_mb": 1e-4},
            typical=(
                {"fusion": "buffer", "bucket_mb": 1e-4, "compression": "int8"},
                {"update": "sharded"},
                {"fusion": "buffer", "bucket_mb": 1e-4, "low_rank": 1},
            ),
            wrong=("update", "halved"),
            sharded_norm=True,
            sharded=(0,),
        ),
        Method(
            "selsync",
            SelSync,
            exact={"delta": 0.0, "aggregation": "gradients"},
            exact_in_trainer={"partition": "defdp"},
            typical=(
                {"delta": 0.2, "smoothing": 0.5, "aggregation": "gradients", "compression": "int8"},
                {"delta": "auto", "outer_lr": 0.7, "outer_momentum": 0.3, "overlap": "forward", "bucket_mb": 1e-4},
                {"delta": 0.2, "smoothing": 0.5, "aggregation": "gradients", "low_rank": 1},
            ),
            wrong=("delta", -0.1),
            sharded=(1, 0),
        ),
        Method(
            "local_sgd",
            LocalSGD,
            exact={"warmup_steps": 1000},
            typical=(
                {"period": 2, "participation": 0.5, "average_optimizer_states": True},
                {"period": 3, "overlap_steps": 2, "outer_optimizer": "nesterov", "compression": "int8"},
                {"period": "selsync", "lssr": 0.5, "fragments": 2, "overlap_steps": 1},
                {"period": 1, "neighbors": "ring", "overlap_steps": 1},
            ),
            wrong=("period", 0),
            sharded=(0, 1, 2, 3),
        ),
        Method(
            "pipe_sgd",
            PipeSGD,
            exact={"staleness": 0},
            typical=(
                {},
                {"staleness": 2, "compression": "int8", "topology": "tree"},
                {"low_rank": 1, "low_rank_method": "power_sgd"},
            ),
            wrong=("staleness", -1),
            sharded=(0, 1),
        ),
        Method(
            "parameter_server",
            ParameterServer,
            exact={"policy": "sync"},
            typical=({"policy": "sync", "compression": "int8"}, {"policy": "k_async", "servers": 1}),
            wrong=("policy", "async_sync"),
            whole_tensors=False,  # but with servers=1
            own_norm=True,
            sharded_norm=True,
        ),
        Method("averaging", Averaging, exact={}, typical=({"bucket_mb": 1e-4},), wrong=("bucket_mb", 0), sharded=(0,)),
        Method(
            "ea_pipe",
            EAPipe,
            exact={"split": (2,), "elastic_force": 0.3},
            typical=({"split": (2,)}, {"split": (2,), "algorithm": "pipedream"}),
            wrong=("elastic_force", 1.5),
            frameworks=("plain", "lightning", "accelerate"),
            pipeline=True,
        ),
    )
}
