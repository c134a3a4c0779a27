"""A bit of a message that is another one on its way: all ranks end, and name the rank that has sent it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync import DeAR, ParameterServer
from lightning_pipesync.core.checksum import checksum
from lightning_pipesync.core.comm import ring
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.comm.objects import Objects
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.faults import failure, heartbeat
from lightning_pipesync.core.faults.heartbeat import Heartbeat
from tests.support.case_table import launch_cases
from tests.support.harness import launch, raised
from tests.support.lost_ranks import TIMEOUT_S
from tests.support.models import Run, assert_same

#: Four, for a torus.
RANKS = 4
SENDER = 1

#: Of what a collective sends: a few values, so that they travel all-to-all.
FEW = 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 7, 18])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_checksum_is_of_the_bits_wherever_they_are(dtype: torch.dtype, numel: int, offset: int) -> None:
    values = torch.randint(0, 2, (numel + offset,), generator=torch.Generator().manual_seed(1)).to(dtype)[offset:]
    assert torch.equal(checksum(values), checksum(values.clone()))
    flipped = values.clone()
    data = flipped.view(torch.uint8)
    for place in range(data.numel()):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert not torch.equal(checksum(values), checksum(flipped)), (place, bit)
            data[place] ^= 1 << bit


def test_a_checksum_of_special_values_and_of_memory_that_is_freed() -> None:
    """NaN is itself, and zeros have a checksum, too; torch refuses to free memory that NumPy has seen."""
    nans = torch.full((9,), float("nan"))
    assert torch.equal(checksum(nans), checksum(nans.clone()))
    assert checksum(torch.zeros(8)).item() != 0
    assert not torch.equal(checksum(torch.zeros(8)), checksum(-torch.zeros(8)))
    matrix = torch.arange(12.0).view(3, 4)
    assert torch.equal(checksum(matrix.t()), checksum(matrix.t().contiguous()))
    values = torch.ones(100)
    checksum(values)
    checksum(values[1:])
    values.untyped_storage().resize_(0)


def with_flipped_bit(tensor: Tensor) -> Tensor:
    """Returns a copy whose last byte has another bit."""
    copy = tensor.detach().clone()
    copy.reshape(-1).view(torch.uint8)[-1] ^= 0x04
    return copy


@contextmanager
def flipping(owner: type, name: str, rank: int, least_bytes: int) -> Iterator[list[int]]:
    """On the sending rank, a bit flips in the first tensor of so many bytes that a method of ``owner`` gets."""
    method, flipped = getattr(owner, name), list[int]()

    def damaging(self: Any, tensor: Tensor, *args: Any) -> Any:
        if rank == SENDER and tensor.nbytes >= least_bytes and not flipped:
            flipped.append(tensor.nbytes)
            tensor = with_flipped_bit(tensor)
        return method(self, tensor, *args)

    with patch.object(owner, name, damaging):
        yield flipped


def ones(numel: int = FEW) -> Tensor:
    return torch.ones(numel)


def tensor(transport: Transport) -> None:
    if transport.rank == SENDER:
        transport.send(ones(), 2).wait()
    elif transport.rank == 2:
        transport.recv(torch.empty(FEW), SENDER).wait()


def channel(transport: Transport) -> None:
    if transport.rank == SENDER:
        sender = transport.channel_to(0, 0)
        sender.send({"activations": ones()})
        sender.finish()
    elif transport.rank == 0:
        receiver = transport.channel_from(SENDER, 0)
        try:
            receiver.receive()
        finally:
            receiver.close(TIMEOUT_S)


def mail(transport: Transport) -> None:
    arrived: queue.Queue[Any] = queue.Queue()
    mail = transport.mail()
    mail.start(lambda _, message: arrived.put(message), lambda _, error: arrived.put(error), lambda _: None)
    if transport.rank == SENDER:
        mail.send(3, ones())
    elif transport.rank == 3:
        error = arrived.get(timeout=TIMEOUT_S)
        assert isinstance(error, RuntimeError), "it was delivered"
        mail.close(1.0)
        raise error
    transport.exchange_flags(0).wait()


IN_RING = RANKS * ring.MIN_SLICE_BYTES
SENDING, EVERYWHERE = (Messages, "start_sending"), 1
FLAT: dict[str, Any] = {}
TORUS, TREE = {"topology": "torus2d"}, {"topology": "tree"}


def all_to_all(transport: Transport) -> None:
    transport.all_reduce(ones()).wait()


def state(transport: Transport) -> None:
    transport.collect_states({"weights": ones()})


#: What is exchanged, of which transport, where the bit flips, and in a message of how many bytes at least.
PATTERNS: dict[str, tuple[Callable[[Transport], Any], dict[str, Any], tuple[type, str], int]] = {
    "all-to-all": (all_to_all, FLAT, SENDING, 16),
    "a checksum": (all_to_all, FLAT, SENDING, 8),
    "encoded": (lambda transport: transport.all_reduce(ones(), codec="int8").wait(), FLAT, SENDING, EVERYWHERE),
    "ring": (lambda transport: transport.all_gather(ones(IN_RING)).wait(), FLAT, SENDING, ring.MIN_SLICE_BYTES),
    "adding": (lambda transport: transport.reduce_scatter(ones(IN_RING)).wait(), FLAT, SENDING, ring.MIN_SLICE_BYTES),
    "torus": (all_to_all, TORUS, SENDING, 16),
    "tree": (all_to_all, TREE, SENDING, 16),
    "flags": (lambda transport: transport.exchange_flags(3).wait(), FLAT, SENDING, EVERYWHERE),
    "broadcast": (
        lambda transport: transport.broadcast(ones() * transport.rank, src=SENDER).wait(),
        FLAT,
        (Messages, "start_broadcast"),
        16,
    ),
    "tensor": (tensor, FLAT, SENDING, EVERYWHERE),
    "channel": (channel, FLAT, SENDING, EVERYWHERE),
    "mail": (mail, FLAT, SENDING, 4 * FEW),
    "state": (state, FLAT, SENDING, 100),
    "header of a state": (state, FLAT, SENDING, 24),
    "objects": (lambda transport: transport.gather_objects("what all get" * FEW), FLAT, (Objects, "_gather"), 100),
}


@contextmanager
def frequent_beats() -> Iterator[None]:
    """Context in which ranks learn of a fault soon, by their beats, and a busy rank does not count as silent."""
    with (
        patch.object(heartbeat, "INTERVAL", 0.1),
        patch.object(heartbeat, "STORE_S", TIMEOUT_S),
        patch.object(failure, "PATIENCE", 100),
    ):
        yield


def exchange(pattern: str) -> tuple[list[int], tuple[str, str] | None]:
    """Exchanges on all ranks, and then flags, in which those wait that have got what they need."""
    run, settings, where, least_bytes = PATTERNS[pattern]

    def run_and_wait() -> None:
        try:
            run(transport)
            transport.exchange_flags(0).wait()
        finally:
            transport.close()

    with frequent_beats():
        transport = Transport(timeout_s=TIMEOUT_S, check_messages=True, **settings)
        with flipping(*where, transport.rank, least_bytes) as flipped:
            return flipped, raised(run_and_wait)


def test_all_ranks_name_who_has_sent_what_was_damaged() -> None:
    """The neighbor in a ring, also of what it forwards; whatever the other ranks wait for."""
    outcomes = launch_cases({pattern: partial(exchange, pattern) for pattern in PATTERNS}, RANKS, launch=launch)
    for pattern in PATTERNS:
        of_ranks = outcomes[pattern]
        assert of_ranks[SENDER][0], f"{pattern}: no bit was flipped"
        refused = []
        for rank, (_, outcome) in enumerate(of_ranks):
            assert outcome is not None, (pattern, rank)
            kind, message = outcome
            last = message.splitlines()[-1]
            assert kind == "RuntimeError", (pattern, rank, outcome)
            assert last.startswith(f"Rank {SENDER} (host "), (pattern, rank, message)
            assert "is at fault: a message from it was damaged on its way to rank " in last, (pattern, rank, message)
            if "its checksum is another one" in last:
                refused.append(rank)
        assert refused, (pattern, "some rank has found it")


def exchange_at_once() -> tuple[list[int], tuple[str, str] | None]:
    """Exchanges before the sender has published where it runs."""
    publish = Heartbeat._run

    def publish_late(heartbeat: Heartbeat) -> None:
        time.sleep(1.0)
        publish(heartbeat)

    with patch.object(Heartbeat, "_run", publish_late if dist.get_rank() == SENDER else publish):
        return exchange("adding")


def test_who_has_not_published_where_it_runs_is_waited_for() -> None:
    for rank, (_, outcome) in enumerate(launch_cases({"at once": exchange_at_once}, RANKS, launch=launch)["at once"]):
        assert outcome is not None, rank
        assert outcome[1].splitlines()[-1].startswith(f"Rank {SENDER} (host "), (rank, outcome)


def serve() -> tuple[list[int], tuple[str, str] | None]:
    """Trains with a server which goes on without a rank that is lost; a learner's push is damaged."""
    settings: dict[str, Any] = {"policy": "k_async", "servers": 1, "on_lost_rank": "continue"}

    def train(run: Run) -> None:
        try:
            run.steps(range(1000))
        finally:
            run.sync.detach(timeout_s=1.0)

    with frequent_beats():
        run = Run(ParameterServer, check_messages=True, timeout_s=TIMEOUT_S, **settings)
        with flipping(*SENDING, run.sync.transport.rank, 300) as flipped:
            return flipped, raised(lambda: train(run))


