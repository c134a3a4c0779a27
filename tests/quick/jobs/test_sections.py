"""Sections, whatever befalls replicas at any point of the protocol: all that continue have the same rounds."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipesync.methods.replicas import sections
from lightning_pipesync.methods.replicas.sections import LATE_S, Sections
from tests.support.replica_world import World

SEEDS, ROUNDS = 300, 5
#: Of worlds in which some have taken in a replica that dies before all others have.
RARE = (762, 866, 1070, 1559)


def test_all_that_continue_have_the_same_rounds() -> None:
    """And no replica waits for ever, or ends without a word."""
    ends: dict[str, int] = {}
    for seed in (*range(SEEDS), *RARE):
        world = World(seed, num_replicas=2 + seed % 3, num_rounds=ROUNDS, faults=seed % 7, unasked=seed // 21 % 4)
        try:
            world.run()
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")
        for process in world.processes:
            assert process.outcome in ("done", "killed", "left", "left out", "too few"), (
                seed,
                process.id,
                process.outcome,
            )
            ends[process.outcome] = ends.get(process.outcome, 0) + 1
        began = world.survivor.method.rounds
        if not world.survivor.joined:  # the others were lost, or have left, before they could begin with it
            assert world.survivor.outcome == "too few", seed
            continue
        assert world.survivor.outcome == "done", seed
        for process in world.processes:
            if process.id in began[-1]:
                assert process.outcome in ("done", "killed", "left", "left out"), (seed, process.id)
    assert ends["done"] > 2 * SEEDS, "most replicas go on, and new ones are taken in"
    assert min(ends[each] for each in ("killed", "left", "left out", "too few")) > SEEDS // 40, ends


def test_signs_of_life_that_come_late_do_not_let_replicas_train_apart() -> None:
    """The lighthouse counts a replica as lost that lives: the others wait for it, or it learns that it was left out."""
    ends: dict[str, int] = {}
    for seed in range(SEEDS):
        number = 2 + seed % 3
        world = World(seed, num_replicas=number, num_rounds=ROUNDS, faults=seed % 7, unasked=seed // 21 % 4, late=True)
        try:
            world.run()
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")
        for process in world.processes:
            ends[process.outcome] = ends.get(process.outcome, 0) + 1
    assert ends.keys() == {"done", "killed", "left", "left out", "too few"}, ends
    assert ends["done"] > 2 * SEEDS, ends


def test_each_that_seems_to_live_is_awaited_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is frozen for long uses up its own time only: another may be late meanwhile, and is awaited, too."""
    clock: Any = SimpleNamespace(now=100.0, monotonic=lambda: clock.now, sleep=lambda _: None)
    monkeypatch.setattr(sections, "time", clock)
    alive = {"frozen", "late"}
    monkeypatch.setattr(sections, "is_open", lambda stores: bool(alive.intersection(stores)))
    replica = Sections.__new__(Sections)
    replica._timeout, replica._missing_since = timedelta(seconds=120), {}
    replica._job = SimpleNamespace(rank=0, gather_objects=lambda one: [one])  # type: ignore[assignment]
    missing: list[Any] = []
    replica._membership = SimpleNamespace(missing=lambda _: missing, decline=lambda _: None)  # type: ignore[assignment]

    def awaits(after_s: float, *names: str) -> bool:
        clock.now += after_s
        missing[:] = [SimpleNamespace(id=name, stores=[name]) for name in names]
        return replica._awaits_missing(SimpleNamespace())  # type: ignore[arg-type]

    assert awaits(0, "frozen")
    assert awaits(LATE_S - 1, "frozen", "late")
    assert awaits(2, "frozen", "late"), "the late one has a second left of the frozen one's time only"
    assert not awaits(0, "frozen"), "it has been awaited for long enough"
    assert awaits(0, "late")
    assert not awaits(LATE_S, "late")
    assert not awaits(0)
    assert awaits(0, "late"), "it was there meanwhile"
    alive.clear()
    assert not awaits(0, "late"), "its process has ended"
