"""Presets: names of algorithms from papers, each for a method with the paper's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """What a name stands for: a method, and the settings that differ from its defaults."""

    method: str
    summary: str
    settings: Mapping[str, Any]


#: What the papers have in common: the inner learning rate and the period stay as they are.
_INNER: Mapping[str, Any] = {"lr_scale": 1.0, "follow_lr": False}
_DILOCO: Mapping[str, Any] = {**_INNER, "outer_optimizer": "nesterov", "outer_momentum": 0.9}

#: Every preset by its name; none is the name of a method.
PRESETS: dict[str, Preset] = {
    "fedavg": Preset(
        "local_sgd",
        "Averages the weights after each epoch (McMahan et al., AISTATS 2017, with E = 1 and C = 1).",
        {"lr_scale": 1.0, "period": "1 epoch"},
    ),
    "diloco": Preset(
        "local_sgd",
        "Takes an outer Nesterov step every 500 steps (Douillard et al., arXiv 2311.08105).",
        {**_DILOCO, "period": 500, "outer_lr": 0.7},
    ),
    "streaming_diloco": Preset(
        "local_sgd",
        "DiLoCo in fragments, under computation, in 4 bits per value (Douillard et al., arXiv 2501.18512, Section 3).",
        {**_DILOCO, "period": 100, "outer_lr": 0.4, "fragments": 8, "overlap_steps": 1, "mixing_factor": 0.5}
        | {"compression": "int4"},
    ),
    "muloco": Preset(
        "local_sgd",
        "DiLoCo for Muon as the optimizer, in 2 bits per value (Thérien et al., arXiv 2505.23725).",
        {**_DILOCO, "period": 30, "outer_lr": 0.8, "compression": "int2", "residual_decay": 0.9},
    ),
    "sparseloco": Preset(
        "local_sgd",
        "Sends 64 of 4096 values of what the ranks have moved, in 2 bits each (Sarfi et al., arXiv 2508.15706).",
        {**_INNER, "period": 30, "outer_optimizer": "sgd", "outer_lr": 1.0, "compression": "chunked_topk"}
        | {"residual_decay": 0.95},
    ),
}
