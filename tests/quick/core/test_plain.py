"""Plain values as JSON: they come back as they were, and nothing else does."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections import OrderedDict
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pipesync.core.plain import decode, encode
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.messages import Gradient, Push, Request, UpdateSettings

PLAIN: list[Any] = [
    None,
    [[True, False], [True, None], []],
    [True, 1, -(2**70), 0.1, math.inf, "text", b"\x00\xff", 1 + 2j],
    {"a": (1, [2, (3,)]), 4: {"tuple": [], "tensor": {}}, (5, None): {6, 7}},
    (torch.float8_e4m3fn, torch.device("cuda", 1), torch.Size([2, 3]), frozenset({1})),
    Request.RETIRE,
]


def back(value: Any) -> Any:
    """Returns a value after it was written and read; tensors stand for themselves."""
    tensors: list[Tensor] = []

    def number(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    return decode(encode(value, number), tensors.__getitem__)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_come_back(value: Any) -> None:
    found = back(value)
    assert found == value
    assert repr(found) == repr(value)


def test_numbers_keep_their_bits() -> None:
    draw = torch.rand(100, dtype=torch.float64).tolist()
    assert [number.hex() for number in back(draw)] == [number.hex() for number in draw]
    assert math.isnan(back(math.nan))
    assert repr(back([np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(True)])) == "[0.1, 0.5, 3, True]"


def test_dataclasses_with_tensors_come_back() -> None:
    lr = torch.tensor(0.5)
    settings = UpdateSettings([{"lr": lr, "betas": (0.9, 0.99), "fused": None}], max_norm=1.0)
    wire = torch.zeros(2, dtype=torch.uint8)
    found = back(Push(Gradient(0, 1, 2, 3), settings, [wire], [[True, False]]))
    assert found.gradient == Gradient(0, 1, 2, 3)
    assert found.wires[0] is wire
    assert found.present == [[True, False]]
    assert found.settings.hyperparameters[0]["lr"] is lr
    assert found.settings.hyperparameters[0]["betas"] == (0.9, 0.99)
    assert found.settings.max_norm == 1.0


class Color(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [OrderedDict(), Color.RED, os.getcwd, object(), int, torch.Generator()],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        back({"x": [value]})


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        '{"data": ["core.plain", "sys.modules", []]}',
        '{"data": ["core.plain", "json.loads", ["1"]]}',
        '{"data": ["core.faults.admission", "socket.socket", []]}',
        '{"data": ["core.faults.admission", "os.system", ["true"]]}',
        '{"enum": ["core.faults.shutdown", "threading.Thread", "x"]}',
        '{"data": ["no.such.module", "x", []]}',
        '{"dtype": "load"}',
        '{"other": 1}',
        '{"tensor": 3}',
        '{"tuple": 1, "list": 2}',
        json.dumps({"tuple": 3}),
    ],
)
def test_nothing_else_is_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text, [].__getitem__)


def test_a_pickle_is_not_read() -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(pickle.dumps({"x": 1}).decode("latin-1"), [].__getitem__)


def test_hyperparameters_that_cannot_be_sent_are_named() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.1), momentum=np.float64(0.9))
    ParameterServerConfig().check_optimizer(optimizer, 1)
    optimizer.param_groups[0]["schedule"] = os.getcwd
    with pytest.raises(ValueError, match=r"schedule of group 0 of SGD .* cannot be sent to the servers"):
        ParameterServerConfig().check_optimizer(optimizer, 1)
