"""What travels between ranks: plain values come back as they were, nothing else does, and no pickle runs code."""

from __future__ import annotations

import io
import math
import os
import pickle
import sys
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pipesync.core.comm.handle import CPU
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.comm.wire import HostCopies, packed, pickled, start_unpacking, unpickled
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.messages import Gradient, Push, Request, UpdateSettings
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.thread_ranks import ThreadRank, on_threads

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
    text, tensors = pickled(value)
    return unpickled(io.BytesIO(text), tensors)


def test_plain_values_come_back_with_their_bits() -> None:
    for value in PLAIN:
        assert back(value) == value
        assert repr(back(value)) == repr(value)
    draw = torch.rand(100, dtype=torch.float64).tolist()
    assert [number.hex() for number in back(draw)] == [number.hex() for number in draw]
    assert math.isnan(back(math.nan))
    assert repr(back([np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(True)])) == "[0.1, 0.5, 3, True]"


def test_dataclasses_with_tensors_come_back() -> None:
    lr, wire = torch.tensor(0.5), torch.zeros(2, dtype=torch.uint8)
    settings = UpdateSettings([{"lr": lr, "betas": (0.9, 0.99), "fused": None}], max_norm=1.0)
    found = back(Push(Gradient(0, 1, 2, 3), settings, [wire], [[True, False]]))
    assert (found.gradient, found.present) == (Gradient(0, 1, 2, 3), [[True, False]])
    assert found.wires[0] is wire
    assert found.settings.hyperparameters[0]["lr"] is lr
    assert found.settings.hyperparameters[0]["betas"] == (0.9, 0.99)
    assert found.settings.max_norm == 1.0


class Color(Enum):
    RED = 1


def test_other_values_are_refused() -> None:
    for value in (OrderedDict(), Color.RED, os.getcwd, object(), int, torch.Generator()):
        with pytest.raises(TypeError, match=type(value).__name__):
            back({"x": [value]})


def calling(module: str, name: str, *args: Any) -> bytes:
    """Returns a pickle that calls what has this name in a module."""
    names = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + names + b"\x93" + pickle.dumps(args, 4)[2:-1] + b"R."


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"not a pickle",
        pickle.dumps(os.getcwd),
        pickle.dumps(OrderedDict()),
        pickle.dumps({"x": (1, 2)})[:-3],
        calling("builtins", "eval", "1"),
        calling("os", "system", "true"),
        calling("builtins", "getattr", 1, "real"),
        calling("torch", "load", "x"),
        calling("torch", "serialization.load", "x"),
        calling("lightning_pipesync.core.comm.wire", "sys.modules.get", "os"),
        calling("lightning_pipesync.core.comm.wire", "io.BytesIO"),
        calling("lightning_pipesync.core.comm.wire", "pickle.loads", b""),
        calling("lightning_pipesync.core.comm.wire", "unpickled", b""),
        calling("lightning_pipesync.core.comm.wire", "_tensor", 3),
        calling("this", "s"),
    ],
)
def test_nothing_else_is_read(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"no plain values"):
        unpickled(io.BytesIO(text))
    assert "this" not in sys.modules


def test_hyperparameters_that_cannot_be_sent_are_named() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.1), momentum=np.float64(0.9))
    ParameterServerConfig().check_optimizer(optimizer, 1)
    optimizer.param_groups[0]["schedule"] = os.getcwd
    with pytest.raises(ValueError, match=r"schedule of group 0 of SGD .* cannot be sent to the servers"):
        ParameterServerConfig().check_optimizer(optimizer, 1)


class Touches:
    """A folder is there after it was unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def send(messages: Messages, tree: Any, *args: Any) -> None:
    for work in [messages.start_sending(part, 0) for part in packed(tree, *args, objects=True).wait()]:
        messages.wait_sent(work, 0)


def test_no_pickle_is_read_where_plain_values_are_expected(tmp_path: Path) -> None:
    trees: list[Any] = [(torch.ones(2), OrderedDict(x=torch.ones(3))), (torch.ones(2), Touches(tmp_path / "ran"))]

    def send_pickle(rank: ThreadRank, tree: Any) -> tuple[str, str] | None:
        messages = Messages(rank.group(range(2)), 0, rank.watch)
        if rank.rank == 0:
            return raised(lambda: start_unpacking(messages, 1, CPU)())
        send(messages, tree, HostCopies(CPU))
        return raised(lambda: packed(tree, HostCopies(CPU)))

    for tree in trees:
        received, sent = on_threads(send_pickle, 2, tree)
        assert_raised(received, "ValueError", "no plain values", "makes no plain value")
        assert_raised(sent, "TypeError")
    assert not (tmp_path / "ran").exists()


def collect_a_pickle(path: Path) -> tuple[str, str] | None:
    transport = Transport(timeout_s=20)
    outcome = raised(lambda: transport.collect_states({"x": Touches(path) if transport.rank == 1 else 1}))
    transport.close()
    return outcome


def test_no_pickle_runs_code_in_a_state(tmp_path: Path) -> None:
    outcome, _ = on_ranks(collect_a_pickle, 2, tmp_path / "ran")
    assert outcome is not None
    assert "The state of rank 1" in outcome[1]
    assert not (tmp_path / "ran").exists()


def test_containers_arrive_as_they_were() -> None:
    named = {
        "x": torch.arange(3.0, requires_grad=True),
        "z": torch.ones(2, 2),
        "empty": torch.ones(0),
        "one": [1, None],
    }
    trees: list[Any] = [named, OrderedDict(y=torch.ones(2, dtype=torch.int8)), ["long" * 1000, torch.ones(3)]]

    def exchange(rank: ThreadRank) -> list[Any]:
        messages = Messages(rank.group(range(2)), 0, rank.watch)
        if rank.rank == 0:
            return [start_unpacking(messages, 1, CPU, objects=True)() for _ in trees]
        for tree in trees:
            send(messages, tree, HostCopies(CPU), torch.bfloat16)
        return []

    [found, ordered, texts], _ = on_threads(exchange, 2)
    assert [found["x"].requires_grad, found["z"].requires_grad] == [True, False]
    assert {value.dtype for value in found.values() if isinstance(value, Tensor)} == {torch.float32}
    assert (found["x"].tolist(), found["one"], found["empty"].shape) == ([0.0, 1.0, 2.0], [1, None], (0,))
    assert type(ordered) is OrderedDict
    assert ordered["y"].dtype == torch.int8
    assert texts[0] == "long" * 1000
