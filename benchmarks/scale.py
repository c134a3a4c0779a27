"""``python -m benchmarks.scale``: what a plan predicts for up to thousands of hosts, beside a simulation.

A plan measures simulated hosts, few of them, as ``pipesync plan`` measures real ones, and predicts for others. Then
each method's step is simulated with the settings of its prediction: its collectives message by message, and its
operations one after the other as its queue runs them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path
from statistics import median
from typing import Any

import torch

import benchmarks.baselines  # noqa: F401 - adds its networks to the models
from benchmarks import command
from benchmarks.simulated_messages import Collectives, Links
from lightning_pipesync.core.comm.hops import MIN_SLICE_BYTES
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.bench.benchmark import Command, progress_bar
from lightning_pipesync.lab.bench.models import TABLES, ModelTable
from lightning_pipesync.lab.bench.pictures import look_of, picture
from lightning_pipesync.lab.bench.step import predict_ddp
from lightning_pipesync.lab.bench.tables import environment, table
from lightning_pipesync.lab.plan.costs import FACTOR, LEAST, MOST, sizes_for
from lightning_pipesync.lab.plan.predictions import considered
from lightning_pipesync.lab.predictions import dear, local_sgd
from lightning_pipesync.lab.predictions.cluster import BackendCost, Cluster, MeasuredCost
from lightning_pipesync.lab.predictions.entry import AVERAGES, Prediction
from lightning_pipesync.lab.predictions.limits import LayerTimes
from lightning_pipesync.lab.predictions.work import Profile, Work

#: Samples of a rank's mini-batch.
BATCHES = {"resnet50": 256, "bert-base": 256, "gpt2": 8}

#: A method leaves DDP behind that is so many times as fast; a prediction is off that differs by more than this share.
AHEAD, OFF = 1.1, 0.05

#: Why a plan is off in a ring of ranks of which several are on a host.
NEIGHBORS = "a rank counts as a host: within one a ring's latencies are short, and hide under the bytes of its link"


@dataclass(frozen=True, kw_only=True)
class Scale(Command):
    """Predicts and simulates a step of each method among many hosts.

    Attributes:
        networks: Of the tables of emulated models; with batches of 256 images or sentences of 64 tokens, GPT-2 with 8
            sequences of 1,024 tokens.
        hosts: Numbers of hosts.
        gbits: Gbit/s of a host's link.
        cards: Ranks of a host, which share its link.
        measured_hosts: The number of hosts whose costs the plan measures.
        tflops: What a card computes, in 10^12 floating-point operations per second.
        latency_us: Of a message between hosts, one way.
        processor_us: Time of a rank's processor for a message.
        output: Folder for scale.json, scale.md and scale.png.
    """

    networks: tuple[str, ...] = ("resnet50", "bert-base", "gpt2")
    hosts: tuple[int, ...] = (8, 64, 512, 4096)
    gbits: tuple[float, ...] = (1, 10, 25, 100)
    cards: tuple[int, ...] = (1, 2, 4, 8)
    measured_hosts: int = 4
    tflops: float = 60
    latency_us: float = 25
    processor_us: float = 25

    name = "scale"

    def __post_init__(self) -> None:
        self._check_positive("measured_hosts", "tflops", "latency_us", "processor_us")
        for name in ("hosts", "gbits", "cards"):
            self._check_all_positive(name, getattr(self, name), "numbers")
        for network in self.networks:
            if network not in BATCHES:
                raise ValueError(f"networks: {network!r} is not known; there are {', '.join(BATCHES)}.")

    def results(self) -> list[dict[str, Any]]:
        """Returns settings, environment, and ``rows``: of each method its settings, and seconds of a step."""
        works = {name: work_of(TABLES[name](), BATCHES[name], 1e12 * self.tflops) for name in self.networks}
        rows = []
        with progress_bar("", len(self.cards) * len(self.gbits)) as advance:
            for cards, gbit in product(self.cards, self.gbits):
                links = Links(gbit * 1e9 / 8, 1e-6 * self.latency_us, 1e-6 * self.processor_us)
                plan = measured(Collectives(links, self.measured_hosts, cards))
                for hosts, network in product(self.hosts, self.networks):
                    cluster, simulated = plan.with_hosts(hosts * cards), Collectives(links, hosts, cards)
                    where = {"network": network, "hosts": hosts, "cards": cards, "gbit": gbit}
                    rows += [{**where, **row} for row in steps(works[network], cluster, simulated)]
                advance(f"{cards} cards, {gbit:g} Gbit/s")
        return [{"settings": self.settings(), "environment": environment(), "rows": rows}]

    def report(self, results: list[dict[str, Any]]) -> str:
        [result] = results
        return as_markdown(result["rows"])

    def draw(self, results: list[dict[str, Any]]) -> None:
        [result] = results
        draw_speedups(result["rows"], self.output / "scale.png")


def work_of(network: ModelTable, batch: int, flops: float) -> Work:
    """Returns a step of a rank by the operations of its layers; backward takes twice as long as forward."""
    shares = [layer.forward_flops / network.forward_flops for layer in network.layers]
    forward, begins = batch * network.forward_flops / flops, [0.0, *accumulate(shares)]
    tensors = [
        LayerTimes(2 * forward * (1 - begin), forward * begin, 4 * math.prod(shape), shape)
        for begin, layer in reversed([*zip(begins, network.layers, strict=False)])
        for shape in [*layer.tensors.values()][::-1]
    ]
    return Work(Profile(forward, 2 * forward, 0.0, tensors))


def measured(simulated: Collectives) -> Cluster:
    """Returns what a plan measures on such hosts, as :func:`~lightning_pipesync.lab.plan.measure.measure_cluster`.

    It is for other hosts, so that it needs no costs of a torus and of trees.
    """
    ranks, bandwidth = simulated.world_size, simulated.links.bandwidth
    sizes = sizes_for(FACTOR**20, bandwidth)

    def cost(seconds: Any, num_halves: int) -> MeasuredCost:
        return MeasuredCost.measured(sizes, [seconds(size) for size in sizes], ranks, num_halves)

    def in_a_row(size: int) -> float:
        number = min(MOST, max(LEAST, max(sizes) // size))
        return simulated.half("flat", size, number) / number

    backend = BackendCost(**asdict(cost(lambda size: simulated.all_reduce(size, "ring"), 2)))
    whole = {"none": cost(lambda size: simulated.all_reduce(size, "halves"), 2)}
    rows = simulated.per_host if simulated.per_host > 1 else None
    return Cluster(ranks, bandwidth, backend, cost(in_a_row, 1), whole, {AVERAGES: whole}, torus_columns=rows)


#: The methods whose steps are simulated.
SIMULATED = ("ddp", "dear", "pipe_sgd", "local_sgd", "selsync")


def steps(work: Work, cluster: Cluster, simulated: Collectives) -> list[dict[str, Any]]:
    """Returns of DDP and each method the fastest exact settings, or those that a plan chooses, with both times."""
    found: dict[str, Prediction] = {}
    for one in considered(work, cluster):
        if one.method not in SIMULATED:  # a method of one's own, or parameter servers
            continue
        if one.method not in found or one.seconds < found[one.method].seconds:
            found[one.method] = one
    return [
        {
            "method": one.method,
            "settings": dict(one.settings),
            "num_bytes": work.num_bytes,
            "predicted": one.seconds,
            "simulated": step_seconds(one, work, cluster, simulated),
        }
        for one in found.values()
    ]


@dataclass(frozen=True, kw_only=True)
class SimulatedBackend(LinkCost):
    """A backend's all-reduce, of which it takes the faster algorithm; all of several hosts."""

    simulated: Collectives

    def all_reduce(self, num_bytes: float, world_size: int) -> float:
        return min(self.simulated.all_reduce(num_bytes, algorithm) for algorithm in ("ring", "tree"))


