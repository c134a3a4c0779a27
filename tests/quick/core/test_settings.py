"""A setting that is not of its type, or out of its range, is refused by name; what means the same is the same."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adadelta

from lightning_pipesync.methods.dear import DeAR, DeARConfig
from lightning_pipesync.methods.ea_pipe import EAPipe
from lightning_pipesync.training.registry import METHODS, make_config, parse_config
from tests.support.harness import raised
from tests.support.models import seeded_mlp

ODD = [
    *(None, True, np.True_, math.nan, math.inf, -math.inf, -1, 0, 0.5, 1.5, 2, 10**9, np.float32(0.5), np.float64(-3)),
    *("", "10", "ten", "None", b"none", [], (), (1,), (2.0, 1.0), ("a", 1), [math.nan, 1], {}, {"a": 1}),
    *(object(), SGD, [SGD], (int,), torch.tensor(0.5), torch.ones(2), np.ones(2), lambda: 1),
]


@pytest.mark.parametrize("method", METHODS)
def test_any_value_is_taken_or_refused_by_name(method: str) -> None:
    config_type = METHODS[method].config_type
    for field in fields(config_type):
        assert (raised(lambda f=field: config_type(**{f.name: object()})) or ("",))[0] == "ValueError", field.name
        for value in ODD:
            outcome = raised(lambda f=field, v=value: config_type(**{f.name: v}))
            if outcome is not None:
                assert outcome[0] == "ValueError", (field.name, value, outcome)
                assert field.name in outcome[1], (value, outcome)


#: By method: settings, and for each values out of its range.
OUT_OF_RANGE: dict[str, dict[str, list[Any]]] = {
    "dear": {
        **{"update": ["half"], "fusion": ["some"], "edge_mb": [30], "search_mb": [(10, 5)], "trial_steps": [2]},
        **{"max_trials": [0], "num_layers": [0], "low_rank": [0]},
    },
    "pipe_sgd": {
        **{"staleness": [1.5, -1], "segments": [0], "warmup_steps": [-1], "pipeline_level": [3]},
        **{"delay_compensation": ["some"], "distance_constant": [0]},
    },
    "selsync": {
        **{"delta": [-0.1, "often"], "lssr": [1.0], "window": [0], "smoothing": [0.0], "outer_lr": [0.0]},
        "outer_momentum": [1.0],
    },
    "local_sgd": {
        **{"period": [0, 2.5, "often"], "participation": [0.0], "fragments": [0], "lighthouse": ["host0"]},
        **{"outer_optimizer": ["lamb"], "elastic_force": [1.5], "mixing_factor": [2.0, "half"]},
        **{"lr_scale": [0.0, "large"], "ranks_per_replica": [0], "neighbors": ["torus"]},
    },
    "parameter_server": {
        **{"policy": ["bsp"], "k": [0], "staleness_bound": [-1], "staleness_lr": ["half"], "partition": ["seldp"]},
        "delay_compensation": ["half"],
    },
    "ea_pipe": {
        **{"elastic_force": [0.0, 1.0], "period": [0], "replicas": [0], "algorithm": ["zero-bubble"]},
        **{"compression": ["int8"], "split": ["evenly", (3, 2), (2.5,), ("a", 2.5)], "clip_norm": [-1.0]},
        **{"prediction_smoothing": [1.0], "num_pipelines": [0], "average": ["weights"], "average_period": [0]},
        **{"average_force": [1.0], "neighbors": ["hosts"]},
    },
}
#: Settings that several methods have.
SHARED = {"timeout_s": 0, "bucket_mb": 0, "compression": "zip", "topology": "ring"}


@pytest.mark.parametrize("method", OUT_OF_RANGE)
def test_what_is_out_of_range_is_refused_with_its_value(method: str) -> None:
    config_type = METHODS[method].config_type
    shared = {name: [value] for name, value in SHARED.items() if name in config_type.__dataclass_fields__}
    for name, values in [*OUT_OF_RANGE[method].items(), *shared.items()]:
        for value in values:
            kind, text = raised(lambda given={name: value}: config_type(**given)) or ("", "")
            assert kind == "ValueError", (name, value)
            assert name in text, (name, value, text)
            assert repr(value) in text, (name, value, text)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("selsync", {"injection": (0.5,)}, "injection must be a pair (alpha, beta), got (0.5,)."),
        ("selsync", {"delta": "10"}, "delta must be a number or 'auto', got '10'."),
        ("selsync", {"full_pass": "no"}, "full_pass must be True or False, got 'no'."),
        ("selsync", {"aggregation": True}, "aggregation must be one of ('parameters', 'gradients'), got True."),
        ("selsync", {"window": 2.5}, "window must be an integer, got 2.5."),
        ("dear", {"timeout_s": True}, "timeout_s must be a number of seconds, got True."),
        ("dear", {"search_mb": 5}, "search_mb must be a pair of numbers of MiB, got 5."),
        ("dear", {"elementwise": Adadelta}, f"elementwise must be a tuple of optimizer classes, got {Adadelta!r}."),
        ("dear", {"compression": 8}, "compression must be the name of a codec or a Codec, got 8."),
        ("pipe_sgd", {"bucket_mb": -1}, "bucket_mb must be a positive number of MiB, got -1."),
        ("parameter_server", {"compression": "zip"}, "compression='zip' is not known: use a Codec or one"),
        ("local_sgd", {"period": None}, "period must be an integer number of steps of at least 1, a share of an epoch"),
        ("ea_pipe", {"split": 3}, "split must be 'balanced', 'parameters', the indices of the stages' first layers"),
    ],
)
def test_what_a_message_says(method: str, settings: dict[str, Any], message: str) -> None:
    kind, text = raised(lambda: make_config(method, settings)) or ("", "")
    assert kind == "ValueError"
    assert text.startswith(message)


def test_a_file_and_the_environment_have_the_same_words() -> None:
    for method, name, value, message in (
        ("selsync", "injection", "0.5", "injection must be a pair (alpha, beta), got '0.5'."),
        ("selsync", "delta", "nan", "delta must be a number or 'auto', got 'nan'."),
        ("dear", "bucket_mb", "ten", "bucket_mb must be a number of MiB, got 'ten'."),
        ("pipe_sgd", "staleness", "1.5", "staleness must be an integer, got '1.5'."),
        ("dear", "error_feedback", "perhaps", "error_feedback must be True or False, got 'perhaps'."),
    ):
        assert raised(lambda m=method, given={name: value}: parse_config(m, given)) == ("ValueError", message)


@pytest.mark.parametrize("method", ["dear", "ea_pipe", "local_sgd", "parameter_server", "pipe_sgd", "selsync"])
def test_none_means_no_compression(method: str) -> None:
    for config in (make_config(method, {"compression": None}), parse_config(method, {"compression": None})):
        assert config == METHODS[method].config_type(compression="none")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("method", "settings", "same"),
    [
        ("selsync", {"delta": np.float64(0.5), "window": np.int64(7)}, {"delta": 0.5, "window": 7}),
        ("selsync", {"injection": [0.5, np.float32(0.25)]}, {"injection": (0.5, 0.25)}),
        ("dear", {"low_rank": 5.0, "error_feedback": np.False_}, {"low_rank": 5, "error_feedback": False}),
        ("dear", {"elementwise": [Adadelta]}, {"elementwise": (Adadelta,)}),
        ("ea_pipe", {"split": [1, np.int64(2)]}, {"split": (1, 2)}),
        ("local_sgd", {"outer_optimizer": None}, {"outer_optimizer": "none"}),
        ("parameter_server", {"compression": None}, {"compression": "none"}),
    ],
)
def test_what_means_the_same_is_the_same(method: str, settings: dict[str, Any], same: dict[str, Any]) -> None:
    """Also in ``repr``, by which the ranks compare their settings."""
    assert repr(make_config(method, settings)) == repr(make_config(method, same))


def test_a_config_of_another_class_is_refused() -> None:
    model = seeded_mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    for config in (0.5, METHODS["selsync"].config_type(), DeARConfig, False):
        kind, text = raised(lambda given=config: DeAR(model, optimizer, given)) or ("", "")
        assert kind == "ValueError"
        assert text == f"config must be a DeARConfig, got {config!r}."
    kind, text = raised(lambda: EAPipe(model, None, SGD, 0.5)) or ("", "")  # type: ignore[arg-type]
    assert (kind, text) == ("ValueError", "config must be a EAPipeConfig, got 0.5.")
