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
    variance_growth: float = 0.0,
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
        variance_growth: beta: the variance is at most ``variance`` plus beta times the squared norm of the gradient
            (Assumption 4). It limits the rate, and is not in the bound: see :func:`largest_rate`.

    Raises:
        ValueError: the effective learning rate times L (1 + beta / N) exceeds 1, and Eq. 19 does not hold.
    """
    n = num_replicas
    rate = n / (n + 1) * learning_rate
    limit = 1 / (lipschitz * (1 + variance_growth / n))
    if rate > limit * (1 + 1e-12):  # the limit itself is allowed, however it was rounded
        raise ValueError(
            f"Theorem 1 needs an effective learning rate of at most 1 / (L (1 + beta / N)) = {limit:g}, got {rate:g} "
            f"(learning_rate={learning_rate!r})."
        )
    squared = zeta(mixing_matrix(n, elastic_force)) ** 2
    drift = ((1 + squared) / (1 - squared) * period - 1) * (1 + 1 / n) ** 2
    return (
        2 * initial_gap / (rate * num_iterations)
        + rate * lipschitz * variance / n
        + rate**2 * lipschitz**2 * variance * drift
    )


def largest_rate(
    *,
    num_replicas: int,
    elastic_force: float,
    period: int,
    lipschitz: float,
    variance_growth: float = 0.0,
    proved: bool = True,
) -> float:
    """Returns the largest learning rate eta of Theorem 1. Arguments as of :func:`error_bound`.

    With ``proved=False`` it is that of the only condition which the paper states, above Eq. 19:
    eta_eff L (1 + beta / N) <= 1. The theorem has no beta, and asks for a rate that is "chosen properly".

    [Note: the condition that the proof needs]
    Eq. 19 bounds the mean by what Eq. 31 keeps, plus L^2 / (K N) times the sum of |y_k - x^i,k|^2, less
    1 - eta_eff L (1 + beta / N) times the mean of |grad F(x^i,k)|^2. Eq. 24 bounds that sum by eta^2 times the squared
    norm of the sum over j of G_j (W^m - J), where m pulls lie between j and k: at most twice that of the noise in G_j
    plus twice that of its mean. In the noise, sigma^2 becomes the third term of Eq. 31, as the sum of zeta^2m, averaged
    over a period, is ((1 + zeta^2) / (1 - zeta^2) tau - 1) / 2. What grows with the gradient is left, and has to be no
    more than what is subtracted. No sum of zeta^2m is larger than tau / (1 - zeta^2), and none of zeta^m larger than
    tau / (1 - zeta). So the theorem holds if
    eta_eff L (1 + beta / N) + 2 eta^2 L^2 (beta tau / (1 - zeta^2) + tau^2 / (1 - zeta)^2) <= 1.
    """
    n = num_replicas
    linear = 1 + variance_growth / n
    if not proved:
        return (n + 1) / n / (lipschitz * linear)
    factor = zeta(mixing_matrix(n, elastic_force))
    drift = variance_growth * period / (1 - factor**2) + (period / (1 - factor)) ** 2
    square = 2 * (1 + 1 / n) ** 2 * drift
    effective = 2 / (linear + math.sqrt(linear**2 + 4 * square))  # the positive root, without a difference
    return (n + 1) / n * effective / lipschitz
