"""The picture of a plan: what each method gains at other bandwidths, and on more hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lightning_pipesync.lab.bench.pictures import COLOURS, looks_of, markers_of, picture
from lightning_pipesync.lab.plan.predictions import BASELINES, baseline_of, enough_bandwidth, fastest, predict
from lightning_pipesync.lab.plan.text import rate, round_rate
from lightning_pipesync.lab.plan.verdict import rounds_of
from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import Prediction
from lightning_pipesync.lab.predictions.work import Work

#: Bandwidths in bytes per second, from so many times the cluster's to so many.
BANDWIDTHS = tuple(10 ** (exponent / 6) for exponent in range(-9, 13))

#: Numbers of hosts.
HOSTS = tuple(2**exponent for exponent in range(1, 13))

#: A gain from which on its axis is logarithmic.
LOG_FROM = 5.0

#: The colour of the bands of errors.
BAND = "#d8d8d8"
#: The colour behind what was not measured. As near as this factor to the measured place counts as measured.
EXTRAPOLATED, NEAR = "#ececec", 1.3


def draw(work: Work, cluster: Cluster, result: Mapping[str, Any], path: Path) -> None:
    """Draws the speed-up over the baseline by bandwidth and by number of hosts.

    Lines are predictions, with the band of the costs' errors; large markers are measured. What was not
    measured is on grey.
    """
    explained = {
        "band: predictions with the measured costs' standard errors": BAND,
        "grey: extrapolated, not measured": EXTRAPOLATED,
    }
    legend: Any = {"legend": "below", "legend_columns": 4, "patches": explained}
    with picture(path, (11, 5.4), columns=2, **legend) as [[by_bandwidth, by_hosts]]:
        by_bandwidth.figure.suptitle(f"{result['settings']['model']}: gain over {baseline_of(cluster).upper()}")
        _draw_panels(by_bandwidth, by_hosts, work, cluster, result)


def _draw_panels(by_bandwidth: Any, by_hosts: Any, work: Work, cluster: Cluster, result: Mapping[str, Any]) -> None:
    baseline = baseline_of(cluster).upper()
    rates, hosts = [cluster.host_bandwidth * factor for factor in BANDWIDTHS], [float(number) for number in HOSTS]
    measured_hosts, measured_rate = result["world_size"], cluster.ranks_per_replica * result["cluster"]["bandwidth"]
    same_hosts, same_rate = cluster.world_size == measured_hosts, cluster.host_bandwidth == measured_rate
    by_bandwidth.set(xlabel="each host's link", title=f"{cluster.world_size} hosts")
    by_hosts.set(xlabel="hosts", title=f"{rate(cluster.host_bandwidth)} each")
    if (enough := enough_bandwidth(work, cluster)) is not None and enough < rates[-1]:
        label = f"{baseline} is enough: {round_rate(enough)}"
        by_bandwidth.axvline(enough, color=COLOURS[0], linestyle=":", label=label)
    of_bandwidth = (by_bandwidth, rates, cluster.host_bandwidth, Cluster.with_bandwidth, same_hosts, measured_rate)
    of_hosts = (by_hosts, hosts, cluster.world_size, _with_hosts, same_rate, measured_hosts)
    for panel, places, here, changed, has_measured, measured in (of_bandwidth, of_hosts):
        _draw_gains(panel, work, cluster, places, changed)
        _mark_measured(panel, places, measured if has_measured else None)
        if same_hosts and same_rate:
            _draw_measured(panel, here, predict(work, cluster), result["measured"])
        panel.axhline(1.0, color=COLOURS[0], linewidth=0.8)
        scale = "log" if panel.get_ylim()[1] > LOG_FROM else "linear"
        panel.set(xscale="log", yscale=scale, ylabel=f"times as fast as {baseline}")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
        panel.grid(alpha=0.3)
    decades = range(math.ceil(math.log10(8 * rates[0])), math.floor(math.log10(8 * rates[-1])) + 1)
    by_bandwidth.set_xticks([10.0**decade / 8 for decade in decades], [rate(10.0**decade / 8) for decade in decades])
    by_hosts.set_xticks(hosts, [f"{number:g}" for number in hosts], fontsize="small")
    for panel in (by_bandwidth, by_hosts):
        panel.minorticks_off()


def _with_hosts(cluster: Cluster, number: float) -> Cluster:
    return cluster.with_hosts(int(number))


def _draw_gains(
    panel: Any, work: Work, cluster: Cluster, places: Sequence[float], changed: Callable[[Cluster, float], Cluster]
) -> None:
    """Draws a curve for each method, with its band; ``changed`` returns the cluster with one of the ``places``."""
    clusters = [changed(cluster, place) for place in places]
    middle, *ends = [[_gains(work, one.with_errors(sign)) for one in clusters] for sign in (0, -1, 1)]
    for title, look in looks_of(one for one in middle[0] if one not in BASELINES).items():
        # A model has too few layers for a pipeline of more hosts than that.
        curve, low, high = ([gains.get(title, math.nan) for gains in each] for each in (middle, *ends))
        panel.plot(places, curve, label=f"{title}, predicted", **look, markersize=3, markevery=2)
        panel.fill_between(places, low, high, color=look["color"], alpha=0.2, linewidth=0)


def _mark_measured(panel: Any, places: Sequence[float], measured: float | None) -> None:
    """Draws what is not near the measured place on grey; None: it is not in this panel."""
    first, last = places[0] / NEAR, places[-1] * NEAR
    left, right = (first, first) if measured is None else (measured / NEAR, measured * NEAR)
    for begin, end in ((first, left), (right, last)):
        if end > begin:
            panel.axvspan(begin, end, color=EXTRAPOLATED, linewidth=0, zorder=0)
    panel.set_xlim(first, last)


def _draw_measured(
    panel: Any, here: float, predictions: Sequence[Prediction], measured: Mapping[str, Mapping[str, Any]]
) -> None:
    """Draws a marker for each method that was run, at its fastest, if the baseline was, too."""
    rounds = rounds_of(predictions, measured) if measured else {}
    seconds: dict[str, float] = {}
    for one in predictions:
        if one.name in rounds:
            seconds[one.title] = min(median(rounds[one.name]), seconds.get(one.title, math.inf))
    for baseline in seconds.keys() & set(BASELINES):
        for title, look in markers_of(one for one in seconds if one != baseline).items():
            gain = seconds[baseline] / seconds[title]
            panel.plot(here, gain, label=f"{title}, measured", **look, markersize=9, zorder=3)


def _gains(work: Work, cluster: Cluster) -> Mapping[str, float]:
    """Returns how many times as fast as the baseline each method is at its fastest."""
    seconds = fastest(work, cluster)
    baseline = seconds[baseline_of(cluster)]
    return {title: baseline / of_method for title, of_method in seconds.items()}
