"""Replicas that are jobs of their own repeat a round of which a message was damaged: bit for bit the simulation."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

from lightning_pipesync import LocalSGD
from lightning_pipesync.core.comm.messages import Messages
from tests.nightly.core.test_checked_messages import SENDER, flipping
from tests.references.lost_rank import simulate
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp, state
from tests.support.replica_jobs import TIMEOUT_S, launch_replicas

REPLICAS, PERIOD, NUM_STEPS = 3, 3, 9
#: The step, from 0 on, in which each bit flips: of values, and of a byte that tells that a replica has all data.
STRUCK = {2: 8, 5: 1}


def train(replica: int) -> dict[str, Any]:
    model = seeded_mlp(replica, batch_norm=True)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=PERIOD, timeout_s=TIMEOUT_S, check_messages=True)
    sync.join()
    flipped = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(NUM_STEPS):
            optimizer.zero_grad()
            loss(model, i, replica).backward()
            with flipping(Messages, "start_sending", replica, STRUCK[i]) if i in STRUCK else nullcontext([]) as sizes:
                sync.step()
            flipped += sizes
    outcome = {
        "own": state(model),
        "flipped": flipped,
        "replicas": sync.metrics()["replicas"],
        "said": [str(one.message) for one in said if "damaged" in str(one.message)],
    }
    sync.flush()
    sync.detach()
    return outcome


def test_a_round_is_repeated() -> None:
    outcomes = launch_replicas(train, REPLICAS)
    replicas = simulate(
        seeded_mlp(batch_norm=True),
        OPTIMIZERS["sgd"],
        loss,
        world_size=REPLICAS,
        num_steps=NUM_STEPS,
        period=PERIOD,
        lost={},
    )
    assert len(outcomes[SENDER]["flipped"]) == len(STRUCK)
    assert outcomes[SENDER]["said"] == []
    said = [text for outcome in outcomes for text in outcome["said"]]
    assert len(said) == len(STRUCK), said
    for text in said:
        assert text.startswith(f"A message from replica {SENDER} (host "), text
    for replica, outcome in enumerate(outcomes):
        assert outcome["replicas"] == REPLICAS
        assert_same(outcome["own"], state(replicas[replica]))
