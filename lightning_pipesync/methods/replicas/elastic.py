"""The elastic force between replicas and global weights, which attract each other.

Synchronous EASGD: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015, Eqs. 5 and 6.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch.optim import SGD

from lightning_pipesync.methods.replicas.global_weights import MakeOptimizer

#: The force times the number of replicas, if it is "auto": beta of EASGD.
BETA = 0.9


def force_of(force: float | Literal["auto"], num_replicas: int) -> float:
    """Returns the share of its distance to the global weights by which a replica is attracted, and they by it."""
    return BETA / num_replicas if force == "auto" else force


def attracted(num_replicas: int, force: float) -> MakeOptimizer:
    """Returns what makes the optimizer of the global weights, which each replica attracts by ``force``."""
    return partial(SGD, lr=num_replicas * force)


def check_force(name: str, force: float, num_replicas: int, replicas: str = "replicas") -> None:
    """Raises a ValueError if a force, the setting ``name``, moves the global weights beyond the replicas."""
    if (moved := num_replicas * force) > 1:
        raise ValueError(
            f"{name}={force!r} moves the global weights by {moved:.3g} times their distance to {num_replicas} "
            f"{replicas}, beyond them: set {1 / num_replicas:.3g} at most (EASGD: {replicas} * alpha <= 1)."
        )
