"""The time of collectives by size and codec, compared with the backend's own and the limit (DeAR, Fig. 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipesync.bench.bandwidth import measure_bandwidth
from lightning_pipesync.bench.round_robin import time_round_robin
from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.transport import Transport


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
        operation, codec, ``num_bytes`` of the buffer, ``seconds`` and ``processor_seconds`` of each round, and
        ``limit``: the time of the bytes alone.
    """
    bandwidth = measure_bandwidth()
    world_size = dist.get_world_size()
    transport = Transport(timeout_s=300)
    rows: list[dict[str, Any]] = []
    for size in settings.sizes_mib:
        flat = torch.ones(max(world_size, round(size * MIB / 4) // world_size * world_size))
        operations = _operations(flat, transport, settings.codecs)
        progress(f"{size:g} MiB")
        half = (world_size - 1) / world_size * flat.numel() * 4 / bandwidth
        named = {str(key): run for key, run in operations.items()}
        timed = time_round_robin(named, settings.rounds, before=partial(_clear, flat))
        for (implementation, operation, codec), measured in zip(operations, timed.values(), strict=True):
            shared = {"implementation": implementation, "operation": operation, "codec": codec, **asdict(measured)}
            limit = half if operation in ("reduce_scatter", "all_gather") else 2 * half
            rows.append({**shared, "num_bytes": flat.numel() * 4, "limit": limit})
    transport.close()
    return {
        "settings": asdict(settings),
        "world_size": world_size,
        "bandwidth": bandwidth,
        "rows": rows,
        "fits": fit_rows(rows, world_size),
    }


def fit_rows(rows: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Returns alpha and beta with their errors (Eqs. 3-5) for each operation with measurements at several sizes."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if row["codec"] == "none":
            points = groups.setdefault((row["implementation"], row["operation"]), [])
            points += [(row["num_bytes"], seconds) for seconds in row["seconds"]]
    fits = []
    for (implementation, operation), points in groups.items():
        sizes, seconds = zip(*points, strict=True)
        if world_size > 1 and len(set(sizes)) > 1:
            halves = 1 if operation in ("reduce_scatter", "all_gather") else 2
            link = LinkCost.fit(sizes, seconds, world_size, halves)
            fits.append({"implementation": implementation, "operation": operation, **asdict(link)})
    return fits


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
        (backend, "all_reduce", "none"): partial(dist.all_reduce, flat),
        (backend, "reduce_scatter", "none"): partial(dist.reduce_scatter_tensor, shard, flat),
        (backend, "all_gather", "none"): partial(dist.all_gather_into_tensor, flat, shard),
    }
    for codec in codecs:
        operations["ours", "all_reduce", codec] = partial(_all_reduce, transport, flat, codec)
    return operations


def _all_reduce(transport: Transport, flat: torch.Tensor, codec: str) -> None:
    transport.all_reduce(flat, codec=codec).wait()


def _clear(flat: torch.Tensor, _: str) -> None:
    flat.zero_()  # repeated sums would overflow
