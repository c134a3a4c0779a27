"""The timing models of Pipe-SGD against their formulas, written out."""

from __future__ import annotations

import math

import pytest

from benchmarks.theory.pipe_cost import PipeCost, convergence_bound, iterations_to_bound
from lightning_pipesync.core.cost import LinkCost

ALPHA, BETA, GAMMA, S, N = 1e-4, 8e-9, 1e-10, 2e-3, 1e8


def cost(world_size: int, compute: float = 1.0) -> PipeCost:
    parts = {"update": 0.1 * compute, "forward": 0.3 * compute, "backward": 0.6 * compute}
    return PipeCost(
        **parts, num_bytes=N, world_size=world_size, link=LinkCost(ALPHA, BETA), gamma=GAMMA, synchronization=S
    )


@pytest.mark.parametrize("p", [2, 4, 8])
def test_both_levels(p: int) -> None:
    comm = 2 * (p - 1) * ALPHA + 2 * (p - 1) / p * N * BETA + (p - 1) / p * N * GAMMA + S
    comm_in_4 = 2 * (p - 1) * 4 * ALPHA + 2 * (p - 1) / p * N * BETA + (p - 1) / p * N * GAMMA + 4 * S
    assert cost(p).communication() == pytest.approx(comm)
    assert cost(p).communication(4) == pytest.approx(comm_in_4)
    assert cost(p).step() == pytest.approx(max(1.0, comm))


def test_staleness_hides_communication_and_more_of_it_nothing_else() -> None:
    model = cost(4)
    assert model.step(0) == pytest.approx(model.compute + model.communication())
    assert model.step(1) == model.step(2) == model.step(7)
    assert model.step(0, segments=4) == pytest.approx(0.1 + 0.3 + 0.15 + max(0.45, model.communication(4)))


@pytest.mark.parametrize(("compute", "best"), [(0.01, (1, 1)), (0.5, (1, 1)), (1.0, (1, 1)), (3.0, (0, 2))])
def test_the_optimum_is_one_step_at_level_1(compute: float, best: tuple[int, int]) -> None:
    """Unless the backward pass hides it all (3.0), when synchronous segments are as fast, and not late."""
    assert cost(4, compute).optimum(segments=4) == best


def test_nothing_is_best_delayed_if_there_is_nothing_to_hide() -> None:
    alone = PipeCost(0.1, 0.3, 0.6, N, 1, LinkCost(ALPHA, BETA))
    assert alone.communication() == 0
    assert alone.optimum(segments=4) == (0, 1)
    assert alone.compute_bound_compression() == 1.0


def test_from_which_compression_on_computation_is_the_limit() -> None:
    model = cost(8)
    least = model.compute_bound_compression()
    assert model.step(compression=least) == pytest.approx(model.compute)
    assert model.step(compression=0.9 * least) > model.compute
    assert cost(8, 1000.0).compute_bound_compression() == 1.0
    assert cost(8, 1e-3).compute_bound_compression() == math.inf


def test_convergence_bound() -> None:
    """8 F L sqrt((k + 1) / T), by hand: 8 * 2 * 3 * sqrt(2 / 800) = 48 / 20."""
    assert convergence_bound(800, 1, radius=2, lipschitz=3) == pytest.approx(2.4)
    assert convergence_bound(400, 0, radius=2, lipschitz=3) == pytest.approx(2.4)
    assert convergence_bound(1600, 3, radius=2, lipschitz=3) == pytest.approx(2.4)
    assert iterations_to_bound(2.4, 1, radius=2, lipschitz=3) == pytest.approx(800)


def test_the_bound_may_take_what_pipelining_gains() -> None:
    """A step of 1 s computation: with as much communication (by gamma, here) it halves, and the steps double."""
    half = PipeCost(0.1, 0.3, 0.6, N, 4, LinkCost(0, 0), gamma=1 / (0.75 * N))
    assert half.communication() == pytest.approx(half.compute)
    assert half.bound_speedup() == pytest.approx(1.0)
    assert half.bound_speedup(staleness=2) == pytest.approx(2 / 3)
    slow = PipeCost(0.1, 0.3, 0.6, N, 4, LinkCost(0, 1e-7))
    assert slow.communication() == pytest.approx(15)
    assert slow.bound_speedup() == pytest.approx(16 / 30)
    assert slow.bound_speedup(compression=15) == pytest.approx(16 / 2), "compression is no delay"
