"""Which replicas average with each other in a round, if not all do (gossip).

A round replaces the weights x_i of replica i by sum_j W_ij x_j. W is a doubly stochastic mixing matrix: the average of
all replicas stays what it is, and each of them comes nearer to it. Here all weights in a row of W that are not zero are
equal.

[Note: the order of D-PSGD]
A step of D-PSGD (Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017,
Algorithm 1) is X_{k+1} = X_k W - gamma dF(X_k): the gradient is that of the weights before the average, and changes
the weights after it. That is ``period=1, overlap_steps=1`` with ``mixing_factor="progress"``: the average of x_k runs
while the gradient at x_k is computed. With ``overlap_steps=0`` a round ends a step, as in all local SGD:
X_{k+1} = (X_k - gamma dF(X_k)) W. The average of all replicas moves by the mean of their steps in either order.
"""

from __future__ import annotations

from random import Random
from typing import Literal

Neighbors = Literal["all", "ring", "random_pairs"]


def neighborhood(neighbors: Neighbors, replica: int, number: int, round_: int) -> list[int]:
    """Returns whose weights a replica averages in a round, in order: its neighbors and itself.

    Random pairs are drawn anew in each round, the same on all ranks; of an odd number one replica is left alone.

    Args:
        replica: the replica, in ``range(number)``.
        number: the number of replicas.
        round_: the number of the round, from which pairs are drawn.
    """
    if neighbors == "all":
        return list(range(number))
    if neighbors == "ring":
        return sorted({(replica + step) % number for step in (-1, 0, 1)})
    order = Random(round_).sample(range(number), number)
    place = order.index(replica)
    return sorted(order[place // 2 * 2 :][:2])
