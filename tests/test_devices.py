"""Several CUDA devices and streams, for which there are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_pipesync.core.rng import rng_states, set_rng_states
from lightning_pipesync.methods.gradients.backpipe import BackPipe, BackPipePolicy

SECOND = torch.device("cuda", 1)


def test_the_random_state_is_that_of_the_device_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    states: dict[Any, Any] = {SECOND: torch.ones(3)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: states.update({device: state}))
    saved = rng_states(SECOND)
    states[SECOND] = torch.zeros(3)
    set_rng_states(saved, SECOND)
    assert list(states) == [SECOND]
    assert torch.equal(states[SECOND], torch.ones(3))
    set_rng_states(saved, torch.device("cpu"))  # a training that goes on without its device
    assert list(states) == [SECOND]


class Stream:
    """A stream that knows which others it waits for."""

    device = SECOND

    def __init__(self) -> None:
        self.waits_for: set[Stream] = {self}

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.add(other)


def test_a_bucket_is_packed_after_the_gradients_of_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [Stream(), Stream(), Stream()]
    parameters: Any = [SimpleNamespace(is_cuda=True, device=SECOND) for _ in streams]
    packed_after: list[set[Stream]] = []
    bucket = SimpleNamespace(num_gradients=3, reduce=lambda *_: packed_after.append(current.waits_for))
    fused: Any = SimpleNamespace(buckets=[bucket], index_of={id(parameter): 0 for parameter in parameters})
    pipe = BackPipe(fused, queue=Any, policy=BackPipePolicy())  # type: ignore[arg-type]
    for current, parameter in zip(streams, parameters, strict=True):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, current=current: current)
        pipe._gradient_is_ready(parameter)
    assert packed_after == [set(streams)]
