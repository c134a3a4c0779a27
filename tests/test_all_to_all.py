"""How many messages of an all-to-all exchange are in flight at once."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from lightning_pipesync.core.comm.all_to_all import AllToAllExchange
from lightning_pipesync.core.comm.messages import Messages


class Posted:
    """Messages of rank 0 that have always arrived."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size, self.receives, self.sends = world_size, list[int](), list[int]()

    def start_receiving(self, tensor: torch.Tensor, peer: int) -> int:
        self.receives.append(peer)
        return peer

    def start_sending(self, tensor: torch.Tensor, peer: int) -> int:
        self.sends.append(peer)
        return peer

    def wait_received(self, work: Any, peer: int) -> None:
        assert work == peer

    wait_sent = wait_received


@pytest.mark.parametrize(
    ("num_bytes", "world_size", "at_once"),
    [(2**20, 8, 2), (2**16, 8, 2), (2**15, 8, 4), (2**14, 8, 7), (8, 64, 16), (2**20, 2, 1)],
)
def test_large_messages_are_sent_a_few_at_a_time(num_bytes: int, world_size: int, at_once: int) -> None:
    messages, others = Posted(world_size), range(1, world_size)
    slices = {peer: torch.empty(num_bytes, dtype=torch.uint8) for peer in others}
    exchange = AllToAllExchange(cast(Messages, messages), dict(slices), dict(slices))
    assert len(messages.sends) == len(messages.receives) == at_once
    assert messages.sends == [*others][:at_once]
    exchange.finish()
    assert messages.sends == [*others]
    assert messages.receives == [world_size - peer for peer in others]


@pytest.mark.parametrize("order", [range(7, 0, -1), range(1, 8)], ids=["in steps", "by rank"])
def test_the_next_message_is_sent_when_one_has_arrived(order: range) -> None:
    messages, size = Posted(8), 2**16
    slices = {peer: torch.empty(size, dtype=torch.uint8) for peer in range(1, 8)}
    exchange = AllToAllExchange(cast(Messages, messages), dict(slices), dict(slices))
    in_flight = []
    for number, peer in enumerate(order, 1):
        exchange.wait_for(peer)
        in_flight.append(len(messages.receives) - number)
    assert in_flight[0] >= 2
    assert len(messages.sends) == 7
    exchange.finish()
    assert sorted(messages.sends) == [*range(1, 8)]
