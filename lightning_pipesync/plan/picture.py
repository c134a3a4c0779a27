"""The picture of a plan: what each method gains at other bandwidths, and on more hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_pipesync.plan.cluster import Cluster
from lightning_pipesync.plan.links import mbit
from lightning_pipesync.plan.predictions import enough_bandwidth, fastest
from lightning_pipesync.plan.work import Work

#: Bandwidths in bytes per second, from so many times the cluster's to so many.
BANDWIDTHS = tuple(10 ** (exponent / 6) for exponent in range(-9, 13))

#: Numbers of hosts.
HOSTS = tuple(2**exponent for exponent in range(1, 13))

#: A gain from which on its axis is logarithmic.
LOG_FROM = 5.0


def draw(work: Work, cluster: Cluster, path: Path) -> None:
    """Draws the speed-up over DDP by bandwidth and by number of hosts, with the band of the costs' errors."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_bandwidth, by_hosts = figure.subplots(1, 2)
    rates = [cluster.bandwidth * factor for factor in BANDWIDTHS]
    _draw_gains(by_bandwidth, work, cluster, [8e-6 * rate for rate in rates], rates, Cluster.with_bandwidth)
    by_bandwidth.axvline(8e-6 * cluster.bandwidth, color="black", linewidth=0.8, label="here")
    if (enough := enough_bandwidth(work, cluster)) is not None and enough < rates[-1]:
        by_bandwidth.axvline(8e-6 * enough, color="black", linestyle=":", label=f"DDP is enough: {mbit(enough)}")
    by_bandwidth.set(xlabel="Mbit/s of each host's link", title=f"{cluster.world_size} hosts")
    _draw_gains(by_hosts, work, cluster, HOSTS, HOSTS, lambda cluster, number: cluster.with_hosts(int(number)))
    by_hosts.axvline(cluster.world_size, color="black", linewidth=0.8, label="here")
    by_hosts.set(xlabel="hosts", title=mbit(cluster.bandwidth))
    for panel in (by_bandwidth, by_hosts):
        panel.axhline(1.0, color="gray", linewidth=0.8)
        gains_much = panel.get_ylim()[1] > LOG_FROM
        panel.set(xscale="log", yscale="log" if gains_much else "linear", ylabel="times as fast as DDP")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _draw_gains(
    panel: Axes,
    work: Work,
    cluster: Cluster,
    places: Sequence[float],
    values: Sequence[float],
    changed: Callable[[Cluster, float], Cluster],
) -> None:
    """Draws a curve for each method, with its band; ``changed`` returns the cluster with one of the ``values``."""
    clusters = [changed(cluster, value) for value in values]
    middle, *ends = [[_gains(work, one.with_errors(sign)) for one in clusters] for sign in (0, -1, 1)]
    for method in middle[0]:
        if method != "ddp":
            # A model has too few layers for a pipeline of more hosts than that.
            curve, low, high = ([gains.get(method, math.nan) for gains in each] for each in (middle, *ends))
            (line,) = panel.plot(places, curve, label=method)
            panel.fill_between(places, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def _gains(work: Work, cluster: Cluster) -> Mapping[str, float]:
    """Returns how many times as fast as DDP each method is at its fastest."""
    seconds = fastest(work, cluster)
    return {method: seconds["ddp"] / of_method for method, of_method in seconds.items()}
