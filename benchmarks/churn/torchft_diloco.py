"""torchft's DiLoCo, as its documentation has it: what replicas that come and go are compared with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from lightning_pipesync.core.comm.line import open_store
from lightning_pipesync.core.jobs import own_address, split_address

#: The outer optimizer's learning rate and momentum (DiLoCo, Section 3), the defaults of local SGD.
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


@contextmanager
def diloco(
    model: nn.Sequential,
    optimizer: Optimizer,
    lighthouse: str,
    replica: int,
    *,
    period: int,
    fragments: int = 1,
    overlap_steps: int = 0,
    same_weights: bool = False,
    timeout_s: float,
) -> Iterator[Any]:
    """Synchronizes replicas at the optimizer's steps while the block runs; gives torchft's manager.

    Args:
        model: its members are divided into ``fragments``.
        lighthouse: ``host:port``.
        replica: the number of this replica.
        period: steps of the optimizer between two averages of a fragment.
        overlap_steps: steps under which an average runs.
        same_weights: whether all replicas begin with the same weights, so that none are sent.
        timeout_s: of all operations.
    """
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    blocks, timeout = list(model.children()), timedelta(seconds=timeout_s)
    size = -(-len(blocks) // fragments)
    parts: list[nn.Module] = [nn.Sequential(*blocks[begin : begin + size]) for begin in range(0, len(blocks), size)]

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    host, store = own_address(*split_address(lighthouse)), open_store()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,  # DiLoCo refuses True
        timeout=timeout,
        quorum_timeout=timeout,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{lighthouse}",
        replica_id=f"replica_{replica}",
        hostname=host,
        init_sync=not same_weights,
    )
    outer: list[Optimizer] = [SGD(part.parameters(), **OUTER) for part in parts]  # type: ignore[arg-type]
    try:
        with DiLoCo(manager, parts, optimizer, outer, sync_every=period, fragment_sync_delay=overlap_steps):
            yield manager
    finally:
        manager.shutdown(wait=False)
