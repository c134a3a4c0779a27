"""A setting that has no effect with the others is refused by name; a method in one process says so."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from itertools import chain
from typing import Any, get_args, get_type_hints

import pytest
from torch import nn
from torch.optim import SGD

from lightning_pipesync import EAPipe
from lightning_pipesync.methods.ea_pipe import EAPipeConfig
from lightning_pipesync.methods.setting_types import parts
from lightning_pipesync.methods.settings import Not, Settings
from lightning_pipesync.training.registry import make_config
from lightning_pipesync.training.strategies import docs_of
from tests.support.harness import on_ranks
from tests.support.models import seeded_mlp
from tests.support.own_methods import OWN

#: By method the settings that have an effect whatever the others are.
ALWAYS = {
    "dear": "update overlap fusion compression low_rank topology timeout_s",
    "pipe_sgd": "staleness pipeline_level compression low_rank topology timeout_s",
    "selsync": "delta smoothing partition injection topology bucket_mb timeout_s checkpoint_replicas",
    "local_sgd": """period participation neighbors ranks_per_replica lr_scale warmup_steps outer_optimizer fragments
        overlap_steps average_optimizer_states compression topology partition injection bucket_mb timeout_s lighthouse
        checkpoint_replicas""",
    "parameter_server": "policy servers dedicated_servers compression keep_log partition on_lost_rank timeout_s",
    "ea_pipe": "algorithm split num_pipelines compression clip_norm seed timeout_s module",
}
#: Settings that are accepted where they change nothing, and why.
ACCEPTED = {
    "error_feedback": "False: errors are added nowhere, which is so if there are none",
    "follow_lr": "False: nothing follows the learning rate, which is so if nothing can",
    "checkpoint_own_gradients": "False: checkpoints are without a rank's own gradients, which is so if it keeps none",
    "elementwise": "is a statement about a class, which is true with any other setting",
    "delay_compensation": "of pipe_sgd: 'none' is what staleness=0 has; other values are refused, see below",
    "lr_scale": "of selsync: 1 is what averaged gradients, and independent replicas have; other values are refused",
}

#: By setting a value that is not its default, and has an effect with some others.
CHANGED: dict[str, Any] = {
    **{"aggregation": "gradients", "average_force": 0.2, "average_period": 2, "bucket_mb": 1.0, "dc_lambda": 0.1},
    **{"delta": 0.3, "distance_bound": 0.1, "distance_constant": 2.0, "drain": True, "edge_mb": 1.0, "full_pass": True},
    **{"elastic_force": 0.3, "grace_s": 1.0, "independent_shards": True, "k": 2, "low_rank": 2},
    **{"low_rank_method": "power_sgd", "lssr": 0.9, "max_trials": 3, "micro_batches": 2, "mixing_factor": 0.5, "n": 2},
    **{"n_fetch": 2, "n_push": 2, "neighbors": "pipelines", "num_layers": 2, "num_replicas": 2, "outer_lr": 0.5},
    **{"outer_momentum": 0.3, "overlap": "forward", "overlap_steps": 1, "period": 2, "prediction_smoothing": 0.5},
    **{"replicas": 3, "residual_decay": 0.9, "search_mb": (2.0, 3.0), "segments": 3, "smoothing": 0.5, "window": 5},
    **{"staleness_bound": 1, "staleness_lr": "mean", "torus_columns": 2, "trial_steps": 5, "wait_for_hooks": False},
    **{"warmup_steps": 5, "compression": "int8", "delay_compensation": "momentum"},
    "average": {"selsync": "server", "ea_pipe": "elastic"},
}
#: Values of settings for which a table says only which ones they must not be.
OTHER = {"k": 1, "low_rank": 2, "lighthouse": "host0:1", "overlap_steps": 1, "num_pipelines": 2, "compression": "int8"}
#: What else a setting needs, so that it is not refused for another reason.
BESIDES: dict[tuple[str, str], dict[str, Any]] = {
    ("selsync", "low_rank"): {"aggregation": "gradients"},
    ("selsync", "low_rank_method"): {"aggregation": "gradients"},
}

CONDITIONAL = [
    (method, field.name)
    for method in OWN
    for field in fields(OWN[method].config_type)
    if field.name in OWN[method].config_type.acts_with
]


def changed(method: str, name: str) -> Any:
    value = CHANGED[name]
    return value[method] if isinstance(value, Mapping) else value


def enabling(config_type: type[Settings], name: str) -> dict[str, Any]:
    """Returns others, with which a setting has an effect, and what they need themselves."""
    found: dict[str, Any] = {}
    for other, allowed in config_type.acts_with.get(name, {}).items():
        if (default := getattr(config_type, other)) not in allowed:
            found[other] = OTHER[other] if isinstance(allowed, Not) else allowed[0]
            found = {**enabling(config_type, other), **found}
        else:
            found[other] = default
    return found


def preventing(config_type: type[Settings], other: str, allowed: Any) -> Any:
    """Returns a value of another setting with which one has no effect."""
    if isinstance(allowed, Not):
        return allowed.values[-1]
    choices = chain.from_iterable(get_args(part) for part in parts(get_type_hints(config_type)[other]))
    return next(value for value in (getattr(config_type, other), *choices, 0.3) if value not in allowed)


@pytest.mark.parametrize("method", OWN)
def test_each_setting_is_known_to_have_an_effect_always_or_with_others(method: str) -> None:
    """Who adds a setting says which: in ``acts_with`` of its class, or above."""
    names = [field.name for field in fields(OWN[method].config_type)]
    conditional = {name for of, name in CONDITIONAL if of == method}
    always = set(ALWAYS[method].split())
    accepted = (set(names) & set(ACCEPTED)) - conditional - always
    assert sorted(names) == sorted([*always, *conditional, *accepted])
    for name in conditional:
        for other in OWN[method].config_type.acts_with[name]:
            assert other in names


@pytest.mark.parametrize(("method", "name"), CONDITIONAL)
def test_a_setting_without_effect_is_refused(method: str, name: str) -> None:
    """One of the others at a time is changed to what leaves it without effect."""
    config_type = OWN[method].config_type
    needed, value, default = enabling(config_type, name), changed(method, name), getattr(config_type, name)
    assert value != default
    make = partial(make_config, method)
    assert getattr(make({**needed, **BESIDES.get((method, name), {}), name: value}), name) == value
    for other, allowed in config_type.acts_with[name].items():
        prevents = preventing(config_type, other, allowed)
        others = {**needed, other: prevents}
        message = f"{name}={value!r} has no effect with {other}={prevents!r}: set "
        with pytest.raises(ValueError, match=re.escape(message) + f".*, or {name}={re.escape(repr(default))}\\.$"):
            make({**others, name: value})


@pytest.mark.parametrize(("method", "name"), CONDITIONAL)
def test_the_docs_of_a_setting_say_with_what_it_has_an_effect(method: str, name: str) -> None:
    """Or those of the other one say what its values are with which it has none."""
    docs = docs_of(OWN[method].config_type)
    for other, allowed in OWN[method].config_type.acts_with[name].items():
        if isinstance(allowed, Not):
            assert other in docs[name] or all(str(value) in docs[other] for value in allowed.values), other
        else:
            assert other in docs[name] or all(f"``{value}``" in docs[name] for value in allowed), other


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("selsync", {"lssr": 0.9, "delta": 2}, "lssr=0.9 has no effect with delta=2: set delta='auto', or lssr=0.7"),
        (
            "parameter_server",
            {"period": 5},
            "period=5 has no effect with policy='k_batch_async': set policy='easgd' or 'diloco', or period=10",
        ),
        (
            "pipe_sgd",
            {"warmup_steps": 5, "staleness": 0},
            "warmup_steps=5 has no effect with staleness=0: set another staleness, or warmup_steps=0",
        ),
        (
            "local_sgd",
            {"num_replicas": 2},
            "num_replicas=2 has no effect with lighthouse=None: set lighthouse, or num_replicas=None",
        ),
        *(
            (
                "selsync",
                {"lr_scale": 2, name: value},
                f"lr_scale=2 has no effect with {words}: set aggregation='parameters' and a finite delta, or "
                "lr_scale='auto'",
            )
            for name, value, words in (
                ("aggregation", "gradients", "aggregation='gradients' and delta='auto'"),
                ("delta", math.inf, "aggregation='parameters' and delta=inf"),
            )
        ),
        *(
            (
                "pipe_sgd",
                {"delay_compensation": kind, "staleness": least - 1},
                f"delay_compensation={kind!r} has no effect with staleness={least - 1}: set staleness={least}, or "
                "more, or delay_compensation='none'",
            )
            for kind, least in (("momentum", 1), ("distance", 1), ("staleness", 2))
        ),
    ],
)
def test_what_a_message_says(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}\.$"):
        make_config(method, settings)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("pipe_sgd", {"staleness": 0, "delay_compensation": "none", "checkpoint_own_gradients": False}),
        ("pipe_sgd", {"error_feedback": False}),
        ("selsync", {"delta": math.inf, "follow_lr": False, "error_feedback": False, "lr_scale": 1.0}),
        ("local_sgd", {"period": 1, "follow_lr": False}),
    ],
)
def test_what_switches_off_what_there_is_not_is_accepted(method: str, settings: dict[str, Any]) -> None:
    make_config(method, settings)


def test_a_pipeline_without_an_optimizer_needs_no_setting_of_updates() -> None:
    settings: dict[str, Any] = {"elastic_force": 0.3, "period": 2, "replicas": 3, "split": "parameters"}
    pipeline = EAPipe(seeded_mlp(), nn.functional.cross_entropy, None, virtual_stages=2, **settings)
    assert pipeline.config == EAPipeConfig(algorithm="naive", replicas=3, split="parameters")
    pipeline.detach()


def attach(name: str, **settings: Any) -> list[str]:
    """Returns the warnings of a method in one process alone."""
    model = seeded_mlp()
    begin = partial(OWN[name], model, SGD(model.parameters(), lr=0.1))
    if name == "ea_pipe":
        begin = partial(OWN[name], model, nn.functional.cross_entropy, partial(SGD, lr=0.1), split="parameters")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin(**settings).detach(timeout_s=0.1)
    return [str(one.message) for one in caught if "nothing is synchronized" in str(one.message)]


def attach_alone() -> dict[str, list[str]]:
    said = {name: attach(name) for name in OWN}
    return {**said, "virtual stages": attach("ea_pipe", virtual_stages=2)}


def test_one_process_alone_is_told_so() -> None:
    [said] = on_ranks(attach_alone, 1)
    assert said.pop("virtual stages") == []
    for name, messages in said.items():
        assert len(messages) == 1, name
        assert messages[0].startswith(f"{OWN[name].__name__} is attached in one process alone")
    assert not any(on_ranks(attach_alone, 2)[0].values())
