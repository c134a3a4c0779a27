"""The cost models, against numbers computed by hand."""

from __future__ import annotations

import random

import pytest

from lightning_pipesync.core.cost import LinkCost, StepCost, end_of_pipeline


def test_collectives() -> None:
    """4 ranks, 1 ms a message, 8 ns a byte (1 Gbit/s), 4 MB: three messages of 1 MB in each half."""
    link = LinkCost(alpha=1e-3, beta=8e-9)
    assert link.reduce_scatter(4e6, 4) == pytest.approx(3 * (1e-3 + 8e-3))
    assert link.all_gather(4e6, 4) == pytest.approx(27e-3)
    assert link.all_reduce(4e6, 4) == pytest.approx(54e-3)
    assert link.all_reduce(4e6, 1) == 0.0


def test_trees() -> None:
    """8 ranks, 1 ms a message, 8 ns a byte, 4 MB: 3 messages follow each other, and 4 MB pass a link in each half."""
    link = LinkCost(alpha=1e-3, beta=8e-9)
    assert link.tree_half(4e6, 8) == pytest.approx(3e-3 + 32e-3)
    assert link.tree_half(4e6, 5) == link.tree_half(4e6, 8)
    assert link.double_tree(4e6, 8) == pytest.approx(70e-3)
    assert link.tree_half(4e6, 8, pieces=16) == pytest.approx(3e-3 + 18 / 16 * 32e-3), "two pieces pass before the last"
    assert link.tree_half(4e6, 8, pieces=1) == pytest.approx(3 * (1e-3 + 32e-3)), "stored and forwarded as a whole"
    assert link.tree_half(4e6, 1) == link.double_tree(4e6, 1) == 0.0


def test_parameter_servers() -> None:
    """4 ranks, 1 ms a message, 8 ns a byte, 4 MB. A central server gets three messages of 4 MB and sends as many; two
    get and send three of 2 MB each; four get and send three of 1 MB each, the bytes of a ring with fewer latencies."""
    link = LinkCost(alpha=1e-3, beta=8e-9)
    assert link.central_server(4e6, 4) == pytest.approx(2 * (1e-3 + 3 * 32e-3))
    assert link.sharded_servers(4e6, 4, servers=1) == link.central_server(4e6, 4)
    assert link.sharded_servers(4e6, 4, servers=2) == pytest.approx(2 * (1e-3 + 3 * 16e-3))
    assert link.sharded_servers(4e6, 4) == pytest.approx(2 * (1e-3 + 3 * 8e-3))
    assert link.sharded_servers(4e6, 4) == pytest.approx(link.all_reduce(4e6, 4) - 4 * 1e-3)
    assert link.sharded_servers(4e6, 2) == pytest.approx(link.all_reduce(4e6, 2)), "one message, as in a ring"
    assert link.central_server(4e6, 1) == link.sharded_servers(4e6, 1) == 0.0


@pytest.mark.parametrize("servers", [0, 5])
def test_servers_are_some_of_the_ranks(servers: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to the number of ranks, 4, got {servers}"):
        LinkCost(1e-3, 8e-9).sharded_servers(4e6, 4, servers)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("halves", [1, 2])
def test_fit(halves: int, world_size: int) -> None:
    """It finds what the measurements were made with, and says how sure it is."""
    draw = random.Random(0)
    true = LinkCost(alpha=2e-4, beta=8e-9)
    sizes = [2.0**exponent for exponent in range(10, 27)] * 5
    exact = [halves * true.reduce_scatter(size, world_size) for size in sizes]
    fitted = LinkCost.fit(sizes, exact, world_size, halves)
    assert (fitted.alpha, fitted.beta) == (pytest.approx(2e-4), pytest.approx(8e-9))
    assert fitted.alpha_error < 1e-12

    noisy = LinkCost.fit(sizes, [time * draw.uniform(0.9, 1.1) for time in exact], world_size, halves)
    assert abs(noisy.alpha - 2e-4) < 4 * noisy.alpha_error < 0.2 * 2e-4
    assert abs(noisy.beta - 8e-9) < 4 * noisy.beta_error < 0.2 * 8e-9


def test_a_fit_is_never_negative() -> None:
    fitted = LinkCost.fit([1e6, 2e6], [1e-3, 2.1e-3], world_size=2)
    assert fitted.alpha == 0.0
    assert fitted.beta > 0


def test_a_fit_of_decreasing_times_has_no_rate() -> None:
    fitted = LinkCost.fit([1e6, 2e6], [2.1e-3, 2e-3], world_size=2)
    assert fitted.beta == 0.0
    assert fitted.alpha == pytest.approx(1.02e-3, rel=0.01)


@pytest.mark.parametrize(("sizes", "world_size"), [([1e6, 1e6], 2), ([1e6, 2e6], 1)])
def test_what_cannot_be_fitted(sizes: list[float], world_size: int) -> None:
    with pytest.raises(ValueError, match="2 ranks and 2 sizes"):
        LinkCost.fit(sizes, [1.0, 1.0], world_size)


@pytest.mark.parametrize(
    ("halves", "saved"),
    [(0.5, 0.0), (1.5, 0.5), (5.0, 1.0)],
    ids=["t_ag <= t_ff", "t_ff < t_ag <= 2 t_ff", "otherwise"],
)
def test_what_dear_saves(halves: float, saved: float) -> None:
    """Eq. 9, with t_bp = 2 t_ff and t_ff = 1."""
    step = StepCost(forward=1.0, backward=2.0, update=0.25, reduce_scatter=halves, all_gather=halves)
    assert step.baseline - step.two_halves == pytest.approx(saved)
    assert step.compute == 3.25
    assert step.serial == 3.25 + 2 * halves
    assert step.ratio == pytest.approx(2 * halves / 3)
    assert step.under_next_step == max(3.25, 2 * halves)
    assert step.compressed(4.0).under_next_step == max(3.25, 2 * halves / 4)


def test_max_speedup() -> None:
    """Eq. 6: linear while all is hidden; 64 ranks reach 25.5 of it if 1.51 compute times remain."""
    assert StepCost(1.0, 2.0, 0.0, 2.0, 1.0).max_speedup(64) == 64
    assert StepCost(1.0, 2.0, 0.0, 4.0, 4.0).max_speedup(64) == pytest.approx(64 * 3 / (3 + 8 - 2 - 1))


def test_pipeline() -> None:
    """The second waits for the first, the third for its gradient."""
    assert end_of_pipeline([1.0, 1.5, 9.0], [2.0, 2.0, 0.5]) == 9.5
    assert end_of_pipeline([1.0, 1.5], [2.0, 2.0]) == 5.0
    assert end_of_pipeline([], []) == 0.0
