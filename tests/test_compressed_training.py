"""Every codec in every method that compresses: all ranks end with the same bits, near where they end uncompressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipesync.core.codecs import CODECS
from lightning_pipesync.training.registry import METHODS
from tests.harness import launch
from tests.models import loss, seeded_mlp, state

#: By case: the method, and settings in which it exchanges often.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dear, sharded": ("dear", {"fusion": "buffer", "update": "sharded"}),
    "dear, replicated": ("dear", {"fusion": "buffer", "update": "replicated"}),
    "selsync, parameters": ("selsync", {"delta": 0.0}),
    "selsync, gradients": ("selsync", {"delta": 0.0, "aggregation": "gradients"}),
    "local_sgd": ("local_sgd", {"period": 2}),
    "parameter_server": ("parameter_server", {"policy": "sync"}),
    "pipe_sgd": ("pipe_sgd", {}),
}


def train(name: str, settings: dict[str, Any]) -> tuple[bool, float]:
    """Returns whether all ranks have the same weights, and their loss on what they have trained on."""
    model = seeded_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync: Any = METHODS[name](model, optimizer, **settings)  # type: ignore[call-arg]
    for i in range(80):
        optimizer.zero_grad()
        loss(model, i % 10, dist.get_rank()).backward()
        sync.step()
    sync.flush()
    weights = {name: value.tolist() for name, value in state(model).items()}
    others = sync.transport.gather_objects(weights)
    sync.detach()
    with torch.no_grad():
        final = sum(loss(model, i, rank).item() for i in range(10) for rank in range(2)) / 20
    return all(other == weights for other in others), final


def train_with_every_codec(case: str) -> dict[str, tuple[bool, float]]:
    name, settings = CASES[case]
    return {codec: train(name, {**settings, "compression": codec}) for codec in CODECS}


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_and_arrive_where_they_do_uncompressed(case: str) -> None:
    for outcome in launch(train_with_every_codec, 2, case):
        _, exact = outcome["none"]
        for codec, (agree, final) in outcome.items():
            assert agree, codec
            assert final == pytest.approx(exact, rel=0.15), codec


def test_every_method_with_a_codec_is_a_case() -> None:
    wires = {name for name, method in METHODS.items() if "compression" in method.config_type.__dataclass_fields__}
    assert {name for name, _ in CASES.values()} == wires - {"ea_pipe"}, "which sends activations"
