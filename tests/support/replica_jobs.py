"""Replicas that are jobs of their own in a test: each launched process is one, and a lighthouse tells who is there."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from lightning_pipesync import LocalSGD
from lightning_pipesync.methods.replicas.membership import Membership
from tests.references.lost_rank import simulate
from tests.support import lost_ranks
from tests.support.harness import DIED, free_port, launch, raised
from tests.support.lost_ranks import die
from tests.support.models import OPTIMIZERS, Counter, assert_same, loss, seeded_mlp, state

#: Seconds without a sign of life after which a process counts as dead: a busy machine may hold one up for some.
SILENCE_S = 10
#: Seconds that those who live are waited for: what is waited for happens long before.
TIMEOUT_S = 120
#: The steps before which a job dies, and before which the others wait for it to start again.
DIES, WAITS = 3, 6
#: Processes of plain loops that run at once.
AT_ONCE = 8
#: The round of the second average, from 0 on: after that of the first step.
ROUND = 2


@contextmanager
def lighthouse(port: int = 0) -> Iterator[str]:
    """Context with a lighthouse in this process; returns its address."""
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=1,
        join_timeout_ms=TIMEOUT_S * 1000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=SILENCE_S * 1000,
    )
    try:
        yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


def become_replica(address: str, replica: int, number: int) -> None:
    """Makes this process a replica of this name, of ``number`` with which training begins."""
    os.environ |= {
        "PIPESYNC_LIGHTHOUSE": address,
        "PIPESYNC_REPLICA": str(replica),
        "PIPESYNC_NUM_REPLICAS": str(number),
    }
    torch.set_num_threads(1)


def leave_job() -> int:
    """Removes what tells this process that it is one of several in a job; returns its number among them."""
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return rank


def _run(function: Callable[..., Any], address: str, number: int, ports: Sequence[int], args: tuple[Any, ...]) -> Any:
    """Calls a function on a process of a replica, which has several if it has a port of its own."""
    if ports:
        size = int(os.environ["WORLD_SIZE"]) // len(ports)
        replica, rank = divmod(int(os.environ["RANK"]), size)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(ports[replica])}
        os.environ["LOCAL_RANK"] = str(rank)
    else:
        replica = leave_job()
    become_replica(address, replica, number)
    return function(replica, *args)


def launch_replicas(
    function: Callable[..., Any],
    replicas: int,
    *args: Any,
    num_replicas: int | None = None,
    ranks_per_replica: int = 1,
    **settings: Any,
) -> list[Any]:
    """Calls ``function(replica, *args)`` in the processes of replicas; ``settings`` as of :func:`launch`.

    Training begins with ``num_replicas``, None: with all of them. Those of one process have no process group yet; the
    ranks of others find each other by their environment.
    """
    with lighthouse() as address:
        ports = [free_port() for _ in range(replicas)] if ranks_per_replica > 1 else []
        number, processes = num_replicas or replicas, replicas * ranks_per_replica
        given = function, address, number, ports, args
        return launch(_run, processes, *given, init=False, mostly_wait=True, **settings)


def wait_for(path: Path) -> None:
    """Waits for a file that another replica writes."""
    lost_ranks.wait_for(path.exists, TIMEOUT_S, f"nobody has written {path.name}")


def dies_and_comes_back(rank: int, victim: int, last: int, directory: Path) -> tuple[int, Callable[[int], None]]:
    """Returns the job of a process, and what is called before each of its steps.

    Job `victim` dies before step `DIES`, and the process `last` is that job when it comes back; it starts before step
    `WAITS`, for which the others wait until a file `started` is there.
    """
    comes_back = rank == last
    if comes_back:
        rank = victim
        os.environ["PIPESYNC_REPLICA"] = str(victim)
        wait_for(directory / "going on")

    def before_step(step: int) -> None:
        if rank == victim and step == DIES and not comes_back:
            die()
        if step == WAITS and not comes_back:  # they have had a round without it
            (directory / "going on").touch()
            wait_for(directory / "started")

    return rank, before_step


@contextmanager
def logged() -> Iterator[list[str]]:
    """Context with a list of what the package logs at the level at which a program sees it, if it sets up nothing."""
    lines: list[str] = []
    handler, log = logging.Handler(logging.WARNING), logging.getLogger("lightning_pipesync")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


# --- plain loops, compared with the simulation ------------------------------------------------------------------------


def when_called(owner: Any, name: str, number: int, act: Callable[[], object]) -> None:
    """Has `act` called before the call of a function with this number, from 0 on."""
    function, calls = getattr(owner, name), iter(range(1_000_000))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            act()
        return function(*args, **kwargs)

    setattr(owner, name, wrapped)


def at_step(number: int, act: Callable[[], object] = die) -> Callable[[Path, int], None]:
    """Returns the fate of a replica that dies, or does something else, before it ends a step, from 0 on."""
    return partial(_at_step, number, act)


def _at_step(number: int, act: Callable[[], object], folder: Path, others: int) -> None:
    when_called(LocalSGD, "step", number, act)


def nesterov(parameters: list[Tensor], _: int) -> Optimizer:
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


DILOCO: Mapping[str, Any] = {"outer_optimizer": "nesterov"}
NESTEROV: Mapping[str, Any] = {"make_outer": nesterov}


@dataclass(frozen=True)
class Job:
    """A training in which replicas are lost, are asked to leave, or come.

    Attributes:
        settings: of local SGD.
        given: what else the simulation is given; None: there is none.
        fates: by the number of a process what lets it die: called with the folder of marks and the number of others.
        acts: the same of those that something else befalls, which do not train to the end.
        comes: the names of the replicas that come, whose processes are numbered after the first ones. All others wait
            for them before step ``WAITS``.
        differs: settings that those have, or ``batch_norm``, with which they are refused.
        lost: the step from whose average on a lost replica plays no part.
        leaving: the step of the last average of one that leaves.
        replicas: with which training begins.
        batch_norm: whether there are buffers, which are averaged after the weights.
        evaluates: whether the weights are consolidated after the fifth step.
    """

    settings: Mapping[str, Any] = field(default_factory=lambda: DILOCO)
    given: Mapping[str, Any] | None = field(default_factory=lambda: NESTEROV)
    fates: Mapping[int, Callable[[Path, int], object]] = field(default_factory=dict)
    acts: Mapping[int, Callable[[Path, int], object]] = field(default_factory=dict)
    comes: tuple[int, ...] = ()
    differs: Mapping[str, Any] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    leaving: dict[int, int] = field(default_factory=dict)
    replicas: int = 3
    batch_norm: bool = True
    evaluates: bool = False
    num_steps: int = 13
    period: int = 3

    @property
    def names(self) -> list[int]:
        """The replicas of its processes."""
        return [*range(self.replicas), *self.comes]

    @property
    def staying(self) -> list[int]:
        """The processes that train to the end."""
        refused = range(self.replicas, len(self.names)) if self.differs else ()
        return [number for number in range(len(self.names)) if number not in {*self.fates, *self.acts, *refused}]


def train(jobs: dict[str, Job], addresses: list[str], folder: Path) -> dict[str, Any]:
    """Trains in a process of one of the jobs; returns what it has found."""
    number, places = leave_job(), list(zip(jobs.items(), addresses, strict=True))
    while number >= len(places[0][0][1].names):
        number -= len(places.pop(0)[0][1].names)
    (name, job), address = places[0]
    folder, rank, comes = folder / name, job.names[number], number >= job.replicas
    folder.mkdir(exist_ok=True)
    become_replica(address, rank, job.replicas)
    if comes:
        wait_for(folder / "going on")
    settings = {"batch_norm": job.batch_norm, "period": job.period, **job.settings, **(job.differs if comes else {})}
    model = seeded_mlp(number, batch_norm=settings.pop("batch_norm"))
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, timeout_s=TIMEOUT_S, **settings)
    if comes:
        (folder / f"{number} has started").touch()  # it is alive, so that the others wait for it in their next round
    else:
        sync.join()
    round_ = ROUND + bool(settings.get("overlap_steps"))  # the first average has had two
    mark = partial(when_called, Membership, "commit", round_, (folder / str(number)).touch)
    {**job.fates, **job.acts}.get(number, lambda *_: mark())(folder, job.replicas - 1)
    outcome: dict[str, Any] = {"status": 0, "samples": [], "evaluated": {}}

    def run() -> None:
        counter = Counter()
        sync.hand_over(counter=counter)
        loader = sync.prepare_train_loader(DataLoader(range(4000), shuffle=True), seed=1)
        outcome["began"], outcome["counted"] = sync.num_steps, counter.steps
        try:
            for sample in loader:
                outcome["samples"].append(int(sample))
                if sync.num_steps == WAITS and job.comes and not comes:
                    (folder / "going on").touch()
                    for other in range(job.replicas, len(job.names)):
                        wait_for(folder / f"{other} has started")
                if sync.num_steps == WAITS and number == job.staying[0] and (folder / "frozen").exists():
                    lost_ranks.wake(folder)
                optimizer.zero_grad()
                loss(model, sync.num_steps, rank).backward()
                sync.step()
                counter.steps += 1
                if job.evaluates and sync.num_steps == 5:
                    sync.flush()
                    outcome["evaluated"] = state(model)
                    sync.resume()
                if sync.num_steps == job.num_steps:
                    break
        except SystemExit as left:
            outcome["status"] = left.code
        outcome["place"] = loader.state_dict()["num_batches"]
        outcome["own"], outcome["steps"] = state(model), sync.num_steps
        sync.end()
        outcome["last"], outcome["replicas"] = state(model), sync.metrics()["replicas"]

    with logged() as said:
        outcome["raised"] = raised(run)
    outcome["said"] = [line for line in said if " continue" in line]
    sync.detach()
    return outcome


def run(jobs: dict[str, Job], folder: Path) -> dict[str, list[Any]]:
    """Runs jobs, each with a lighthouse of its own; returns what their processes have found, compared if they stay."""
    outcomes: dict[str, list[Any]] = {}
    waiting = list(jobs.items())
    while waiting:
        wave, places = {}, []
        while waiting and len(places) + len(waiting[0][1].names) <= AT_ONCE:
            name, job = waiting.pop(0)
            wave[name] = job
            places += [(name, number) for number in range(len(job.names))]
        may_die = tuple(index for index, (name, number) in enumerate(places) if number in wave[name].fates)
        with ExitStack() as stack:
            addresses = [stack.enter_context(lighthouse()) for _ in wave]
            given = len(places), wave, addresses, folder
            found = launch(train, *given, init=False, may_die=may_die, mostly_wait=True)
        outcomes |= {name: [found.pop(0) for _ in job.names] for name, job in wave.items()}
    problems = {name: raised(partial(check, job, outcomes[name])) for name, job in jobs.items()}
    problems = {name: problem for name, problem in problems.items() if problem is not None}
    assert not problems, "\n".join(f"{name}: {' '.join(problem or ())}" for name, problem in problems.items())
    return outcomes


def check(job: Job, outcomes: list[Any]) -> None:
    """Compares the replicas that train to the end with each other and with the simulation."""
    for number in job.fates:
        assert outcomes[number] == DIED, f"the fate of process {number} has not fired"
    first, back = outcomes[job.staying[0]], {}
    for number in job.staying:
        found = outcomes[number]
        facts = {name: found.get(name) for name in ("raised", "steps", "replicas", "began", "counted", "said")}
        began = max(found.get("began", 0), WAITS + 1) if number >= job.replicas else 0
        expected = {"raised": None, "steps": job.num_steps, "replicas": len(job.staying)}
        expected |= {"began": began, "counted": began, "said": found["said"] if number == job.staying[0] else []}
        assert facts == expected, f"process {number}: {facts}, and not {expected}"
        if number >= job.replicas:
            back[job.names[number]] = found["began"]
        for weights in ("evaluated", "last"):
            assert_same(found[weights], first[weights], (number, weights))
    said = " ".join(first["said"])
    for number in [*job.fates, *job.acts]:
        assert number >= job.replicas or f"replica {number} (host " in said, said
    samples = [sample for number in job.staying for sample in outcomes[number]["samples"]]
    assert len(set(samples)) == len(samples), "some got the same samples"
    if job.given is not None:
        replicas = simulated(job, job.num_steps, lost=job.lost, back=back, leaving=job.leaving)
        for number in job.staying:
            assert_same(outcomes[number]["own"], state(replicas[job.names[number]]), number)


def simulated(job: Job, num_steps: int, **events: Any) -> dict[int, torch.nn.Module]:
    """Returns the replicas of a job after some steps, by the simulation."""
    model = seeded_mlp(batch_norm=job.batch_norm)
    given = {"lost": {}, **(job.given or {}), **events}
    size = {"world_size": job.replicas, "period": job.period}
    return simulate(model, OPTIMIZERS["sgd"], loss, num_steps=num_steps, **size, **given)
