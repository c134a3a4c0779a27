"""A slow network by delays, for machines that cannot emulate one."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_pipesync.core.comm.messages import Messages


class SlowLink:
    """The link of this rank's host, by which its messages leave one after the other.

    A rank that waits for the delivery of a message waits until the link would have sent it. Nothing is sent more
    slowly, so this is right where all ranks send as much at the same time, as in an all-reduce.

    Args:
        rate: in bytes per second.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._free_at = rate, 0.0

    def send(self, num_bytes: float) -> float:
        """Returns the time at which the link will have sent a message."""
        self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._rate
        return self._free_at

    def install(self) -> None:
        """Delays DDP's all-reduces and the messages of this package's methods, in this process."""
        start_sending, wrap = Messages.start_sending, DistributedDataParallel.__init__

        def start(messages: Messages, tensor: Tensor, peer: int) -> Delayed:
            return Delayed(start_sending(messages, tensor, peer), self.send(tensor.nbytes))

        def wrap_and_delay(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            wrap(ddp, *args, **kwargs)
            ddp.register_comm_hook(self, all_reduce)

        Messages.start_sending = start  # type: ignore[method-assign,assignment]
        DistributedDataParallel.__init__ = wrap_and_delay  # type: ignore[method-assign]


class Delayed(NamedTuple):
    """What is sent: waiting for it takes at least until a moment."""

    work: dist.Work
    moment: float

    def wait(self, timeout: timedelta) -> None:
        self.work.wait(timeout)
        sleep_until(self.moment)


def all_reduce(link, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    """A communication hook of DDP: the mean, when a ring all-reduce could have sent it."""
    world_size = dist.get_world_size()
    mean = bucket.buffer().div_(world_size)
    work = dist.all_reduce(mean, async_op=True)
    sent = link.send(2 * (world_size - 1) / world_size * mean.nbytes)

    def delayed(future: Future[Any]) -> Tensor:
        sleep_until(sent)
        return mean

    return work.get_future().then(delayed)


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
