"""Times collectives and parameter servers by size and codec, beside the backend's own and the limit (DeAR, Fig. 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.bench.bandwidth import measure_bandwidth
from lightning_pipesync.lab.bench.round_robin import time_round_robin
from lightning_pipesync.lab.papers.baselines import PushPull

#: By operation, whether it is one half of an all-reduce or both.
HALVES = {"reduce_scatter": 1, "all_gather": 1, "reduce_scatter + all_gather": 2, "all_reduce": 2}


@dataclass(frozen=True)
class CollectivesSettings:
    """The settings of the benchmark.

    Attributes:
        sizes_mib: sizes of the whole buffer, in MiB of fp32.
        codecs: codecs of this package's all-reduce, in addition to none.
        rounds: the number of measurements of each operation.

    Raises:
        ValueError: a setting is out of its range; the message names it and its value.
    """

    sizes_mib: tuple[float, ...]
    codecs: tuple[str, ...]
    rounds: int

    def __post_init__(self) -> None:
        if not self.sizes_mib or not all(size > 0 for size in self.sizes_mib):
            raise ValueError(f"sizes_mib must be one or more positive numbers of MiB, got {self.sizes_mib!r}.")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds!r}.")
        for codec in self.codecs:
            get_codec(codec)


def measure_collectives(settings: CollectivesSettings, progress: Callable[[str], object]) -> dict[str, Any]:
    """Times all operations at all sizes; a collective call.

    Returns:
        Settings, bandwidth (bytes per second, by plain TCP), and rows: implementation ("ours" or the backend),
        operation, codec, ``num_bytes`` of the buffer, ``seconds`` and ``processor_seconds`` of each round,
        ``limit``: the time of the bytes alone, and ``predicted``: for this package's operations without a codec, the
        seconds by alpha and beta of its all-reduce; None elsewhere, and if these were not fitted.
    """
    bandwidth = measure_bandwidth()
    world_size = dist.get_world_size()
    transport = Transport(timeout_s=300)
    rows: list[dict[str, Any]] = []
    for size in settings.sizes_mib:
        flat = torch.ones(max(world_size, round(size * MIB / 4) // world_size * world_size))
        operations = _operations(flat, transport, settings.codecs)
        progress(f"{size:g} MiB")
        named = {str(key): run for key, run in operations.items()}
        timed = time_round_robin(named, settings.rounds, before=partial(_clear, flat))
        for (implementation, operation, codec), measured in zip(operations, timed.values(), strict=True):
            shared = {"implementation": implementation, "operation": operation, "codec": codec, **asdict(measured)}
            limit = predict(LinkCost(0.0, 1 / bandwidth), operation, flat.numel() * 4, world_size)
            rows.append({**shared, "num_bytes": flat.numel() * 4, "limit": limit})
    transport.close()
    fits = fit_rows(rows, world_size)
    add_predictions(rows, fits, world_size)
    return {
        "settings": asdict(settings),
        "world_size": world_size,
        "bandwidth": bandwidth,
        "rows": rows,
        "fits": fits,
    }


def fit_rows(rows: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Returns alpha and beta with their errors (Eqs. 3-5) for each collective with measurements at several sizes."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if row["codec"] == "none" and row["operation"] in HALVES:
            points = groups.setdefault((row["implementation"], row["operation"]), [])
            points += [(row["num_bytes"], seconds) for seconds in row["seconds"]]
    fits = []
    for (implementation, operation), points in groups.items():
        sizes, seconds = zip(*points, strict=True)
        if world_size > 1 and len(set(sizes)) > 1:
            link = LinkCost.fit(sizes, seconds, world_size, HALVES[operation])
            fits.append({"implementation": implementation, "operation": operation, **asdict(link)})
    return fits


def add_predictions(rows: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]], world_size: int) -> None:
    """Adds ``predicted`` to each row, see :func:`measure_collectives`."""
    links = {(fit["implementation"], fit["operation"]): LinkCost(fit["alpha"], fit["beta"]) for fit in fits}
    link = links.get(("ours", "all_reduce"))
    for row in rows:
        row["predicted"] = None
        if link is not None and (row["implementation"], row["codec"]) == ("ours", "none"):
            row["predicted"] = predict(link, row["operation"], row["num_bytes"], world_size)


def predict(link: LinkCost, operation: str, num_bytes: int, world_size: int) -> float:
    """Returns the seconds of an operation by the cost model."""
    if operation in HALVES:
        return HALVES[operation] / 2 * link.all_reduce(num_bytes, world_size)
    return link.sharded_servers(num_bytes, world_size, servers_by_operation(world_size)[operation])


def servers_by_operation(world_size: int) -> dict[str, int]:
    """Returns the numbers of parameter servers that are measured, by the name of the operation."""
    named = {"push + pull, central server": 1}
    if world_size > 3:
        named["push + pull, servers on half of the ranks"] = world_size // 2
    return {**named, "push + pull, servers on all ranks": world_size}


def _operations(
    flat: torch.Tensor, transport: Transport, codecs: Sequence[str]
) -> dict[tuple[str, str, str], Callable[[], object]]:
    backend = dist.get_backend()
    shard = torch.empty(flat.numel() // transport.world_size)

    def both_halves() -> None:
        transport.reduce_scatter(flat).wait()
        transport.all_gather(flat).wait()

    operations: dict[tuple[str, str, str], Callable[[], object]] = {
        ("ours", "reduce_scatter", "none"): lambda: transport.reduce_scatter(flat).wait(),
        ("ours", "all_gather", "none"): lambda: transport.all_gather(flat).wait(),
        ("ours", "reduce_scatter + all_gather", "none"): both_halves,
        ("ours", "all_reduce", "none"): lambda: transport.all_reduce(flat).wait(),
    }
    for operation, servers in servers_by_operation(transport.world_size).items():
        exchange = PushPull(transport, flat.numel(), servers)
        operations["ours", operation, "none"] = partial(_push_and_pull, exchange, flat)
    operations |= {
        (backend, "all_reduce", "none"): partial(dist.all_reduce, flat),
        (backend, "reduce_scatter", "none"): partial(dist.reduce_scatter_tensor, shard, flat),
        (backend, "all_gather", "none"): partial(dist.all_gather_into_tensor, flat, shard),
    }
    for codec in codecs:
        operations["ours", "all_reduce", codec] = partial(_all_reduce, transport, flat, codec)
    return operations


def _all_reduce(transport: Transport, flat: torch.Tensor, codec: str) -> None:
    transport.all_reduce(flat, codec=codec).wait()


def _push_and_pull(exchange: PushPull, flat: torch.Tensor) -> None:
    exchange.push(flat)
    exchange.pull(flat)


def _clear(flat: torch.Tensor, _: str) -> None:
    flat.zero_()  # repeated sums would overflow
