"""Random numbers that depend on the mini-batch and the place alone, not on which process draws them or when."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


@contextmanager
def drawing(seed: int, number: int, place: int | None, device: torch.device) -> Iterator[None]:
    """Within it torch draws numbers of its own, afterwards it goes on as before; around layers NumPy and Python, too.

    Args:
        seed: of the training.
        number: of the forward pass.
        place: index of the stage; None: what all stages have in common, the user's code around the layers.
        device: the stage's.
    """
    text = f"{seed}, {number}, {place}"
    own = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(own)  # torch.manual_seed also formats stack traces for absent devices
        if device.type == "cuda":
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
