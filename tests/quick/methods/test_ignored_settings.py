"""What has no effect is named once, on rank 0: a setting that others make ineffective, a method in one process."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, Adadelta

from tests.support.harness import on_ranks
from tests.support.models import seeded_mlp
from tests.support.own_methods import OWN

STALENESS = {"delay_compensation": "staleness"}
INT4 = {"compression": "int4"}
#: By method: settings, and those of them that have no effect.
IGNORED: list[tuple[str, dict[str, Any], set[str]]] = [
    ("pipe_sgd", STALENESS, {"delay_compensation"}),
    ("pipe_sgd", {**STALENESS, "staleness": 0}, {"delay_compensation"}),
    ("pipe_sgd", {"delay_compensation": "distance", "staleness": 0}, {"delay_compensation"}),
    ("pipe_sgd", {**STALENESS, "staleness": 2, "distance_constant": 2.0}, {"distance_constant"}),
    ("pipe_sgd", {"delay_compensation": "distance", "distance_constant": 2.0}, set()),
    ("pipe_sgd", {"segments": 3}, {"segments"}),
    ("pipe_sgd", {"segments": 3, "pipeline_level": 2}, set()),
    ("pipe_sgd", {"staleness": 0, "drain": True, "warmup_steps": 5}, {"drain", "warmup_steps"}),
    ("pipe_sgd", {"error_feedback": False}, set()),  # it does drop nothing
    ("dear", {"num_layers": 2, "fusion": "bo", "edge_mb": 1.0, "max_trials": 3}, {"num_layers"}),
    ("dear", {"bucket_mb": 2.0, "max_trials": 3}, {"max_trials"}),
    ("dear", {"fusion": "layers", "num_layers": 2, "edge_mb": 1.0}, {"edge_mb"}),
    ("dear", {"fusion": "none", "bucket_mb": 1.0, "trial_steps": 5}, {"bucket_mb", "trial_steps"}),
    ("dear", {"fusion": "buffer", "search_mb": (2.0, 3.0)}, {"search_mb"}),
    ("dear", {"update": "replicated", "elementwise": (Adadelta,), "compression": "int8"}, {"elementwise"}),
    ("selsync", {"window": 5, "smoothing": 1.0}, {"window"}),
    ("selsync", {"window": 5, "smoothing": 0.5}, set()),
    ("selsync", {"delta": 0.3, "lssr": 0.5, "outer_lr": 0.7}, {"lssr"}),
    ("selsync", {"lssr": 0.5, "aggregation": "gradients", "outer_momentum": 0.3}, {"outer_momentum"}),
    ("selsync", {"delta": math.inf, "outer_lr": 0.7, "outer_momentum": 0.3}, {"outer_lr", "outer_momentum"}),
    ("selsync", {"delta": math.inf, "aggregation": "gradients", "compression": "int8"}, {"aggregation", "compression"}),
    ("local_sgd", {"residual_decay": 0.9}, {"residual_decay"}),
    ("local_sgd", {"residual_decay": 0.9, **INT4, "error_feedback": False}, {"residual_decay"}),
    ("local_sgd", {"residual_decay": 0.9, **INT4}, set()),
    ("ea_pipe", {"algorithm": "naive", "elastic_force": 0.3, "period": 2}, {"elastic_force", "period"}),
    ("ea_pipe", {"algorithm": "spectrain", "prediction_smoothing": 0.5, "micro_batches": 2}, {"micro_batches"}),
    ("ea_pipe", {"algorithm": "gpipe", "micro_batches": 2, "replicas": 3}, {"replicas"}),
    ("ea_pipe", {"prediction_smoothing": 0.5}, {"prediction_smoothing"}),
    *((name, {}, set()) for name in OWN),
]


@pytest.mark.parametrize(("method", "settings", "ignored"), IGNORED)
def test_what_has_no_effect_is_known(method: str, settings: dict[str, Any], ignored: set[str]) -> None:
    assert set(settings) & set(OWN[method].config_type(**settings).without_effect()) == ignored


def attach(name: str, words: str, **settings: Any) -> list[str]:
    """Returns the warnings with these words."""
    model = seeded_mlp()
    begin = partial(OWN[name], model, SGD(model.parameters(), lr=0.1))
    if name == "ea_pipe":
        begin = partial(OWN[name], model, nn.functional.cross_entropy, partial(SGD, lr=0.1), split="parameters")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin(**settings).detach(timeout_s=0.1)
    return [str(one.message) for one in caught if words in str(one.message)]


WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "pipe_sgd": {"delay_compensation": "staleness"},
    "dear": {"num_layers": 2},
    "selsync": {"window": 5, "smoothing": 1.0},
    "ea_pipe": {"algorithm": "pipedream", "period": 2},
}


def attach_all() -> list[list[str]]:
    given = [attach(name, "has no effect", **settings) for name, settings in WITHOUT_EFFECT.items()]
    return [*given, *(attach(name, "has no effect") for name in WITHOUT_EFFECT)]


def test_rank_0_says_so_once_when_a_method_is_attached() -> None:
    of_rank_0, of_rank_1 = on_ranks(attach_all, 2)
    beginnings = ("delay_compensation='staleness' has", "num_layers=2 has", "window=5 has", "period=2 has")
    assert [len(said) for said in of_rank_0] == [1] * 4 + [0] * 4
    assert all(said[0].startswith(words) for said, words in zip(of_rank_0, beginnings, strict=False))
    assert of_rank_1 == [[]] * 8


def attach_alone() -> dict[str, list[str]]:
    said = {name: attach(name, "nothing is synchronized") for name in OWN}
    return {**said, "virtual stages": attach("ea_pipe", "nothing is synchronized", virtual_stages=2)}


def test_one_process_alone_is_told_so() -> None:
    [said] = on_ranks(attach_alone, 1)
    assert said.pop("virtual stages") == []
    for name, messages in said.items():
        assert len(messages) == 1, name
        assert messages[0].startswith(f"{OWN[name].__name__} is attached in one process alone")
    assert not any(on_ranks(attach_alone, 2)[0].values())
