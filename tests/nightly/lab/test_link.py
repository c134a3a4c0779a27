"""What the network costs, measured during a training: once, and with few bytes where it is slow."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_pipesync.core.comm import link
from lightning_pipesync.methods.dear import eager
from tests.support.harness import on_ranks


class SlowTransport:
    """All-gathers on two ranks, each of which takes the time of half of its bytes on a link of ``rate`` bytes a second.

    It is its own clock, which stands still otherwise.
    """

    device = torch.device("cpu")
    world_size = 2

    def __init__(self, rate: float) -> None:
        self.rate, self.sent, self.sizes, self.seconds = rate, 0.0, set[int](), 0.0

    def all_gather(self, flat: Tensor) -> mock.Mock:
        self.sent += flat.nbytes / 2
        self.sizes.add(flat.nbytes)
        return mock.Mock(wait=partial(self.pass_time, flat.nbytes / 2 / self.rate))

    def pass_time(self, seconds: float) -> None:
        self.seconds += seconds

    def now(self) -> float:
        return self.seconds

    def seconds_between(self, begin: float, end: float) -> float:
        return end - begin

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, value]


@pytest.mark.parametrize(
    ("rate", "buckets", "smaller"), [(25e6, [25 * 2**20], 104_167 * 2), (1e12, [100_000, 300_000], 200_000)]
)
def test_a_slow_network_is_measured_with_fewer_bytes(rate: float, buckets: list[int], smaller: int) -> None:
    transport = SlowTransport(rate)
    with mock.patch.object(link, "Clock", return_value=transport):
        cost = link.measure_link(transport, buckets)  # type: ignore[arg-type]
    assert sorted(transport.sizes - {link.FIRST}) == pytest.approx([smaller, link.FACTOR * smaller], abs=16)
    assert transport.sent < rate * link.SECONDS + 2 * link.FIRST
    assert cost.beta == pytest.approx(1 / rate)
    assert cost.alpha == pytest.approx(0, abs=1e-9)


def train_and_count() -> tuple[int, int]:
    """Returns how many schedules of early all-gathers were made, and how often the network was measured."""
    from tests.nightly.methods.test_dear_search import train

    schedules, links = mock.Mock(wraps=eager.choose_early_gathers), mock.Mock(wraps=link.measure_link)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "choose_early_gathers", schedules)
        patch.setattr(eager, "measure_link", links)
        train("sgd", {"fusion": "grid", "overlap": "eager"})
    return schedules.call_count, links.call_count


def test_a_search_measures_the_network_once() -> None:
    (schedules, links), (_, links_of_other) = on_ranks(train_and_count, 2)
    assert schedules > 1
    assert links == links_of_other == 1
