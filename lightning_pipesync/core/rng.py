"""The state of torch's random numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of the generators that a training on ``device`` draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(states: dict[str, Tensor]) -> None:
    """Has the random numbers go on where they were when :func:`rng_states` was called."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
