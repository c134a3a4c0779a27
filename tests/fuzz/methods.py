"""The methods: which settings are drawn, what they refuse, and what a training with them is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

from lightning_pipesync import DeAR, LocalSGD, ParameterServer, PipeSGD, SelSync
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.methods.sync_method import SyncMethod
from tests.fuzz.optimizers import OPTIMIZERS
from tests.fuzz.rules import Delayed, Periodic, Replica, Rule, SelectivelySynchronized

if TYPE_CHECKING:
    from tests.fuzz.configuration import Configuration

Settings = dict[str, Any]


class Check(Enum):
    """What a training is compared with, beside the other ranks; from much to little."""

    REFERENCE = "equal to the reference"
    REPETITION = "equal to its repetition"
    AGREEMENT = "equal on all ranks"


@dataclass(frozen=True)
class Entry:
    """A method in the fuzzer.

    Attributes:
        draw: draws the settings.
        check: what a training with these settings is compared with.
        rounds: whether its sums are made in another order than the reference's.
        refused: words of the error by which the settings refuse the rest; empty: they do not.
        refused_of_shards: words of the error by which the settings refuse replicas of several ranks.
        may_refuse: words of an error that depends on when something happens; empty: there is none.
        rule: what the reference does in the method's place.
        own_states: whether each rank has an optimizer state of its own.
    """

    type: Callable[..., SyncMethod]
    draw: Callable[[Random], Settings]
    check: Callable[[Settings], Check]
    rounds: Callable[[Configuration, Settings], bool]
    refused: Callable[[Configuration, Settings], str]
    rule: Callable[[list[Replica], Settings], Rule]
    own_states: bool = False
    refused_of_shards: Callable[[Settings], str] = lambda settings: ""
    may_refuse: Callable[[Configuration, Settings], str] = lambda configuration, settings: ""


#: Seconds after which a rank that waits has failed.
TIMEOUT_S = 30.0

_LOSSY = ["bf16", "fp16", "truncate16", "fp8", "int8", "int4", "int2", "topk", "chunked_topk"]


def _codec(random: Random) -> str:
    return "none" if random.random() < 0.85 else random.choice(_LOSSY)


def _with_topology(settings: Settings) -> Settings:
    """Adds a topology, drawn from the settings themselves, so that a seed's other draws stay what they are."""
    if settings.get("update") == "sharded" or "neighbors" in settings:  # which a tree refuses
        return settings
    return {**settings, "topology": Random(str(settings)).choice(["flat", "flat", "tree"])}


def _with_low_rank(settings: Settings) -> Settings:
    """Adds factors in place of gradients, drawn from the settings themselves."""
    random = Random(f"low rank {settings}")
    refused = settings["compression"] != "none" or settings.get("update") == "sharded"
    if refused or settings.get("aggregation") == "parameters" or random.random() < 0.8:
        return settings
    factors = {"low_rank": random.choice([1, 2]), "low_rank_method": random.choice(["acp_sgd", "power_sgd"])}
    return {**settings, **factors, "error_feedback": random.random() < 0.8}


def _lossless(settings: Settings) -> Check:
    lossy = settings["compression"] != "none" or "low_rank" in settings
    return Check.REPETITION if lossy else Check.REFERENCE


def _factors(settings: Settings) -> str:
    """Returns a word of the errors that refuse factors, if there are any."""
    return "low_rank=" if "low_rank" in settings else ""


def _cuts(configuration: Configuration, settings: Settings) -> bool:
    """Returns whether a rank may update a part of a tensor only, the last values of which kernels round otherwise."""
    shards = settings.get("update", "replicated") != "replicated" or settings.get("servers", 1) is None
    return shards and (bool(configuration.options.get("fused")) or "bfloat16" in configuration.layers)


NOT_ELEMENTWISE = "is not known to be element-wise"


def _no_sharding(configuration: Configuration) -> str:
    return "" if OPTIMIZERS[configuration.optimizer].elementwise else NOT_ELEMENTWISE


# --- DeAR -------------------------------------------------------------------------------------------------------------
def _draw_dear(random: Random) -> Settings:
    settings: Settings = {
        "update": random.choice([None, "sharded", "replicated"]),
        "overlap": random.choice(["eager", "forward", "none"]),
        "fusion": random.choice(["auto", "bo", "random", "grid", "buffer", "layers", "none"]),
        "bucket_mb": random.choice([1e-4, 1e-3, 25.0]),
        "search_mb": (1e-4, 1e-2),
        "trial_steps": 4,
        "num_layers": random.choice([1, 2]),
        "compression": _codec(random),
        "error_feedback": random.random() < 0.8,
    }
    if settings["fusion"] == "auto" and random.random() < 0.5:  # a simulation chooses
        del settings["bucket_mb"]
    if settings["compression"] != "none":  # a codec's errors depend on the buckets, and those of a search on time
        settings["fusion"] = "buffer"
    return _with_low_rank(_with_topology(settings))


