"""The wire format: no pickle is read where plain values are expected, and none of a state's objects runs code."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.comm.handle import CPU
from lightning_pipesync.core.comm.host_copies import HostCopies
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.comm.wire import packed, start_unpacking
from tests.support.harness import on_ranks, raised

COPIES = HostCopies(CPU)


class Touches:
    """A file is there after it was unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def send_pickles(path: Path) -> tuple[Any, ...]:
    """Rank 0 returns what it gets of each message, and whether code of a message has run."""
    transport = Transport(timeout_s=20)
    trees: list[Any] = [(torch.ones(2), OrderedDict(x=torch.ones(3))), (torch.ones(2), Touches(path))]
    outcomes: list[Any] = []
    for index, tree in enumerate(trees):
        messages = transport._series(10 + index)
        if dist.get_rank() == 1:
            for work in [messages.start_sending(part, 0) for part in packed(tree, COPIES, objects=True).wait()[:1]]:
                messages.wait_sent(work, 0)
            outcomes.append(raised(lambda tree=tree: packed(tree, COPIES)))
        else:
            outcomes.append(raised(lambda messages=messages: start_unpacking(messages, 1, torch.device("cpu"))()))
    sent = {"x": Touches(path)} if dist.get_rank() == 1 else {"x": 1}
    states = raised(lambda: transport.collect_states(sent))
    transport.close()
    return *outcomes, states, path.exists()


def test_no_pickle_is_read_where_plain_values_are_expected(tmp_path: Path) -> None:
    (*received, states, ran), (*sent, _, _) = on_ranks(send_pickles, 2, tmp_path / "ran")
    for outcome in received:
        assert outcome is not None
        assert outcome[0] == "ValueError"
        assert "Rank 1 has sent a message of kind b'P'" in outcome[1]
    for outcome in sent:
        assert outcome is not None
        assert outcome[0] == "TypeError"
    assert states is not None
    assert "The state of rank 1" in states[1]
    assert not ran


def exchange() -> list[Any]:
    transport = Transport(timeout_s=20)
    messages = transport._series(10)
    both: list[Any] = [
        {
            "x": torch.arange(3.0, requires_grad=True),
            "z": torch.ones(2, 2),
            "empty": torch.ones(0),
            "one": [1, None],
        },
        OrderedDict(y=torch.ones(2, dtype=torch.int8)),
        ["long" * 1000, torch.ones(3)],
    ]
    if dist.get_rank() == 1:
        works = [
            messages.start_sending(part, 0)
            for tree in both
            for part in packed(tree, COPIES, torch.bfloat16, objects=True).wait()
        ]
        for work in works:
            messages.wait_sent(work, 0)
        found = []
    else:
        found = [start_unpacking(messages, 1, torch.device("cpu"), objects=True)() for _ in both]
        assert found[0]["x"].requires_grad
        assert not found[0]["z"].requires_grad
        assert {value.dtype for value in found[0].values() if isinstance(value, Tensor)} == {torch.float32}
        assert found[0]["x"].tolist() == [0.0, 1.0, 2.0]
        assert found[0]["one"] == [1, None]
        assert found[0]["empty"].shape == (0,)
        assert type(found[1]) is OrderedDict
        assert found[1]["y"].dtype == torch.int8
        assert found[2][0] == "long" * 1000
    transport.close()
    return [len(found)]


def test_containers_arrive_as_they_were() -> None:
    assert on_ranks(exchange, 2) == [[3], [0]]
