"""The timing models and the convergence bound of Pipe-SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_pipesync.core.cost import LinkCost


def convergence_bound(iterations: float, staleness: int, radius: float = 1.0, lipschitz: float = 1.0) -> float:
    """Returns 8 F L sqrt((k + 1) / T), Pipe-SGD's convergence rate for convex objectives (Pipe-SGD, "Convergence").

    An upper bound on the distance of the mean objective over T steps from the optimum; real trainings can be far below.

    Args:
        iterations: T.
        staleness: k; 0 is synchronous SGD.
        radius: F, of which the poster says no more: at least the distance of any weights from the optimum over sqrt(2).
        lipschitz: L, the bound on the norm of a gradient.

    [Note: why it holds]
    Let the update u = 1, 2, ... subtract eta_u g_u and project, where g_u was computed k updates before. By the usual
    expansion of the distance d_u from the optimum, g_u (w - w*) <= (d_u^2 - d_{u+1}^2) / (2 eta_u) + eta_u L^2 / 2 at
    the weights that it is applied to; from those that it was computed at, these are no further than
    L (eta_{u-1} + ... + eta_{u-k}). The sum over T gradients with d^2 / 2 <= F^2 and eta_u = s / sqrt(u) is at most
    F^2 sqrt(T) / s + (2 k + 1) s L^2 sqrt(T). With s = F / (L sqrt(2 (k + 1))) (:func:`first_step_size`) the mean is at
    most 2 sqrt(2) F L sqrt((k + 1) / T). The proof is that of J. Langford, A. Smola, M. Zinkevich, "Slow Learners are
    Fast", 2009, with constants of one's own; the poster's 8 is 2.8 times as large.
    """
    return 8 * radius * lipschitz * math.sqrt((staleness + 1) / iterations)


def first_step_size(staleness: int, radius: float, lipschitz: float) -> float:
    """Returns s: with step sizes s / sqrt(u), u = 1, 2, ..., :func:`convergence_bound` holds. Arguments as there."""
    return radius / (lipschitz * math.sqrt(2 * (staleness + 1)))


def strongly_convex_bound(
    iterations: float, staleness: int, strong_convexity: float, radius: float = 1.0, lipschitz: float = 1.0
) -> float:
    """Returns Pipe-SGD's O(log T / T) for strongly convex objectives, with constants: the poster gives none.

    It is (k mu F^2 + (k + 1/2) L^2 / mu (1 + log T)) / T, for step sizes 1 / (mu u), u = 1, 2, ... In the sum of the
    note of :func:`convergence_bound` mu d^2 / 2 is subtracted for each gradient, at the weights that it was computed
    at. With these step sizes what telescopes adds mu d^2 / 2 for each update, at the weights that it is applied to: all
    but k of them cancel, and the step sizes sum to at most (1 + log T) / mu.

    Args:
        strong_convexity: mu.
        iterations, staleness, radius, lipschitz: as for :func:`convergence_bound`.
    """
    noise = (staleness + 0.5) * lipschitz**2 / strong_convexity * (1 + math.log(iterations))
    return (staleness * strong_convexity * radius**2 + noise) / iterations


def iterations_to_bound(bound: float, staleness: int, radius: float = 1.0, lipschitz: float = 1.0) -> float:
    """Returns T at which :func:`convergence_bound` is ``bound``: k + 1 times that of synchronous SGD."""
    return (staleness + 1) * (8 * radius * lipschitz / bound) ** 2


@dataclass(frozen=True)
class PipeCost:
    """The parts of a step of Pipe-SGD, in seconds (Pipe-SGD, "Timing Model and Notation").

    Attributes:
        update: l_up.
        forward: l_for.
        backward: l_back.
        num_bytes: n, the size of the gradient.
        world_size: p.
        link: alpha and beta.
        gamma: seconds to add two bytes.
        synchronization: S, seconds until all ranks have started an all-reduce.
    """

    update: float
    forward: float
    backward: float
    num_bytes: float
    world_size: int
    link: LinkCost
    gamma: float = 0.0
    synchronization: float = 0.0

    @property
    def compute(self) -> float:
        """l_up + l_comp: a step without communication."""
        return self.update + self.forward + self.backward

    def communication(self, segments: int = 1, compression: float = 1.0) -> float:
        """Returns l_comm: an all-reduce of the gradient around a ring, in L ``segments``.

        Args:
            segments: L; 1 is level 1.
            compression: the ratio of the size of the gradient to its size on the wire.
        """
        fixed = 2 * (self.world_size - 1) * self.link.alpha + self.synchronization
        return segments * fixed + self._transfer / compression + self._addition

    def step(self, staleness: int = 1, segments: int = 1, compression: float = 1.0) -> float:
        """Returns l_total / T with limited resources: one step computes and one communicates at a time (Fig. 6).

        It is the same for every staleness above 0. With staleness 0, one segment overlaps with nothing; several
        segments overlap with the rest of the backward pass after the first one.
        """
        communication = self.communication(segments, compression)
        if staleness > 0:
            return max(self.compute, communication)
        first = self.backward / segments
        return self.forward + first + max(self.backward - first, communication) + self.update

    def bound_speedup(self, staleness: int = 1, segments: int = 1, compression: float = 1.0) -> float:
        """Returns the speed-up in time to a convergence bound over uncompressed synchronous steps.

        A lower bound of the speed-up for a convex objective; below 1 pipelining may be slower. If the delay costs no
        steps, the speed-up is ``step(0) / step(staleness)``.
        """
        steps = iterations_to_bound(1.0, staleness) / iterations_to_bound(1.0, 0)
        return self.step(0, segments) / (steps * self.step(staleness, segments, compression))

    def optimum(self, segments: int) -> tuple[int, int]:
        """Returns the best staleness k* and the best level of pipelining, with ``segments`` segments at level 2.

        Of equally fast choices it is the one with the least staleness, then the lowest level. It is (1, 1), as on the
        poster, unless the backward pass hides the communication of synchronous segments, or there is none.
        """
        choices = [(staleness, level) for staleness in (0, 1) for level in (1, 2)]
        return min(choices, key=lambda choice: (self.step(choice[0], segments if choice[1] == 2 else 1), choice))

    def compute_bound_compression(self) -> float:
        """Returns the least compression with which a step takes no longer than its computation; infinite if none does.

        From there on linear speed-up is possible: the communication ratio is below 50 %.
        """
        left = self.compute - self.communication(compression=math.inf)
        if self._transfer == 0:
            return 1.0
        return max(1.0, self._transfer / left) if left > 0 else math.inf

    @property
    def _transfer(self) -> float:
        return 2 * self._share * self.num_bytes * self.link.beta

    @property
    def _addition(self) -> float:
        return self._share * self.num_bytes * self.gamma

    @property
    def _share(self) -> float:
        return (self.world_size - 1) / self.world_size