def _dear_refuses(configuration: Configuration, settings: Settings) -> str:
    # With several optimizers nothing is sent before a step of one.
    sends_twice = configuration.accumulate > 1 and not configuration.no_sync and not configuration.several_optimizers
    if "low_rank" in settings:
        return "low_rank=" if sends_twice else ""
    if sends_twice and settings["error_feedback"] and get_codec(settings["compression"]).sparse:
        return "a further backward pass changes it"
    return _no_sharding(configuration) if settings["update"] == "sharded" else ""


def _dear_may_refuse(configuration: Configuration, settings: Settings) -> str:
    """Gradients may have been factorized, or encoded, when a step is skipped."""
    encoded = settings["error_feedback"] and get_codec(settings["compression"]).sparse
    return "a further backward pass changes it" if encoded else _factors(settings)


def _dear_rounds(configuration: Configuration, settings: Settings) -> bool:
    twice_reduced = configuration.accumulate > 1 and not configuration.no_sync
    return twice_reduced or configuration.clip == "norm" or _cuts(configuration, settings)


# --- Pipe-SGD ---------------------------------------------------------------------------------------------------------
def _draw_pipe_sgd(random: Random) -> Settings:
    settings: Settings = {
        "staleness": random.choice([0, 1, 1, 2]),
        "compression": _codec(random),
        "error_feedback": random.random() < 0.8,
        "pipeline_level": random.choice([1, 1, 2]),
        "segments": random.choice([1, 3]),
        "warmup_steps": random.choice([0, 0, 2]),
        "delay_compensation": random.choice(["none", "none", "prediction", "momentum", "distance"]),
    }
    if settings["pipeline_level"] == 1:
        settings["bucket_mb"] = random.choice([None, 1e-4, 1e-3])
    if settings["staleness"] == 0:
        settings["delay_compensation"] = "none"
    return _with_low_rank(_with_topology(settings))


def _check_pipe_sgd(settings: Settings) -> Check:
    if settings["staleness"] and settings["delay_compensation"] != "none":
        return Check.REPETITION
    return _lossless(settings)


def _pipe_sgd_refuses(configuration: Configuration, settings: Settings) -> str:
    if settings["pipeline_level"] == 1:
        return ""
    if configuration.several_optimizers:
        return "pipeline_level=2"
    return "no_sync" if configuration.accumulate > 1 and not configuration.no_sync else ""


def _pipe_sgd_may_refuse(configuration: Configuration, settings: Settings) -> str:
    """Segments may have been sent when a step is skipped."""
    return "pipeline_level=2" if settings["pipeline_level"] == 2 else ""


# --- SelSync ----------------------------------------------------------------------------------------------------------
def _draw_selsync(random: Random) -> Settings:
    settings: Settings = {
        "delta": random.choice([0.0, 0.05, 0.3, inf, "auto"]),
        "lssr": random.choice([0.5, 0.8]),
        "aggregation": random.choice(["parameters", "gradients"]),
        "overlap": random.choice(["none", "forward"]),
        "window": random.choice([3, 25]),
        "smoothing": random.choice([0.16, 0.5]),
        "outer_momentum": random.choice([0.0, 0.0, 0.3]),
        "lr_scale": random.choice([1.0, 1.0, "auto"]),
        "follow_lr": random.choice([False, False, True]),
        "compression": _codec(random),
        "error_feedback": random.random() < 0.8,
        "bucket_mb": random.choice([1e-4, 25.0]),
        "partition": "defdp",
    }
    return _with_low_rank(_with_topology(settings))


def _check_selsync(settings: Settings) -> Check:
    by_gradient = settings["delta"] == "auto" and (settings["follow_lr"] or settings["lr_scale"] == "auto")
    if by_gradient or (settings["aggregation"] == "parameters" and settings["outer_momentum"] != 0):
        return Check.REPETITION
    return _lossless(settings)