def step_seconds(one: Prediction, work: Work, cluster: Cluster, simulated: Collectives) -> float:
    """Returns the simulated seconds of a step with a method and its settings."""
    settings, compute = one.settings, work.seconds_with(one.method)
    if one.method == "ddp":
        backend = SimulatedBackend(alpha=0.0, beta=0.0, simulated=simulated)
        return predict_ddp(work.profile, backend, cluster.world_size, settings["bucket_mb"])
    if one.method == "dear":
        return dear_seconds(work.profile, cluster, simulated, settings)
    average = simulated.all_reduce(work.num_bytes, "halves")
    if one.method == "pipe_sgd":  # under the next step
        return max(compute, average)
    if one.method == "local_sgd":
        return local_sgd.step_seconds(compute, average, average, settings)
    return compute + (1 - settings["lssr"]) * average


def dear_seconds(profile: Profile, cluster: Cluster, simulated: Collectives, settings: Mapping[str, Any]) -> float:
    """Returns the simulated seconds of a step with the buckets and early all-gathers that DeAR chooses by its costs.

    The queue's thread starts what has been submitted when it begins to wait for an operation: the first messages of the
    next one travel meanwhile. What comes later starts when that has ended, or at once if there is none.
    """
    topology = settings.get("topology", "flat")
    columns = settings.get("torus_columns")
    buckets, sizes, early = dear.schedule(profile, cluster, topology)
    ends, begun = 0.0, -math.inf

    def run(num_bytes: float, submitted: float, follows: bool = True) -> float:
        nonlocal ends, begun
        alone = simulated.half(topology, num_bytes, 1, columns)
        in_flight = follows and submitted <= begun
        begun = max(ends, submitted)
        ends = begun + (simulated.half(topology, num_bytes, 2, columns) - alone if in_flight else alone)
        return ends

    left, gathered = list(early.pieces), [0.0] * len(buckets)
    for index, bucket in enumerate(buckets):
        run(sizes[index], bucket.ready)
        for other in early.after[index]:
            gathered[other] = run(sizes[other] / early.pieces[other], bucket.ready, follows=other != index)
            left[other] -= 1
    forward_begins, waited = max(profile.backward, ends), 0.0
    for index in sorted(range(len(buckets)), key=lambda index: buckets[index].needed):
        if left[index]:
            gathered[index] = run(sizes[index] * left[index] / early.pieces[index], forward_begins)
        waited = max(waited, gathered[index] - forward_begins - buckets[index].needed)
    return forward_begins + waited + profile.forward + profile.update


