"""The convergence theory of the elastic force and the synchronization period (paper, Section III-C and Appendix A)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pull_matrix(replica: int, num_replicas: int, elastic_force: float) -> Tensor:
    """Returns M^l, which pulls one replica and the master together (Lemma 1).

    Args:
        replica: l, from 1 on.
        num_replicas: N.
        elastic_force: alpha.

    Returns:
        Shape ``[num_replicas + 1, num_replicas + 1]``, fp64; the master is last.
    """
    matrix = torch.eye(num_replicas + 1, dtype=torch.float64)
    i = replica - 1
    matrix[i, i] = matrix[-1, -1] = 1 - elastic_force
    matrix[i, -1] = matrix[-1, i] = elastic_force
    return matrix


def mixing_matrix(num_replicas: int, elastic_force: float) -> Tensor:
    """Returns W = M^1 ... M^N, the effect of a round of pulls on the replicas and the master (Lemma 1).

    Weights as columns of X become ``X @ W``. W is doubly stochastic, not symmetric.

    Returns:
        Shape ``[num_replicas + 1, num_replicas + 1]``, fp64; the master is last.
    """
    mixed = torch.eye(num_replicas + 1, dtype=torch.float64)
    for replica in range(1, num_replicas + 1):
        mixed = mixed @ pull_matrix(replica, num_replicas, elastic_force)
    return mixed


def zeta(mixing: Tensor) -> float:
    """Returns the operator norm of W - J (Eq. 26), which bounds the contraction of the distance to the mean by a round.

    It is below 1 for every elastic force between 0 and 1.
    """
    mean = torch.full_like(mixing, 1 / len(mixing))
    return float(torch.linalg.matrix_norm(mixing - mean, ord=2))


def error_bound(
    *,
    num_replicas: int,
    elastic_force: float,
    period: int,
    learning_rate: float,
    lipschitz: float,
    variance: float,
    initial_gap: float,
    num_iterations: float = math.inf,
) -> float:
    """Returns the bound on the mean squared norm of the gradient (Theorem 1, Eq. 3).

    Args:
        num_replicas: N.
        elastic_force: alpha.
        period: tau.
        learning_rate: eta; the effective learning rate is N / (N + 1) times it.
        lipschitz: L, the Lipschitz constant of the gradient.
        variance: sigma squared, the variance of the gradient of a mini-batch.
        initial_gap: F(y_0) - F_inf.
        num_iterations: K.

    Raises:
        ValueError: the effective learning rate times L exceeds 1, and the theorem does not hold.
    """
    n = num_replicas
    rate = n / (n + 1) * learning_rate
    if rate * lipschitz > 1:
        raise ValueError(
            f"Theorem 1 needs an effective learning rate of at most 1 / L = {1 / lipschitz:g}, got {rate:g} "
            f"(learning_rate={learning_rate!r})."
        )
    squared = zeta(mixing_matrix(n, elastic_force)) ** 2
    drift = ((1 + squared) / (1 - squared) * period - 1) * (1 + 1 / n) ** 2
    return (
        2 * initial_gap / (rate * num_iterations)
        + rate * lipschitz * variance / n
        + rate**2 * lipschitz**2 * variance * drift
    )
