"""Replicas that are jobs of their own, which come and go, as what is drilled; and what they are to compute."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync.core.faults.lighthouse import ADDRESS, NAME, NUMBER
from lightning_pipesync.lab.netlab.processes import NAMESPACES
from lightning_pipesync.lab.predictions.entry import period_of
from lightning_pipesync.launch.lighthouse import Lighthouse
from lightning_pipesync.methods.replicas.rounds import QuorumRounds
from lightning_pipesync.training.registry import METHODS
from tests.conformance.loops import FabricLoop, PlainLoop
from tests.conformance.trainer import fit
from tests.conformance.training import (
    BATCH_SIZE,
    EPOCHS,
    OPTIMIZERS,
    Checkpoint,
    Options,
    batch_of,
    flat,
    loss_of,
    network,
    pass_by,
)
from tests.drill import system
from tests.drill.case import Case
from tests.drill.phases import Gate
from tests.drill.subject import MARGIN_S, SAVED_EVERY, Subject, method_of, result_of
from tests.references.elastic_data import Data, seen
from tests.references.lost_rank import simulate
from tests.references.selsync import average
from tests.support.lightning_models import SAMPLES, dataset

#: Seconds after which a job that has ended starts again, as with ``pipesync launch``.
STARTS_AGAIN_S = 1.0


LOOPS = {"plain": PlainLoop, "fabric": FabricLoop}


class Jobs(Subject):
    """Jobs of one process each, whose replicas come and go."""

    has_lighthouse = True

    def __init__(self, case: Case, folder: Path, timeout_s: float) -> None:
        self.members, self.folder = case.ranks, folder
        self._case, self._timeout_s = case, timeout_s
        for member in range(self.members):
            self.folder_of(member).mkdir(parents=True, exist_ok=True)

    def environment(self, member: int, host: str, port: int) -> dict[str, str]:
        replica = {ADDRESS: f"{host}:{port}", NAME: str(member), NUMBER: str(self.members)}
        return {**replica, "OMP_NUM_THREADS": "1"}

    def run(self, member: int, gate: Gate, resumed: Checkpoint | None) -> dict[str, Any]:
        case = self._case
        watch_rounds(gate)
        gate.reach("init")
        method, settings = method_of(case), {**case.settings, "timeout_s": self._timeout_s}
        # With learning rates that do not change, which one that starts again would have to be told.
        options = Options(ranks=1, seed=member, batches=1.0, decay=1.0, passes=gate.passes)
        save = Checkpoint(self.folder_of(member) / "at", SAVED_EVERY, after_error=False)
        if case.framework == "lightning":
            return result_of(fit(method, settings, options, save).weights)
        return result_of(train_in_loop(LOOPS[case.framework](method, settings, options), save))

    def folder_of(self, member: int) -> Path:
        return self.folder / str(member)

    def limit_s(self, watched: bool) -> float:
        # The messages of a round, the lighthouse's answer, and one that it cannot give to a job that is cut off.
        return 3 * self._timeout_s + MARGIN_S


def watch_rounds(gate: Gate) -> None:
    """Has faults strike before this process joins, and tells the supervisor of each round."""
    join, run = QuorumRounds.join, QuorumRounds.run

    def tell(rounds: QuorumRounds, ends: bool = False) -> None:
        steps = rounds._method.num_steps
        of, present, left = rounds.took_part, rounds.members, rounds.left
        gate.say(round=rounds.completed, step=steps, of=of, present=present, left=left, ends=ends)

    def joining(rounds: QuorumRounds) -> None:
        gate.say(joins=rounds.id)
        gate.reach("join")
        join(rounds)
        tell(rounds)

    def running(
        rounds: QuorumRounds, round_: Any, before: Any, asks: bool = True, ends: bool = False, leaves_by: Any = None
    ) -> None:
        run(rounds, round_, before, asks, ends, leaves_by)
        tell(rounds, ends)

    QuorumRounds.join, QuorumRounds.run = joining, running  # type: ignore[assignment, method-assign]


def run_lighthouse(port: int, namespace: str | None) -> None:
    """Serves as the lighthouse of jobs, as ``pipesync lighthouse`` does."""
    system.die_with_parent()
    if namespace is not None:
        system.enter_network(NAMESPACES / namespace)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    Lighthouse(port=port).run()


def train_in_loop(loop: Any, save: Checkpoint) -> Tensor:
    """Trains on this job's share of the data, in a plain loop or Fabric's; returns the consolidated weights."""
    owner = loop.fabric.strategy if isinstance(loop, FabricLoop) else loop.sync
    method = owner.method_of() if isinstance(loop, FabricLoop) else owner
    loader = owner.prepare_train_loader(DataLoader(dataset(), BATCH_SIZE, shuffle=True))
    for _ in range(loader.epoch, EPOCHS):
        for _, x, y in loader:
            pass_by(loop.options, "batch", loop)
            loop.train_on(method.num_steps, x, y)
        pass_by(loop.options, "saving", loop)
        loop.save(save.path.with_name(f"at-{method.num_steps}"))
    pass_by(loop.options, "end", loop)
    method.end()
    weights: Tensor = loop.end()
    return weights


# --- what they are to compute ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """What replicas did together after so many steps: who took part, who was new after it, and who has left with it."""

    step: int
    took_part: tuple[str, ...]
    new: tuple[str, ...] = ()
    ends: bool = False
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Told:
    """What a process has told of a round: number, steps, whose data it has, who is there then, and who has left."""

    by: str
    number: int
    step: int
    of: tuple[str, ...]
    present: tuple[str, ...]
    ends: bool
    left: tuple[str, ...] = ()


def disagreement(told: Sequence[Told]) -> str | None:
    """Returns in words in which round processes differ on who took part; None: in none."""
    found: dict[int, Told] = {}
    for one in told:
        other = found.setdefault(one.number, one)
        if one.of and other.of and (one.of, one.step) != (other.of, other.step):
            return f"round {one.number} is of {_names(one.of)} for {one.by}, of {_names(other.of)} for {other.by}"
        if one.of:
            found[one.number] = one
    return None


def rounds_of(told: Sequence[Told]) -> tuple[list[str], list[Round]]:
    """Returns with whom training began, and its rounds."""
    begin: set[str] = set()
    of: dict[int, Told] = {}
    present: dict[int, set[str]] = {}
    left: dict[int, set[str]] = {}
    for one in told:
        if one.number == 0:
            begin |= set(one.present)
        elif one.of:
            of[one.number] = one
        present.setdefault(one.number, set()).update(one.present)
        left.setdefault(one.number, set()).update(one.left)
    rounds = []
    for number in sorted(of):
        one = of[number]
        new = sorted(present[number].difference(one.of))
        rounds.append(Round(one.step, one.of, tuple(new), one.ends, tuple(sorted(left[number]))))
    return sorted(begin), rounds


def simulated(case: Case, begin: Sequence[str], rounds: Sequence[Round]) -> dict[str, Any]:
    """Returns the result of a simulation of the jobs of a case."""
    ids = sorted({*begin, *(id for one in rounds for id in (*one.took_part, *one.new))})
    config: Any = METHODS[case.method].config_type(**case.settings)
    last = rounds[-1]
    present, members = set(begin), {0: sorted(begin)}
    lost: dict[int, int] = {}
    back: dict[int, int] = {}
    leaving: dict[int, int] = {}
    for one in rounds:
        step = one.step
        lost |= {ids.index(id): step for id in present.difference(one.took_part)}
        back |= {ids.index(id): step for id in one.new}
        leaving |= {ids.index(id): step for id in one.left}
        present = {*one.took_part, *one.new}.difference(one.left)
        members[step] = sorted(present)
    batches: dict[tuple[str, int], list[int]] = {}
    for id, own in seen(Data(SAMPLES, BATCH_SIZE, seed=0), members, EPOCHS).items():
        steps = (step for step in range(last.step) if id in members[max(since for since in members if since <= step)])
        batches |= {(id, step): numbers for step, (_, numbers) in zip(steps, own, strict=False)}

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        x, y = batch_of(batches.get((ids[rank], step), [0]))  # one that is lost trains on, until the others miss it
        return loss_of(model(x), y)

    def make_outer(weights: list[Tensor], replicas: int) -> Optimizer:
        outer: Optimizer = config.outer_step(OPTIMIZERS["sgd"](weights), replicas)(weights)
        return outer

    replicas = simulate(
        network(Options(), seed=int(min(begin).partition("/")[0])),
        lambda model: OPTIMIZERS["sgd"](model.parameters()),
        loss,
        world_size=len(ids),
        num_steps=last.step,
        period=period_of(config),
        lost=lost,
        absent=[number for number, id in enumerate(ids) if id not in begin],
        back=back,
        leaving=leaving,
        make_outer=None if config.outer_optimizer == "none" else make_outer,
        average_states=config.average_optimizer_states,
    )
    found = [replica for number, replica in replicas.items() if ids[number] in last.took_part]
    if last.ends:
        average([list(replica.parameters()) for replica in found])
    return result_of(flat(found[0]))


def _names(ids: Sequence[str]) -> str:
    return ", ".join(id.partition("/")[0].lstrip("0") or "0" for id in ids)