def test_what_was_damaged_ends_a_training_that_goes_on_without_who_is_lost() -> None:
    """Its sender is not lost, and would train on by itself."""
    for rank, (flipped, outcome) in enumerate(launch_cases({"serve": serve}, 3, launch=launch)["serve"]):
        assert bool(flipped) == (rank == SENDER)
        assert outcome is not None, rank
        last = outcome[1].splitlines()[-1]
        assert last.startswith(f"Rank {SENDER} (host "), (rank, outcome)
        assert "is at fault: a message from it was damaged on its way to rank 0, " in last, (rank, outcome)


def train(check_messages: bool) -> dict[str, Any]:
    """Trains some steps; returns the weights, what the method says it has sent, and the bytes of each message."""
    run = Run(DeAR, check_messages=check_messages, timeout_s=TIMEOUT_S, bucket_mb=1e-4)
    traffic, sizes, send = run.sync.transport.traffic, list[int](), Messages.start_sending
    before = traffic.total_bytes_sent

    def recorded(messages: Messages, tensor: Tensor, peer: int) -> Any:
        sizes.append(tensor.nbytes)
        return send(messages, tensor, peer)

    with patch.object(Messages, "start_sending", recorded):
        run.steps(range(3))
        run.sync.flush()
    return {"counted": traffic.total_bytes_sent - before, "weights": run.end(), "sizes": sizes}


def test_nothing_more_is_sent_without_checksums() -> None:
    outcomes = launch_cases({check: partial(train, check) for check in (False, True)}, 2)
    for without, checked in zip(outcomes[False], outcomes[True], strict=True):
        assert sum(without["sizes"]) == without["counted"] == checked["counted"]
        assert len(checked["sizes"]) == 2 * len(without["sizes"])
        assert sum(checked["sizes"]) == sum(without["sizes"]) + 8 * len(without["sizes"])
        assert_same(checked["weights"], without["weights"])
