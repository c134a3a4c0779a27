"""Replicas that are jobs of their own, which come and go, as what is drilled; and what they are to compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.faults.lighthouse import ADDRESS, NAME, NUMBER
from lightning_pipesync.lab.netlab.processes import NAMESPACES
from lightning_pipesync.launch.lighthouse import Lighthouse
from lightning_pipesync.methods.laboratory import period_of
from lightning_pipesync.methods.replicas.sections import Sections
from lightning_pipesync.training.registry import METHODS
from tests.drill import system
from tests.drill.case import Case
from tests.drill.phases import EPOCHS, Gate
from tests.drill.simulation import Replica, Section, Simulation
from tests.drill.subject import MARGIN_S, Subject, result_of
from tests.drill.training import BATCH_SIZE, PlainJob, Samples, Task, loss_of, optimizer_of

#: Seconds after which a job that has ended starts again, as with ``pipesync launch``.
STARTS_AGAIN_S = 1.0


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

    def run(self, member: int, gate: Gate, resumed: Path | None) -> dict[str, Any]:
        case = self._case
        task = Task(
            case.method, case.settings, member, self.members, self.folder_of(member), self._timeout_s, alone=True
        )
        watch_sections(gate)
        gate.reach("init")
        return result_of(TRAININGS[case.framework]()(task, gate, resumed))

    def folder_of(self, member: int) -> Path:
        return self.folder / str(member)

    def limit_s(self, watched: bool) -> float:
        # The messages of a round, the lighthouse's answer, and one that it cannot give to a job that is cut off.
        return 3 * self._timeout_s + MARGIN_S


def watch_sections(gate: Gate) -> None:
    """Has faults strike before this process joins, and tells the supervisor of each section."""
    join, run = Sections.join, Sections.run

    def tell(sections: Sections, ends: bool = False) -> None:
        steps = sections._method.num_steps
        of, present, left = sections.took_part, sections.members, sections.left
        gate.say(section=sections.completed, step=steps, of=of, present=present, left=left, ends=ends)

    def joining(sections: Sections) -> None:
        gate.say(joins=sections.id)
        gate.reach("join")
        join(sections)
        tell(sections)

    def running(
        sections: Sections, section: Any, before: Any, asks: bool = True, ends: bool = False, leaves_by: Any = None
    ) -> None:
        run(sections, section, before, asks, ends, leaves_by)
        tell(sections, ends)

    Sections.join, Sections.run = joining, running  # type: ignore[assignment, method-assign]


def run_lighthouse(port: int, namespace: str | None) -> None:
    """Serves as the lighthouse of jobs, as ``pipesync lighthouse`` does."""
    system.die_with_parent()
    if namespace is not None:
        system.enter_network(NAMESPACES / namespace)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    Lighthouse(port=port).run()


def plainly() -> Any:
    return PlainJob.train


def in_trainer() -> Any:
    from tests.drill.in_lightning import fit

    return fit


def in_fabric() -> Any:
    from tests.drill.in_lightning import FabricJob

    return FabricJob.train


#: By framework, what imports it, and returns the training of a job.
TRAININGS: dict[str, Callable[[], Any]] = {"plain": plainly, "lightning": in_trainer, "fabric": in_fabric}


# --- what they are to compute ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What a process has told of a section: number, steps, whose data it has, who is there then, and who has left."""

    by: str
    section: int
    step: int
    of: tuple[str, ...]
    present: tuple[str, ...]
    ends: bool
    left: tuple[str, ...] = ()


def disagreement(told: Sequence[Told]) -> str | None:
    """Returns in words in which section processes differ on who took part; None: in none."""
    found: dict[int, Told] = {}
    for one in told:
        other = found.setdefault(one.section, one)
        if one.of and other.of and (one.of, one.step) != (other.of, other.step):
            return f"section {one.section} is of {_names(one.of)} for {one.by}, of {_names(other.of)} for {other.by}"
        if one.of:
            found[one.section] = one
    return None


def sections_of(told: Sequence[Told]) -> tuple[list[str], list[Section]]:
    """Returns with whom training began, and its sections."""
    begin: set[str] = set()
    of: dict[int, Told] = {}
    present: dict[int, set[str]] = {}
    left: dict[int, set[str]] = {}
    for one in told:
        if one.section == 0:
            begin |= set(one.present)
        elif one.of:
            of[one.section] = one
        present.setdefault(one.section, set()).update(one.present)
        left.setdefault(one.section, set()).update(one.left)
    sections = []
    for number in sorted(of):
        one = of[number]
        new = sorted(present[number].difference(one.of))
        sections.append(Section(one.step, one.of, tuple(new), one.ends, tuple(sorted(left[number]))))
    return sorted(begin), sections


def simulated(case: Case, begin: Sequence[str], sections: Sequence[Section]) -> dict[str, Any]:
    """Returns the result of a simulation of the jobs of a case."""
    settings = case.settings
    config: Any = METHODS[case.method].config_type(**settings)
    samples = Samples(case.ranks)

    def make_replica(id: str) -> Replica:
        task = Task(case.method, settings, int(id.partition("/")[0]), case.ranks, Path(), 0, alone=True)
        network = task.network(Gate(task.rank, (), Pipe()[0]))
        return Replica(network, optimizer_of(network.parameters()))

    def loss(model: nn.Module, numbers: list[int]) -> Tensor:
        return loss_of(model(samples.x[numbers]), samples.y[numbers])

    def make_outer(weights: list[Tensor], replicas: int) -> Optimizer:
        outer: Optimizer = config.outer_step(optimizer_of(weights), replicas)(weights)
        return outer

    simulation = Simulation(
        make_replica,
        loss,
        len(samples),
        BATCH_SIZE,
        period_of(config),
        None if config.outer_optimizer == "none" else make_outer,
        config.average_optimizer_states,
    )
    replicas = simulation.run(begin, sections, EPOCHS)
    return result_of(next(iter(replicas.values())).model.state_dict())


def _names(ids: Sequence[str]) -> str:
    return ", ".join(id.partition("/")[0].lstrip("0") or "0" for id in ids)