def reason(row: Mapping[str, Any]) -> str:
    """Returns what a plan does not know of a row's collectives."""
    topology, ranks = row["settings"].get("topology", "flat"), row["hosts"] * row["cards"]
    if row["method"] == "ddp" and ranks > row["hosts"]:
        return NEIGHBORS
    if row["method"] == "ddp":
        return "the backend's tree has pieces, which take time to fill it"
    if topology == "flat" and row["num_bytes"] / ranks < MIN_SLICE_BYTES:
        return "slices below 32 KiB travel 16 at a time, not one after the other"
    if row["cards"] > 1:
        return NEIGHBORS if topology == "flat" else "a rank counts as a host: several columns share its link"
    return {
        "flat": "the wait for a receiver's first notice, which few hosts have shown, counts for each message",
        "torus2d": "two operations are in flight",
        "tree": "a rank's processor handles the pieces of both trees",
    }[topology]


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns where methods leave DDP behind, their speed-ups, and how far predictions are off."""
    ddp = {_place(row): row for row in rows if row["method"] == "ddp"}
    hosts = sorted({row["hosts"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "ddp"))
    heads = ["network, ranks of a host", "method", *(f"{number} hosts" for number in hosts)]
    ahead, speedups = [], []
    for (network, cards), method in product(dict.fromkeys((row["network"], row["cards"]) for row in rows), methods):
        some = [r for r in rows if (r["network"], r["cards"], r["method"]) == (network, cards, method)]
        cells, shown = [f"{network}, {cards}", method], [f"{network}, {cards}", method]
        for number in hosts:
            here = [row for row in some if row["hosts"] == number]
            over = {row["gbit"]: [ddp[_place(row)][k] / row[k] for k in ("simulated", "predicted")] for row in here}
            cells.append(", ".join(f"{gbit:g}" for gbit, (simulated, _) in over.items() if simulated >= AHEAD))
            shown.append(", ".join(f"{simulated:.2f} ({predicted:.2f})" for simulated, predicted in over.values()))
        ahead.append(cells)
        speedups.append(shown)
    off = [row for row in rows if abs(_error(row)) > OFF]
    summary = []
    for method in ("ddp", *methods):
        for several in (False, True):
            some = [r for r in rows if r["method"] == method and (r["cards"] > 1) == several]
            if some:
                errors = [abs(_error(row)) for row in some]
                numbers = [str(len(some)), str(sum(error > OFF for error in errors))]
                title = f"{method}, {'several ranks' if several else 'one rank'} a host"
                summary.append([title, *numbers, f"{median(errors):.1%}", f"{max(errors):.0%}"])
    reasons = [
        [why, str(len(some)), f"{min(map(_error, some)):+.0%} to {max(map(_error, some)):+.0%}"]
        for why in dict.fromkeys(map(reason, off))
        if (some := [row for row in off if reason(row) == why])
    ]
    listed = [
        [f"{row['network']}, {row['cards']}", row["method"], str(row["hosts"]), f"{row['gbit']:g}"]
        + [f"{1e3 * row[name]:.0f}" for name in ("predicted", "simulated")]
        + [f"{_error(row):+.0%}", reason(row)]
        for row in off
    ]
    links = ", ".join(f"{gbit:g}" for gbit in dict.fromkeys(row["gbit"] for row in rows))
    return f"""### Links with which a method leaves DDP behind by {AHEAD - 1:.0%}

