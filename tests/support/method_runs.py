"""All methods in settings in which they average often, so that a few steps show what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.methods.settings import overridden
from lightning_pipesync.training.registry import METHODS
from tests.support.models import Run, seeded_mlp, state

#: Settings in which DeAR has many buckets of a small model: of some 26 values.
SMALL = {"bucket_mb": 1e-4}
#: By case: the method, and its settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dear, sharded": ("dear", {"fusion": "buffer", "update": "sharded"}),
    "dear, replicated": ("dear", {"fusion": "buffer", "update": "replicated"}),
    "selsync, parameters": ("selsync", {"delta": 0.0}),
    "selsync, gradients": ("selsync", {"delta": 0.0, "aggregation": "gradients"}),
    "selsync, overlapped": ("selsync", {"delta": 0.0, "overlap": "forward"}),
    "local_sgd": ("local_sgd", {"period": 2}),
    "local_sgd, streaming": ("local_sgd", {"period": 4, "fragments": 2, "overlap_steps": 3}),
    "local_sgd, DiLoCo": ("local_sgd", {"period": 2, "outer_optimizer": "nesterov"}),
    "local_sgd, DiLoCo, overlapped": ("local_sgd", {"period": 3, "outer_optimizer": "nesterov", "overlap_steps": 2}),
    "parameter_server": ("parameter_server", {"policy": "sync"}),
    "parameter_server, one": ("parameter_server", {"policy": "sync", "servers": 1}),
    "pipe_sgd": ("pipe_sgd", {}),
    "pipe_sgd, segments": ("pipe_sgd", {"pipeline_level": 2, "staleness": 2}),
}
#: Settings with which a method is synchronous SGD.
SYNCHRONOUS: dict[str, tuple[str, dict[str, Any]]] = {
    "dear": ("dear", {"fusion": "buffer", **SMALL}),
    "dear, sharded": ("dear", {"update": "sharded", "fusion": "buffer", **SMALL}),
    "dear, no overlap": ("dear", {"overlap": "none"}),
    "selsync": ("selsync", {"delta": 0.0, "aggregation": "gradients", "partition": "defdp"}),
    "selsync, weights": ("selsync", {"delta": 0.0, "partition": "defdp"}),
    "selsync, overlapped": ("selsync", {"delta": 0.0, "overlap": "forward", "partition": "defdp", **SMALL}),
    "local_sgd": ("local_sgd", {"period": 1, "lr_scale": 1.0}),
    "parameter_server": ("parameter_server", {"policy": "sync"}),
    "parameter_server, one": ("parameter_server", {"policy": "sync", "servers": 1}),
    "pipe_sgd": ("pipe_sgd", {"staleness": 0}),
}
#: Those whose gradients are averaged, as low-rank factors if asked; Pipe-SGD with those of the weights that it has.
FACTORIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "dear": ("dear", {"fusion": "buffer", **SMALL}),
    "pipe_sgd": ("pipe_sgd", {"delay_compensation": "none"}),
    "selsync": CASES["selsync, gradients"],
}


def synchronous_strategy(case: str) -> dict[str, Any]:
    """Returns a strategy of :data:`SYNCHRONOUS`, as the tests of Lightning write it."""
    name, settings = SYNCHRONOUS[case]
    return {"name": name, **settings}


def begin(
    case: str,
    optimizer: str | Callable[[nn.Module], Optimizer] = "sgd",
    model: nn.Module | None = None,
    **settings: Any,
) -> Run:
    """Attaches the method of a case, in settings of which some are changed."""
    name, own = {**CASES, **FACTORIZED}[case]
    return Run(METHODS[name], optimizer, model, **overridden(METHODS[name].config_type, own, settings))


def interrupted(case: str, settings: dict[str, Any], resumes: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns this rank's own weights, and the consolidated ones, of a run that is saved and perhaps resumed."""
    run = begin(case, "adamw", **settings)
    run.steps(range(5))
    if resumes:
        run = run.resumed(seeded_mlp(1))
    else:
        run.sync.flush()
        run.sync.resume()
    run.steps(range(5, 10))
    run.sync.synchronize()
    return state(run.model), run.end()


class Backwards(nn.Module):
    """Registered in another order than executed, with a parameter of the root, and one that is used as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.head, self.second, self.first = nn.Linear(6, 3), nn.Linear(6, 6), nn.Linear(6, 6)
        self.only_weight = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x * self.scale)))
        x = nn.functional.linear(torch.tanh(x), self.only_weight.weight, self.only_weight.bias)
        return self.head(torch.tanh(x))


def backwards() -> nn.Module:
    torch.manual_seed(0)
    return Backwards()
