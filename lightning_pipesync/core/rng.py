"""Random number generators: their states, and numbers that depend only on a seed, a pass and a place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of the generators that training on ``device`` uses."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restores what :func:`rng_states` returned; of ``device`` only if the states are of a training on CUDA, too."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def seeded(seed: int, number: int, place: int | None, device: torch.device) -> Iterator[None]:
    """Context with random number generators that are seeded for a forward pass, and restored afterwards.

    It seeds torch's generators, and around layers those of NumPy and Python, too.

    Args:
        seed: of the training.
        number: of the forward pass.
        place: the index of the stage; None: the user's code around the layers, which is the same for all stages.
        device: of the stage.
    """
    text = f"{seed}, {number}, {place}"
    own = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(own)  # torch.manual_seed also formats stack traces for missing devices
        if device.type == "cuda":
            with torch.cuda.device(device):  # it seeds the current device, which need not be the stage's
                torch.cuda.manual_seed(own)
        if place is not None:
            yield
            return
        states = np.random.get_state(), random.getstate()
        np.random.seed(own % 2**32)
        random.seed(own)
        try:
            yield
        finally:
            np.random.set_state(states[0])
            random.setstate(states[1])
