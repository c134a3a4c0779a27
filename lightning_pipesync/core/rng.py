"""The states of torch's random number generators."""

from __future__ import annotations

import torch
from torch import Tensor


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of the generators that training on ``device`` uses."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(states: dict[str, Tensor]) -> None:
    """Restores the generator states that :func:`rng_states` returned."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
