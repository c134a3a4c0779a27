"""Random numbers that depend on the mini-batch and the place alone, not on which process draws them or when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch


@contextmanager
def drawing(seed: int, number: int, place: int | None, device: torch.device) -> Iterator[None]:
    """Within it torch draws numbers of their own; afterwards it goes on as before.

    Args:
        seed: of the training.
        number: of the forward pass.
        place: index of the stage; None: what all stages have in common, the user's code around the layers.
        device: the stage's.
    """
    text = f"{seed}, {number}, {place}"
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        own = int.from_bytes(blake2b(text.encode(), digest_size=7).digest())
        torch.default_generator.manual_seed(own)  # torch.manual_seed also formats stack traces for absent devices
        if device.type == "cuda":
            torch.cuda.manual_seed(own)
        yield
