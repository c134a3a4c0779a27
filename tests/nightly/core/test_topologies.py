"""Methods on a torus and on trees: what leaves a host, and what is left of a codec's errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.dear import DeAR, DeARConfig
from tests.references.collectives import values
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, call_on_hosts, raised
from tests.support.models import Run

RANKS, COLUMNS = 4, 2
HOSTS = RANKS // COLUMNS
TORUS = {"topology": "torus2d", "torus_columns": COLUMNS}

#: By topology and codec the messages between hosts of a rank in each half: shards of all ranks of the other host, or of
#: one. All that it encodes goes to each rank of the other host, or to one.
LEAVING: dict[tuple[str, str], int] = {
    **{("flat", codec): RANKS - COLUMNS for codec in ("none", "int8")},
    **{("torus2d", codec): HOSTS - 1 for codec in ("none", "int8")},
    ("auto", "int8"): HOSTS - 1,
    ("auto", "none"): RANKS - COLUMNS,
    ("flat", "chunked_topk"): 2,
    ("torus2d", "chunked_topk"): HOSTS - 1,
}


def bytes_to_other_hosts(topology: str, codec: str) -> int:
    transport = Transport(timeout_s=30, topology=topology, codec=codec)
    sent: Counter[bool] = Counter()
    start_sending = Messages.start_sending

    def counted(self: Messages, tensor: Tensor, peer: int) -> dist.Work:
        sent[self._ranks[peer] // COLUMNS != transport.rank // COLUMNS] += tensor.nbytes
        return start_sending(self, tensor, peer)

    with patch.object(Messages, "start_sending", counted):
        transport.all_reduce(values(2**14, torch.float32, transport.rank), codec=codec).wait()
    assert transport.bytes_sent == sum(sent.values())
    transport.close()
    return sent[True]


def with_other_codecs() -> tuple[str, str] | None:
    return raised(lambda: Run(DeAR, compression="none" if dist.get_rank() else "int8"))


def resume_elsewhere() -> list[tuple[str, str] | None]:
    """Loads a state where there are no residuals in another topology, and then residuals of another topology."""

    def saved(**settings: Any) -> Callable[..., Any]:
        run = Run(DeAR, fusion="buffer", **settings)
        run.step(0)
        run.sync.flush()
        state = run.sync.state_dict()
        run.end()

        def load(**others: Any) -> None:
            other = Run(DeAR, fusion="buffer", **{**settings, **others})
            try:
                other.sync.load_state_dict(state)
            finally:
                other.end()

        return load

    flat, torus = saved(compression="int8", topology="flat"), saved(compression="int8", **TORUS)
    plain = saved(compression="int8", error_feedback=False, **TORUS)
    on_flat = {"topology": "flat", "torus_columns": None}
    return [raised(lambda: plain(**on_flat)), raised(lambda: flat(**TORUS)), raised(lambda: torus(**on_flat))]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases: dict[Any, Any] = {key: partial(call_on_hosts, COLUMNS, bytes_to_other_hosts, *key) for key in LEAVING}
    cases["codecs"] = partial(call_on_hosts, COLUMNS, with_other_codecs)
    return launch_cases({**cases, "resume": resume_elsewhere}, RANKS)


def test_bytes_that_leave_a_host(outcomes: Outcomes) -> None:
    for (topology, codec), number in LEAVING.items():
        if codec == "chunked_topk":
            sent = number * get_codec(codec).wire_bytes(2**14 // (1 if topology == "flat" else COLUMNS), torch.float32)
        else:
            sent = 2 * number * get_codec(codec).wire_bytes(2**14 // RANKS, torch.float32)
        assert outcomes[topology, codec] == [sent] * RANKS, (topology, codec)


def test_on_a_tree_every_rank_updates_all_weights() -> None:
    for settings in ({}, {"overlap": "forward"}, {"compression": "int8"}):
        assert DeARConfig(topology="tree", **settings).usual_update == "replicated"
    with pytest.raises(ValueError, match=r"update='sharded' needs a shard on every rank, and topology='tree' .* roots"):
        DeARConfig(topology="tree", update="sharded")


def test_what_cannot_be_on_a_torus_is_refused(outcomes: Outcomes) -> None:
    """Residuals are of one topology; ranks with other codecs are told so where hosts would make a torus."""
    for without, *refused in outcomes["resume"]:
        assert without is None
        for outcome in refused:
            assert outcome is not None
            assert "'topology': 'flat'" in outcome[1]
            assert "'topology': 'torus2d with rows of 2 ranks'" in outcome[1]
    for outcome in outcomes["codecs"]:
        assert_raised(outcome, "ValueError", "differ in compression")
