"""``pipesync bench collectives``: collectives by size and codec (DeAR, Fig. 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.nccl import all_gather_single, reduce_scatter_single
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.benchmark import Benchmark, Progress
from lightning_pipesync.lab.bench.pictures import colour_and_line, picture
from lightning_pipesync.lab.bench.tables import table, table_of
from lightning_pipesync.lab.bench.timing import median_and_quartiles, time_round_robin
from lightning_pipesync.lab.predictions.cluster import MeasuredCost

#: Implementation ("ours" or the backend), operation, codec.
Key = tuple[str, str, str]

#: This package, in a ring or all-to-all.
OURS = "ours"

#: By operation, whether it is one half of an all-reduce or both.
HALVES = {"reduce_scatter": 1, "all_gather": 1, "reduce_scatter + all_gather": 2, "all_reduce": 2}


@dataclass(frozen=True, kw_only=True)
class Collectives(Benchmark):
    """Times all-reduce and its two halves, compared with the backend's own and the limit.

    Attributes:
        sizes_mib: Sizes of the whole buffer, in MiB of fp32.
        codecs: Codecs of this package's all-reduce, in addition to none.
        topologies: Further topologies of this package's exchanges: torus2d, as square as possible, and tree.
        rounds: Number of measurements of each operation, in turns.
    """

    sizes_mib: tuple[float, ...] = (0.00390625, 0.0625, 0.25, 1, 4, 16)
    codecs: tuple[str, ...] = ("bf16", "int8")
    topologies: tuple[Literal["torus2d", "tree"], ...] = ()
    rounds: int = 7

    name = "collectives"

    def __post_init__(self) -> None:
        self._check_all_positive("sizes_mib", self.sizes_mib, "numbers of MiB")
        self._check_positive("rounds")
        for codec in self.codecs:
            get_codec(codec)
        super().__post_init__()

    @property
    def num_measurements(self) -> int:
        return len(self.sizes_mib)

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Times all operations at all sizes; a collective call.

        In the result ``bandwidth`` is that of plain TCP, in bytes per second. A row has the ``seconds`` and the
        ``processor_seconds`` of each round; ``limit``: the seconds of the bytes alone; and ``predicted``: the seconds
        by alpha and beta of this package's all-reduce, for its other operations without a codec.
        """
        bandwidth, world_size = measure_bandwidth(), dist.get_world_size()
        transport = Transport(timeout_s=300)
        arranged = {name: Transport(timeout_s=300, topology=name) for name in self.topologies}
        rows: list[dict[str, Any]] = []
        for size in self.sizes_mib:
            flat = torch.ones(max(world_size, round(size * MIB / 4) // world_size * world_size))
            operations = self.operations(flat, transport)
            for name, other in arranged.items():
                operations |= self.own_operations(flat, other, f"ours on a {name}")
            progress(f"{size:g} MiB")
            named = {str(key): run for key, run in operations.items()}
            timed = time_round_robin(named, self.rounds, before=partial(_clear, flat))
            for (implementation, operation, codec), measured in zip(operations, timed.values(), strict=True):
                shared = {"implementation": implementation, "operation": operation, "codec": codec, **asdict(measured)}
                limit = self.predict(MeasuredCost(0.0, 1 / bandwidth), operation, flat.numel() * 4, world_size)
                rows.append({**shared, "num_bytes": flat.numel() * 4, "limit": limit})
        for one in (transport, *arranged.values()):
            one.close()
        fits = fit_rows(rows, world_size)
        self.add_predictions(rows, fits, world_size)
        shared = {"settings": self.settings(), "world_size": world_size, "bandwidth": bandwidth}
        return {**shared, "rows": rows, "fits": fits}

    def operations(self, flat: Tensor, transport: Transport) -> dict[Key, Callable[[], object]]:
        """Returns what is timed, besides the further topologies."""
        backend, shard = dist.get_backend(), torch.empty(flat.numel() // transport.world_size)
        return {
            **self.own_operations(flat, transport, OURS),
            (backend, "all_reduce", "none"): partial(dist.all_reduce, flat),
            (backend, "reduce_scatter", "none"): partial(reduce_scatter_single, shard, flat),
            (backend, "all_gather", "none"): partial(all_gather_single, flat, shard),
        }

    def own_operations(
        self, flat: Tensor, transport: Transport, implementation: str
    ) -> dict[Key, Callable[[], object]]:
        """Returns those of this package, on the topology of a transport."""

        def both_halves() -> None:
            transport.reduce_scatter(flat).wait()
            transport.all_gather(flat).wait()

        def encoded(codec: str) -> None:
            transport.all_reduce(flat, codec=codec).wait()

        return {
            (implementation, "reduce_scatter", "none"): lambda: transport.reduce_scatter(flat).wait(),
            (implementation, "all_gather", "none"): lambda: transport.all_gather(flat).wait(),
            (implementation, "reduce_scatter + all_gather", "none"): both_halves,
            **{(implementation, "all_reduce", codec): partial(encoded, codec) for codec in ("none", *self.codecs)},
        }

    def predict(self, link: MeasuredCost, operation: str, num_bytes: int, world_size: int) -> float:
        """Returns the seconds of an operation by the cost model."""
        return HALVES[operation] / 2 * link.all_reduce(num_bytes, world_size)

    def add_predictions(self, rows: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]], world_size: int) -> None:
        """Adds ``predicted`` to each row, see :meth:`measure`."""
        links = {(fit["implementation"], fit["operation"]): MeasuredCost(fit["alpha"], fit["beta"]) for fit in fits}
        link = links.get((OURS, "all_reduce"))
        for row in rows:
            row["predicted"] = None
            if link is not None and row["implementation"] == OURS and _is_plain(row):
                row["predicted"] = self.predict(link, row["operation"], row["num_bytes"], world_size)

    def report(self, results: list[dict[str, Any]]) -> str:
        return "\n".join(map(tables_of, results))

    def draw(self, results: list[dict[str, Any]]) -> None:
        """Draws time over size, one panel for each number of hosts, and the limits."""
        path, size = self.output / "collectives.png", (5.5 * len(results), 5.5)
        names = list(dict.fromkeys(name_of(row) for result in results for row in result["rows"] if _is_plain(row)))
        with picture(path, size, columns=len(results), legend="below") as panels:
            for panel, result in zip(panels[0], results, strict=True):
                for name in dict.fromkeys(map(name_of, filter(_is_plain, result["rows"]))):
                    points = [(r["num_bytes"] / MIB, 1e3 * median_of(r)) for r in result["rows"] if name_of(r) == name]
                    look = {"marker": "o" if name.startswith("ours") else "s", **colour_and_line(names.index(name))}
                    panel.plot(*zip(*points, strict=True), markersize=3, label=name, **look)
                for operation, style in (("reduce_scatter", ":"), ("all_reduce", "-.")):
                    of_operation = [row for row in result["rows"] if row["operation"] == operation]
                    limits = sorted({(row["num_bytes"] / MIB, row["limit"] * 1e3) for row in of_operation})
                    panel.plot(*zip(*limits, strict=True), style, color="black", label=f"limit of {operation}")
                panel.set(xscale="log", yscale="log", xlabel="MiB", ylabel="ms", title=f"{result['world_size']} hosts")
                panel.grid(alpha=0.3)


def fit_rows(rows: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Returns alpha and beta with their errors (Eqs. 3-5) for each collective with measurements at several sizes.

    Not for those on a torus or a tree, whose messages are others.
    """
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in filter(_is_plain, rows):
        if row["operation"] in HALVES and not row["implementation"].startswith(f"{OURS} on"):
            points = groups.setdefault((row["implementation"], row["operation"]), [])
            points += [(row["num_bytes"], seconds) for seconds in row["seconds"]]
    fits = []
    for (implementation, operation), points in groups.items():
        sizes, seconds = zip(*points, strict=True)
        if world_size > 1 and len(set(sizes)) > 1:
            link = LinkCost.fit(sizes, seconds, world_size, HALVES[operation])
            fits.append({"implementation": implementation, "operation": operation, **asdict(link)})
    return fits


def tables_of(result: dict[str, Any]) -> str:
    """Returns the times, the processor time, alpha and beta, and what they predict."""
    found = {(name_of(row), row["num_bytes"]): row for row in result["rows"]}
    sizes = sorted({size for _, size in found})

    def by_size(cell: Callable[[dict[str, Any]], str], rows: Sequence[dict[str, Any]] = result["rows"]) -> str:
        names = dict.fromkeys(map(name_of, rows))
        cells = [[name, *(cell(found[name, size]) for size in sizes)] for name in names]
        return table(["", *(f"{size / MIB:.3g} MiB" for size in sizes)], cells)

    fit_columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "": name_of,
        "alpha (ms)": lambda fit: f"{fit['alpha'] * 1e3:.3f} ± {fit['alpha_error'] * 1e3:.3f}",
        "beta (ns a byte)": lambda fit: f"{fit['beta'] * 1e9:.3f} ± {fit['beta_error'] * 1e9:.3f}",
    }
    parts = [
        f"### {result['world_size']} hosts, {result['bandwidth'] * 8 / 1e6:.0f} Mbit/s by plain TCP\n",
        "Median ms and, in brackets, the share of the limit that the bytes alone set.\n",
        by_size(time_of),
        "Median seconds of processor time for each GiB, user and system, all threads of a rank.\n",
        by_size(lambda row: f"{median_of(row, 'processor_seconds') / row['num_bytes'] * 1024 * MIB:.2f}"),
        "alpha and beta of Eqs. 3-5, with their standard errors:\n",
        table_of(result["fits"], fit_columns),
    ]
    if predicted := [row for row in result["rows"] if row["predicted"] is not None]:
        parts.append("Predicted ms by alpha and beta of ours: all_reduce and, in brackets, the error.\n")
        parts.append(
            by_size(
                lambda row: f"{row['predicted'] * 1e3:.1f} ({row['predicted'] / median_of(row) - 1:+.0%})", predicted
            )
        )
    return "\n".join(parts)


def _clear(flat: Tensor, _: str) -> None:
    flat.zero_()  # repeated sums would overflow


def name_of(row: dict[str, Any]) -> str:
    """Returns who did what, and with which codec."""
    codec = "" if _is_plain(row) else f", {row['codec']}"
    return f"{row['implementation']}: {row['operation']}{codec}"


def _is_plain(row: dict[str, Any]) -> bool:
    """Whether nothing is encoded."""
    return bool(row.get("codec", "none") == "none")


def time_of(row: dict[str, Any]) -> str:
    """Returns the median ms and, without a codec, the share of the limit that the bytes alone set."""
    seconds = median_of(row)
    return f"{1e3 * seconds:.1f}" + f" ({row['limit'] / seconds:.0%})" * _is_plain(row)


def median_of(row: dict[str, Any], what: str = "seconds") -> float:
    """Returns the median of all rounds."""
    return median_and_quartiles(row[what])[0]