# --- local SGD --------------------------------------------------------------------------------------------------------
def _draw_local_sgd(random: Random) -> Settings:
    settings: Settings = {
        "period": random.choice([1, 2, 3, 4]),
        "warmup_steps": random.choice([0, 0, 2]),
        "lr_scale": 1.0,
        "follow_lr": False,
        "compression": _codec(random),
        "error_feedback": random.random() < 0.8,
        "bucket_mb": random.choice([1e-4, 25.0]),
    }
    if random.random() < 0.4:
        settings |= random.choice(
            [
                {"outer_optimizer": "nesterov"},
                {"outer_optimizer": "adam"},
                {"outer_optimizer": "elastic"},
                {"participation": 0.5},
                {"fragments": 2, "period": 4},
                {"overlap_steps": 1, "period": 2},
                {"overlap_steps": 2, "period": 4, "fragments": 2, "mixing_factor": 0.5},
                {"period": "selsync"},
                {"lr_scale": "auto"},
                {"follow_lr": True},
                {"average_optimizer_states": True},
                {"neighbors": "ring", "overlap_steps": 1},
                {"neighbors": "random_pairs", "period": 2, "fragments": 2},
            ]
        )
    if settings.keys() & {"participation", "neighbors"}:
        settings["compression"] = "none"
    if settings["compression"] == "chunked_topk" and "outer_optimizer" in settings:
        settings["compression"] = "topk"
    return _with_topology(settings)


_OF_PERIODIC = {
    *("period", "warmup_steps", "lr_scale", "follow_lr", "compression", "error_feedback", "bucket_mb", "topology")
}


def _check_local_sgd(settings: Settings) -> Check:
    changed = settings["lr_scale"] != 1.0 or settings["follow_lr"] or settings["period"] == "selsync"
    if settings.keys() - _OF_PERIODIC or changed:
        return Check.REPETITION
    return _lossless(settings)


# --- parameter servers ------------------------------------------------------------------------------------------------
def _draw_parameter_server(random: Random) -> Settings:
    settings: Settings = {
        "policy": "sync",
        "servers": random.choice([None, 1, 1]),
        "compression": _codec(random),
        "error_feedback": random.random() < 0.8,
    }
    if random.random() < 0.3:
        settings["policy"] = random.choice(
            ["k_sync", "k_async", "k_batch_async", "async", "n_softsync", "ssp", "downpour"]
        )
        settings["staleness_lr"] = random.choice(["none", "mean", "gradient"])
        settings["independent_shards"] = settings["policy"] in ("async", "downpour") and random.random() < 0.5
    return settings


def _parameter_server_refuses(configuration: Configuration, settings: Settings) -> str:
    if settings["policy"] == "downpour" and configuration.several_optimizers:
        return "policy='downpour'"
    return _no_sharding(configuration) if settings["servers"] != 1 else ""


def _check_parameter_server(settings: Settings) -> Check:
    return _lossless(settings) if settings["policy"] == "sync" else Check.AGREEMENT


METHODS: dict[str, Entry] = {
    "dear": Entry(
        DeAR,
        _draw_dear,
        _lossless,
        _dear_rounds,
        _dear_refuses,
        Rule,
        refused_of_shards=lambda settings: (
            "update='sharded'" if settings["update"] == "sharded" else _factors(settings)
        ),
        may_refuse=_dear_may_refuse,
    ),
    "pipe_sgd": Entry(
        PipeSGD,
        _draw_pipe_sgd,
        _check_pipe_sgd,
        lambda configuration, settings: configuration.clip == "norm",
        _pipe_sgd_refuses,
        Delayed,
        may_refuse=_pipe_sgd_may_refuse,
        refused_of_shards=_factors,
    ),
    "selsync": Entry(
        SelSync,
        _draw_selsync,
        _check_selsync,
        lambda configuration, settings: False,
        lambda configuration, settings: "",
        SelectivelySynchronized,
        own_states=True,
        refused_of_shards=_factors,
    ),
    "local_sgd": Entry(
        LocalSGD,
        _draw_local_sgd,
        _check_local_sgd,
        lambda configuration, settings: (
            settings["warmup_steps"] > 0 and (configuration.clip == "norm" or configuration.accumulate > 1)
        ),
        lambda configuration, settings: "",
        Periodic,
        own_states=True,
        may_refuse=lambda configuration, settings: "fragments=" if "fragments" in settings else "",
    ),
    "parameter_server": Entry(
        ParameterServer,
        _draw_parameter_server,
        _check_parameter_server,
        lambda configuration, settings: configuration.clip == "norm" or _cuts(configuration, settings),
        _parameter_server_refuses,
        Rule,
        refused_of_shards=lambda settings: "A parameter server answers each rank by itself",
        # A habit that writes to weights, with a policy whose learners have weights of different ages.
        may_refuse=lambda configuration, settings: "was written to, and with policy=" * (settings["policy"] != "sync"),
    ),
}

#: Those that train replicas of several ranks.
METHODS_OF_SHARDS = [method for method in METHODS if method != "parameter_server"]
