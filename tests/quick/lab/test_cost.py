"""The cost models and the limits of a step, against numbers computed by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.predictions.cluster import BackendCost, Cluster, MeasuredCost, compression_of
from lightning_pipesync.lab.predictions.limits import LayerTimes, StepCost, end_of_pipeline
from lightning_pipesync.lab.predictions.work import Profile, predict_ddp
from lightning_pipesync.methods.dear.schedule import BucketTimes, choose_early_gathers, simulate_step


def test_collectives() -> None:
    """4 ranks, 1 ms a message, 8 ns a byte (1 Gbit/s), 4 MB: three messages of 1 MB in each half."""
    link = LinkCost(alpha=1e-3, beta=8e-9)
    assert link.reduce_scatter(4e6, 4) == pytest.approx(3 * (1e-3 + 8e-3))
    assert link.all_gather(4e6, 4) == pytest.approx(27e-3)
    assert link.all_reduce(4e6, 4) == pytest.approx(54e-3)
    assert link.all_reduce(4e6, 1) == 0.0


def test_trees() -> None:
    """8 ranks, 1 ms a message, 8 ns a byte, 4 MB: 3 messages follow each other, and 4 MB pass a link in each half."""
    link = MeasuredCost(alpha=1e-3, beta=8e-9)
    assert link.tree_half(4e6, 8) == pytest.approx(3e-3 + 32e-3)
    assert link.tree_half(4e6, 5) == link.tree_half(4e6, 8)
    assert link.double_tree(4e6, 8) == pytest.approx(70e-3)
    assert link.tree_half(4e6, 8, pieces=16) == pytest.approx(3e-3 + 18 / 16 * 32e-3), "two pieces pass before the last"
    assert link.tree_half(4e6, 8, pieces=1) == pytest.approx(3 * (1e-3 + 32e-3)), "stored and forwarded as a whole"
    assert link.tree_half(4e6, 1) == link.double_tree(4e6, 1) == 0.0


def test_parameter_servers() -> None:
    """4 ranks, 1 ms a message, 8 ns a byte, 4 MB. A central server gets three messages of 4 MB and sends as many; two
    get and send three of 2 MB each; four get and send three of 1 MB each, the bytes of a ring with fewer latencies."""
    link = MeasuredCost(alpha=1e-3, beta=8e-9)
    assert link.sharded_servers(4e6, 4, servers=1) == pytest.approx(2 * (1e-3 + 3 * 32e-3))
    assert link.sharded_servers(4e6, 4, servers=2) == pytest.approx(2 * (1e-3 + 3 * 16e-3))
    assert link.sharded_servers(4e6, 4) == pytest.approx(2 * (1e-3 + 3 * 8e-3))
    assert link.sharded_servers(4e6, 4) == pytest.approx(link.all_reduce(4e6, 4) - 4 * 1e-3)
    assert link.sharded_servers(4e6, 2) == pytest.approx(link.all_reduce(4e6, 2)), "one message, as in a ring"
    assert link.sharded_servers(4e6, 1, servers=1) == link.sharded_servers(4e6, 1) == 0.0


@pytest.mark.parametrize("servers", [0, 5])
def test_servers_are_some_of_the_ranks(servers: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to the number of ranks, 4, got {servers}"):
        MeasuredCost(1e-3, 8e-9).sharded_servers(4e6, 4, servers)


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


def test_ddp_is_predicted_bucket_by_bucket() -> None:
    """Two buckets of 2 MiB: the first is ready after 2 of 3 gradients, the second with the last one."""
    tensors = [LayerTimes(1.0, 0.5, MIB), LayerTimes(2.0, 0.2, MIB), LayerTimes(3.0, 0.0, 2 * MIB)]
    profile = Profile(forward=1.0, backward=3.0, update=0.5, tensors=tensors)
    link = LinkCost(alpha=0.25, beta=1.0 / MIB)  # an all-reduce of n MiB on 2 ranks takes 0.5 + n seconds
    assert predict_ddp(profile, link, 2, bucket_mb=2.0) == pytest.approx(1.0 + (2.0 + 2.5 + 2.5) + 0.5)
    assert predict_ddp(profile, link, 2, bucket_mb=100.0) == pytest.approx(1.0 + (3.0 + 4.5) + 0.5)
    assert predict_ddp(profile, LinkCost(0.0, 0.0), 2, bucket_mb=2.0) == pytest.approx(4.5)


# --- of layers that differ --------------------------------------------------------------------------------------------


def cost_of(ratio: float, update: float = 0.0) -> StepCost:
    return StepCost(forward=1.0, backward=2.0, update=update, reduce_scatter=1.5 * ratio, all_gather=1.5 * ratio)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.33, 2.0])
def test_many_equal_layers_have_the_limits_of_the_papers(ratio: float) -> None:
    cost = cost_of(ratio, update=0.25)
    layers = [LayerTimes(ready=2 - i / 500, needed=i / 1000, num_bytes=8) for i in range(1000)]
    names = ["baseline", "two_halves", "eager", "under_forward", "reduce_scatter_only", "all_gather_only"]
    for name in (*names, "under_next_step", "serial"):
        assert getattr(replace(cost, tensors=layers), name) == pytest.approx(getattr(cost, name), rel=0.005), name


def test_embeddings_by_hand() -> None:
    """A fifth of all values is ready at the end of backward, and needed at the beginning of forward."""
    layers = [LayerTimes(ready=2.0, needed=0.0, num_bytes=20)]
    layers += [LayerTimes(ready=2 - i / 40, needed=i / 80, num_bytes=1) for i in range(1, 81)]
    limits = replace(cost_of(1.0), tensors=layers)
    assert limits.eager == pytest.approx(3.0 + 0.2 * 3.0), "its two halves are hidden under nothing"
    assert limits.baseline == pytest.approx(4.0), "the all-reduces of the others keep the network busy"
    assert limits.two_halves == pytest.approx(2.0 + 0.3 + 1.5), "a reduce-scatter at the end, then all all-gathers"
    assert limits.serial == 6.0


@pytest.mark.parametrize("seed", range(5))
def test_no_simulated_step_is_shorter(seed: int) -> None:
    draw = random.Random(seed)
    ratio = draw.choice([0.67, 0.8, 1.0, 1.25, 1.33])
    moments = sorted(draw.uniform(0.0, 2.0) for _ in range(12))
    layers = [LayerTimes(m, 1 - m / 2, draw.randint(1, 100)) for m in [*moments, 2.0]]
    share = 1.5 * ratio / sum(layer.num_bytes for layer in layers)
    buckets = [BucketTimes(x.ready, x.needed, share * x.num_bytes, share * x.num_bytes) for x in layers]
    limits = replace(cost_of(ratio), tensors=layers)
    paper, eager = (simulate_step(buckets, 1.0, 2.0, early).seconds for early in (None, choose_early_gathers(buckets)))
    assert paper >= limits.two_halves - 1e-9
    assert limits.eager - 1e-9 <= eager <= paper
    assert limits.eager <= limits.two_halves + 1e-9


# --- as measured ------------------------------------------------------------------------------------------------------


def test_a_cost_is_as_measured_among_as_many_ranks() -> None:
    """Four sizes of all-reduces on a line, of which one took twice as long."""
    line, sizes = LinkCost(1e-4, 1e-8), [2**16, 2**18, 2**20, 2**22]
    seconds = [(2 if size == 2**18 else 1) * line.all_reduce(size, 8) for size in sizes]
    cost = MeasuredCost.measured(sizes, seconds, 8, halves=2)
    for size, took in zip(sizes, seconds, strict=True):
        assert cost.all_reduce(size, 8) == pytest.approx(took)
        assert cost.reduce_scatter(size, 8) == pytest.approx(took / 2)
    between = cost.all_reduce(2**19, 8) / line.all_reduce(2**19, 8)
    assert between == pytest.approx(1.5, rel=0.05)
    fitted = LinkCost(cost.alpha, cost.beta)
    assert cost.all_reduce(2**18, 4) == fitted.all_reduce(2**18, 4), "among other ranks it is the line"
    slower = replace(cost, beta=2 * cost.beta)
    assert slower.all_reduce(2**22, 8) == pytest.approx(2 * seconds[-1], rel=0.05)


def test_wires_that_are_gathered_grow_with_the_number_of_ranks() -> None:
    """P - 1 times all that is encoded, where others send 2 (P - 1) / P of it."""
    ratio = 16384 / 120
    assert compression_of("chunked_topk", 2) == pytest.approx(ratio)
    assert compression_of("chunked_topk", 8) == pytest.approx(ratio / 4)
    assert compression_of("int8", 8) == compression_of("int8", 2)
    size, bandwidth, at_4 = 2**30, 1e8, compression_of("chunked_topk", 4)
    links = {"chunked_topk": MeasuredCost(0.0, 1 / at_4 / bandwidth), "none": MeasuredCost(0.0, 1 / bandwidth)}
    at = Cluster(4, bandwidth, BackendCost(0.0, 1 / bandwidth), links["none"], links)
    for hosts in (4, 16):
        cluster = at.with_hosts(hosts)
        seconds = (hosts - 1) * size / ratio / bandwidth
        assert cluster.all_reduces["chunked_topk"].all_reduce(size, hosts) == pytest.approx(seconds)
        assert cluster.seconds_on_wire(size, "chunked_topk") == pytest.approx(seconds)
        assert cluster.all_reduces["none"] == links["none"]
        half = cluster.with_bandwidth(bandwidth / 2).all_reduces["chunked_topk"]
        assert half.all_reduce(size, hosts) == pytest.approx(2 * seconds)


def test_ddp_on_many_hosts_is_not_in_a_flat_ring() -> None:
    """Among as many ranks as were measured it is as measured, and then the faster of two algorithms."""
    backend = BackendCost(1e-3, 1e-9, world_size=4, ratios=[(1.0, 2.0), (1e9, 2.0)])
    ring = LinkCost(1e-3, 1e-9)
    assert backend.all_reduce(MIB, 4) == pytest.approx(2 * ring.all_reduce(MIB, 4))
    assert backend.all_reduce(MIB, 4096) == pytest.approx(2 * (12e-3 + MIB * 1e-9))
    assert [backend.chosen(MIB, hosts) for hosts in (4, 2, 4096)] == ["measured", "ring", "tree"]
    assert backend.chosen(2**34, 64) == "ring", "whose latency hardly counts, and which sends fewer bytes"
    gloo = replace(backend, ring_up_to=16)
    assert gloo.all_reduce(MIB, 16) == pytest.approx(ring.all_reduce(MIB, 16))
    assert gloo.all_reduce(MIB, 17) < 0.5 * ring.all_reduce(MIB, 17)
