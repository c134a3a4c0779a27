"""Every codec in every method that compresses: all ranks end with the same bits, near where they end uncompressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightning_pipesync.core.codecs import CODECS
from lightning_pipesync.training.registry import METHODS
from tests.harness import on_ranks
from tests.models import Run, assert_same, loss

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


def train(case: str, codec: str) -> tuple[dict[str, Tensor], float]:
    """Returns the weights, and their loss on what all ranks have trained on."""
    name, settings = CASES[case]
    run = Run(METHODS[name], lambda model: SGD(model.parameters(), lr=0.05), compression=codec, **settings)
    run.steps(i % 10 for i in range(80))
    weights = run.end()
    with torch.no_grad():
        return weights, sum(loss(run.model, i, rank).item() for i in range(10) for rank in range(2)) / 20


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_and_arrive_where_they_do_uncompressed(case: str) -> None:
    _, exact = on_ranks(train, 2, case, "none")[0]
    for codec in CODECS:
        (weights, final), (others, _) = on_ranks(train, 2, case, codec)
        assert_same(weights, others, codec)
        assert final == pytest.approx(exact, rel=0.15), codec


def test_every_method_with_a_codec_is_a_case() -> None:
    wires = {name for name, method in METHODS.items() if "compression" in method.config_type.__dataclass_fields__}
    assert {name for name, _ in CASES.values()} == wires - {"ea_pipe"}, "which sends activations"
