"""Collectives in simulated time: by hand, and one host beside all of them."""

from __future__ import annotations

import pytest

from benchmarks.scale import measured, steps, work_of
from benchmarks.simulated_messages import Collectives, Group, Halves, Links, RingAllReduce, seconds_of
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.bench.models import TABLES

#: A message between hosts takes 1 ms, 0.5 ms of a processor, and 1 ms for each MB.
LINKS = Links(bandwidth=1e9, latency=1e-3, processor=5e-4, bandwidth_within=1e12, latency_within=1e-6)
RING = LinkCost(alpha=1.5e-3, beta=1e-9)
#: A receiver's notice, which the first message waits for.
NOTICE = 1e-3


def test_one_message_between_two_hosts() -> None:
    """Each sends a half of 1 MB at the same time, as links are full duplex."""
    took = seconds_of(LINKS, Group(2), Halves(1_024_000), alike=False)
    assert took == pytest.approx(NOTICE + 1e-3 + 0.512e-3 + 0.5e-3)


def test_a_ring_takes_what_equation_3_says() -> None:
    assert seconds_of(LINKS, Group(4), Halves(4_096_000), alike=False) == pytest.approx(
        NOTICE + RING.reduce_scatter(4_096_000, 4)
    )
    for size in (4_096, 4_096_000):  # a backend's has no other way for small ones
        took = seconds_of(LINKS, Group(4), RingAllReduce(size), alike=False)
        assert took == pytest.approx(2 * NOTICE + RING.all_reduce(size, 4))


def test_small_slices_travel_at_once() -> None:
    """All seven messages of 512 bytes are under way together; the processor takes one after the other."""
    took = seconds_of(LINKS, Group(8), Halves(4_096), alike=False)
    assert took == pytest.approx(NOTICE + 1e-3 + 7 * 0.5e-3, rel=0.01)


def test_a_torus_runs_along_rows_then_columns() -> None:
    size = 2**22
    took = Collectives(LINKS, hosts=16).half("torus2d", size)
    assert took == pytest.approx(2 * NOTICE + RING.reduce_scatter(size, 4) + RING.reduce_scatter(size / 4, 4))


def test_columns_of_a_hosts_ranks_share_its_link() -> None:
    """A row has the ranks of a host: its bytes cross the link of the host once, in as many rings as it has ranks."""
    size, quick = 2**24, Links(bandwidth=1e9, latency=1e-9, processor=1e-9, bandwidth_within=1e15, latency_within=0.0)
    for cards in (2, 4):
        took = Collectives(quick, 16, cards).half("torus2d", size, columns=cards)
        assert took == pytest.approx(size * 15 / 16 * 1e-9, rel=0.01)


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_few_bytes_pass_the_levels_of_a_tree(kind: str) -> None:
    """On 8 ranks three messages follow each other."""
    quick = Links(bandwidth=1e12, latency=1e-3, processor=0.0)
    took = seconds_of(quick, Group(8), Halves(1_024, kinds=(kind,), piece=2**16), alike=False)
    assert took == pytest.approx(NOTICE + 3e-3, rel=0.01)


@pytest.mark.parametrize("ranks", [8, 21, 32])
def test_a_broadcast_on_a_tree_takes_as_long_as_a_reduce(ranks: int) -> None:
    """Pieces follow each other: none waits until one of the other tree has passed all its levels."""
    reduce, broadcast = (
        seconds_of(LINKS, Group(ranks), Halves(2**24, kinds=(kind,), piece=2**19), alike=False)
        for kind in ("reduce_scatter", "all_gather")
    )
    assert broadcast < 1.25 * reduce


@pytest.mark.parametrize("group", [Group(8), Group(16, 2), Group(8, alike=2)], ids=["1 card", "2 cards", "columns"])
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("size", [2**12, 2**18, 2**22, 2**26])
def test_one_host_stands_for_all(group: Group, number: int, size: int) -> None:
    """Of 8 hosts all are simulated, with small slices all-to-all, rings, and rings in pieces."""
    everyone, one = (seconds_of(LINKS, group, Halves(size, number), alike=alike) for alike in (False, True))
    assert one == everyone


@pytest.mark.parametrize("size", [2**16, 2**25])
@pytest.mark.parametrize("cards", [1, 2])
def test_many_ranks_are_on_the_line_of_fewer(size: int, cards: int) -> None:
    group = Group(192, cards)
    took = Collectives(LINKS, 192 // cards, cards)._alike(group, size * 3, 1)
    assert took == pytest.approx(seconds_of(LINKS, group, Halves(size * 3), alike=True), rel=1e-3)


def test_deep_trees_are_on_the_line_of_shallow_ones() -> None:
    size, piece = 2**23, 2**18
    took = Collectives(LINKS, 64)._on_tree(64, 1, size, piece, 1)
    assert took == pytest.approx(seconds_of(LINKS, Group(64), Halves(size, piece=piece), alike=False), rel=0.05)


def test_a_plan_of_few_hosts_predicts_the_steps_of_more() -> None:
    """AlexNet's, on hosts with one rank each, whose communication takes about as long as computation."""
    links = Links(bandwidth=1.25e9, latency=1e-5, processor=1e-5)
    work = work_of(TABLES["alexnet"](), batch=256, flops=3e12)
    rows = steps(work, measured(Collectives(links, 4)).with_hosts(16), Collectives(links, 16))
    assert {row["method"] for row in rows} == {"ddp", "dear", "local_sgd", "pipe_sgd", "selsync"}
    for row in rows:
        assert row["predicted"] == pytest.approx(row["simulated"], rel=0.05), row