In Gbit/s of a host, of {links}, by simulation.

{table(heads, ahead)}
### How many times as fast as DDP

By simulation, and in brackets as predicted, with links of {links} Gbit/s.

{table(heads, speedups)}
### How far predictions are off

{table(["", "steps", f"off by more than {OFF:.0%}", "median", "worst"], summary)}
{table(["what a plan does not know", "steps", "off by"], reasons)}
{table(["network, ranks", "method", "hosts", "Gbit/s", "predicted ms", "simulated ms", "off by", "why"], listed)}"""


def draw_speedups(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the speed-up over DDP by hosts, a row of panels for each network, a column for each link."""
    alone = [row for row in rows if row["cards"] == min(one["cards"] for one in rows)]
    ddp = {_place(row): row for row in alone if row["method"] == "ddp"}
    networks, gbits = (list(dict.fromkeys(row[name] for row in alone)) for name in ("network", "gbit"))
    size, shape = (3.0 * len(gbits), 2.6 * len(networks)), (len(networks), len(gbits))
    with picture(path, size, *shape, legend="below", legend_columns=4, sharex=True) as panels:
        for (i, network), (j, gbit) in product(enumerate(networks), enumerate(gbits)):
            panel, here = panels[i, j], [r for r in alone if (r["network"], r["gbit"]) == (network, gbit)]
            for method in dict.fromkeys(row["method"] for row in here if row["method"] != "ddp"):
                some = [row for row in here if row["method"] == method]
                for key, line in (("simulated", "-"), ("predicted", ":")):
                    over = [ddp[_place(row)][key] / row[key] for row in some]
                    look = {**look_of(method), "linestyle": line, "markersize": 3}
                    panel.plot([row["hosts"] for row in some], over, label=f"{method}, {key}", **look)
            panel.axhline(1.0, color="black", linewidth=0.8)
            panel.set(xscale="log", yscale="log", title=f"{network}, {gbit:g} Gbit/s")
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter("{x:g}" if axis is panel.yaxis else "")
            panel.tick_params(labelsize="x-small", which="both")
            panel.grid(alpha=0.3)
        for panel in panels[-1]:
            panel.set_xlabel("hosts")
        panels[0, 0].figure.supylabel("times as fast as DDP")


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["network"], row["hosts"], row["cards"], row["gbit"]


def _error(row: Mapping[str, Any]) -> float:
    return float(row["predicted"] / row["simulated"] - 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(command.main("benchmarks.scale:Scale"))
