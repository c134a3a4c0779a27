"""A setting that is not of its type, or out of its range, is refused by name; what means the same is the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adadelta

from lightning_pipesync.methods.dear import DeAR, DeARConfig
from lightning_pipesync.methods.ea_pipe import EAPipe
from lightning_pipesync.methods.settings import Settings, renamed
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


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("selsync", {"injection": 0.5}, "injection must be a pair (alpha, beta), got 0.5."),
        ("selsync", {"injection": (0.5,)}, "injection must be a pair (alpha, beta), got (0.5,)."),
        ("selsync", {"delta": "10"}, "delta must be a number or 'auto', got '10'."),
        ("selsync", {"full_pass": "no"}, "full_pass must be True or False, got 'no'."),
        ("selsync", {"aggregation": True}, "aggregation must be one of ('parameters', 'gradients'), got True."),
        ("selsync", {"window": 2.5}, "window must be an integer, got 2.5."),
        ("selsync", {"lssr": math.nan}, "lssr must be a number, got nan."),
        ("dear", {"bucket_mb": "10"}, "bucket_mb must be a number of MiB, got '10'."),
        ("dear", {"timeout_s": True}, "timeout_s must be a number of seconds, got True."),
        ("dear", {"search_mb": 5}, "search_mb must be a pair of numbers of MiB, got 5."),
        ("dear", {"elementwise": Adadelta}, f"elementwise must be a tuple of optimizer classes, got {Adadelta!r}."),
        ("dear", {"compression": 8}, "compression must be the name of a codec or a Codec, got 8."),
        ("dear", {"update": "half"}, "update must be one of ('sharded', 'replicated'), got 'half'."),
        ("pipe_sgd", {"pipeline_level": True}, "pipeline_level must be one of (1, 2), got True."),
        ("pipe_sgd", {"bucket_mb": -1}, "bucket_mb must be a positive number of MiB, got -1."),
        ("parameter_server", {"fetch_compression": "zip"}, "fetch_compression='zip' is not known: use a Codec or one"),
        ("local_sgd", {"period": None}, "period must be an integer number of steps of at least 1, a share of an epoch"),
        ("ea_pipe", {"split": 3}, "split must be 'balanced', 'parameters', the indices of the stages' first layers"),
        ("ea_pipe", {"module": 3}, "module must be a string, got 3."),
    ],
)
def test_what_a_message_says(method: str, settings: dict[str, Any], message: str) -> None:
    kind, text = raised(lambda: make_config(method, settings)) or ("", "")
    assert kind == "ValueError"
    assert text.startswith(message)


@pytest.mark.parametrize(
    ("method", "name", "value", "message"),
    [
        ("selsync", "injection", "0.5", "injection must be a pair (alpha, beta), got '0.5'."),
        ("selsync", "delta", "nan", "delta must be a number or 'auto', got 'nan'."),
        ("dear", "bucket_mb", "ten", "bucket_mb must be a number of MiB, got 'ten'."),
        ("pipe_sgd", "staleness", "1.5", "staleness must be an integer, got '1.5'."),
        ("dear", "error_feedback", "perhaps", "error_feedback must be True or False, got 'perhaps'."),
    ],
)
def test_a_file_and_the_environment_have_the_same_words(method: str, name: str, value: str, message: str) -> None:
    assert raised(lambda: parse_config(method, {name: value})) == ("ValueError", message)


@pytest.mark.parametrize("method", ["dear", "ea_pipe", "local_sgd", "parameter_server", "pipe_sgd", "selsync"])
def test_none_means_no_compression(method: str) -> None:
    for config in (make_config(method, {"compression": None}), parse_config(method, {"compression": None})):
        assert config == METHODS[method].config_type(compression="none")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("method", "settings", "same"),
    [
        ("selsync", {"delta": np.float64(0.5), "window": np.int64(7)}, {"delta": 0.5, "window": 7}),
        ("selsync", {"injection": [0.5, np.float32(0.25)]}, {"injection": (0.5, 0.25)}),
        ("dear", {"trial_steps": 5.0, "error_feedback": np.False_}, {"trial_steps": 5, "error_feedback": False}),
        ("dear", {"elementwise": [Adadelta]}, {"elementwise": (Adadelta,)}),
        ("ea_pipe", {"split": [1, np.int64(2)]}, {"split": (1, 2)}),
        ("local_sgd", {"outer_optimizer": None}, {"outer_optimizer": "none"}),
        ("parameter_server", {"fetch_compression": None}, {"fetch_compression": "none"}),
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


@renamed({"tau": "period"}, values={"overlap": {"paper": "forward"}})
@dataclass(frozen=True)
class Renamed(Settings):
    period: int = 1
    overlap: str = "none"


def test_former_names_and_values_are_accepted_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="Set period=4 in place of tau=4"):
        assert Renamed(tau=4) == Renamed(period=4)
    with pytest.warns(FutureWarning, match="Set overlap='forward' in place of overlap='paper'"):
        assert Renamed(overlap="paper") == Renamed(overlap="forward")
    assert replace(Renamed(period=2), overlap="eager").period == 2
    with pytest.raises(ValueError, match="tau is the former name of period: set period only"):
        Renamed(period=4, tau=4)
    with pytest.raises(TypeError, match="teriod"):
        Renamed(teriod=4)


@pytest.mark.parametrize(
    ("method", "former", "present"),
    [
        ("local_sgd", "replicas_per_group", "ranks_per_replica"),
        ("local_sgd", "own_share", "mixing_factor"),
        ("ea_pipe", "sync_period", "period"),
        ("parameter_server", "sync_period", "period"),
    ],
)
def test_renamed_settings_of_methods_are_accepted_from_code_and_from_files(
    method: str, former: str, present: str
) -> None:
    for make, value in ((make_config, 1), (parse_config, "1")):
        with pytest.warns(FutureWarning, match=f"Set {present}=.* in place of {former}="):
            config = make(method, {former: value})
        assert getattr(config, present) == 1


def test_the_former_name_of_the_work_queue_is_accepted() -> None:
    for make in (make_config, parse_config):
        with pytest.warns(FutureWarning, match="Set partition='work_queue' in place of partition='handed_out'"):
            assert make("parameter_server", {"partition": "handed_out"}).partition == "work_queue"
