"""What theory says about elastic averaging."""

from __future__ import annotations

import pytest
import torch

from benchmarks.theory.elastic_averaging import error_bound, largest_rate, mixing_matrix, pull_matrix, zeta

PAIRS = [(n, alpha) for n in (1, 2, 4, 8, 50) for alpha in (0.01, 0.1, 0.3, 0.5, 0.9)]


def test_matrices_of_lemma_1() -> None:
    """Those that the paper writes out for N = 2."""
    a = 0.25
    assert torch.equal(pull_matrix(1, 2, a), torch.tensor([[1 - a, 0, a], [0, 1, 0], [a, 0, 1 - a]]).double())
    assert torch.equal(pull_matrix(2, 2, a), torch.tensor([[1, 0, 0], [0, 1 - a, a], [0, a, 1 - a]]).double())
    assert torch.equal(mixing_matrix(2, a), pull_matrix(1, 2, a) @ pull_matrix(2, 2, a))


@pytest.mark.parametrize(("num_replicas", "elastic_force"), PAIRS)
def test_mixing_is_doubly_stochastic_and_contracts_by_zeta(num_replicas: int, elastic_force: float) -> None:
    mixing = mixing_matrix(num_replicas, elastic_force)
    ones = torch.ones(num_replicas + 1, dtype=torch.float64)
    torch.testing.assert_close(mixing.sum(dim=0), ones)
    torch.testing.assert_close(mixing.sum(dim=1), ones)
    assert (mixing >= 0).all()
    assert (mixing @ mixing > 0).all()  # primitive (Lemma 3)
    shrinks = zeta(mixing)
    assert 0 <= shrinks < 1
    weights = torch.randn(5, num_replicas + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    apart = weights - weights.mean(dim=1, keepdim=True)
    mixed = weights @ mixing
    torch.testing.assert_close(mixed.mean(dim=1), weights.mean(dim=1))  # the mean of all stays
    still_apart = mixed - mixed.mean(dim=1, keepdim=True)
    assert still_apart.norm() <= shrinks * apart.norm() + 1e-12


def test_error_bound_grows_with_the_period_and_falls_with_iterations() -> None:
    def bound(period: int = 1, num_iterations: float = 1000.0, elastic_force: float = 0.3) -> float:
        return error_bound(
            num_replicas=4, elastic_force=elastic_force, period=period, learning_rate=0.01, lipschitz=2.0,
            variance=1.0, initial_gap=3.0, num_iterations=num_iterations,
        )  # fmt: skip

    assert bound(1) < bound(2) < bound(10)
    assert bound(num_iterations=2000) < bound(num_iterations=1000)
    assert bound(elastic_force=0.3) < bound(elastic_force=0.01)
    # By hand, for N = 4: eta_eff = 0.008, and with W of one's own.
    squared = zeta(mixing_matrix(4, 0.3)) ** 2
    drift = 0.008**2 * 4 * ((1 + squared) / (1 - squared) * 2 - 1) * (5 / 4) ** 2
    assert bound(2) == pytest.approx(2 * 3 / (0.008 * 1000) + 0.008 * 2 / 4 + drift)


def test_error_bound_refuses_a_rate_that_is_too_high() -> None:
    with pytest.raises(ValueError, match="learning_rate=1"):
        error_bound(
            num_replicas=4, elastic_force=0.1, period=1, learning_rate=1.0, lipschitz=2.0, variance=1.0,
            initial_gap=1.0,
        )  # fmt: skip


@pytest.mark.parametrize(("growth", "limit"), [(0.0, 0.625), (1.0, 0.5)])
def test_error_bound_holds_up_to_the_rate_that_the_paper_states(growth: float, limit: float) -> None:
    """eta_eff L (1 + beta / N) <= 1, with N = 4 and L = 2."""
    shared = {"num_replicas": 4, "elastic_force": 0.1, "period": 1, "lipschitz": 2.0, "variance_growth": growth}
    rate = largest_rate(**shared, proved=False)
    assert rate == pytest.approx(limit)
    gaps = {"variance": 1.0, "initial_gap": 1.0}
    assert error_bound(**shared, **gaps, learning_rate=rate) > 0
    with pytest.raises(ValueError, match=r"L \(1 \+ beta / N\)"):
        error_bound(**shared, **gaps, learning_rate=1.01 * rate)


@pytest.mark.parametrize("growth", [0.0, 3.0])
@pytest.mark.parametrize("period", [1, 5])
@pytest.mark.parametrize(("num_replicas", "elastic_force"), PAIRS)
def test_the_largest_rate_meets_the_condition_of_the_proof(
    num_replicas: int, elastic_force: float, period: int, growth: float
) -> None:
    shared = {"num_replicas": num_replicas, "elastic_force": elastic_force, "period": period, "lipschitz": 2.0}
    rate = largest_rate(**shared, variance_growth=growth)
    factor = zeta(mixing_matrix(num_replicas, elastic_force))
    drift = growth * period / (1 - factor**2) + period**2 / (1 - factor) ** 2
    effective = num_replicas / (num_replicas + 1) * rate
    assert effective * 2 * (1 + growth / num_replicas) + 2 * rate**2 * 4 * drift == pytest.approx(1)
    assert rate < largest_rate(**shared, variance_growth=growth, proved=False)


def test_sums_of_the_contraction_in_the_note() -> None:
    """Over the steps before one, by how many pulls lie between: averaged over a period, and at most."""
    for factor, period in ((0.3, 1), (0.8, 4), (0.95, 7)):
        blocks = 600
        squared, plain = [], []
        for k in range((blocks - 1) * period, blocks * period):
            pulls = [k // period - j // period for j in range(k)]
            squared.append(sum(factor ** (2 * m) for m in pulls))
            plain.append(sum(factor**m for m in pulls))
        mean = sum(squared) / period
        assert mean == pytest.approx(((1 + factor**2) / (1 - factor**2) * period - 1) / 2)
        assert max(squared) <= period / (1 - factor**2)
        assert max(plain) <= period / (1 - factor)
