"""The data of replicas that come and go, as one would write it down: who trains on which samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.utils.data import DistributedSampler


@dataclass(frozen=True)
class Data:
    """A data set of the numbers from 0 on, and how it is loaded."""

    size: int
    batch_size: int
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 7

    def order(self, epoch: int) -> list[int]:
        """Returns the samples of an epoch, as torch shuffles them for a single rank."""
        sampler = DistributedSampler(range(self.size), 1, 0, self.shuffle, self.seed)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        return list(sampler)


def seen(data: Data, members: Mapping[int, Sequence[str]], epochs: int) -> dict[str, list[tuple[int, list[int]]]]:
    """Returns by member (epoch, batch) of all its steps; ``members`` are those from the step on that is the key."""
    found: dict[str, list[tuple[int, list[int]]]] = {}
    step = 0
    for epoch in range(epochs):
        order, offset = data.order(epoch), 0
        while offset < data.size:
            present = members[max(since for since in members if since <= step)]
            left = order[offset:]
            while len(left) % len(present):
                left.append(order[(offset + len(left)) % data.size])
            if data.drop_last and len(left) < data.batch_size * len(present):
                break
            for number, member in enumerate(present):
                batch = left[number :: len(present)][: data.batch_size]
                found.setdefault(member, []).append((epoch, batch))
            offset += data.batch_size * len(present)
            step += 1
    return found
