"""Accelerators as jobs of their own: bit for bit the plain loop, and with losses the simulation; each sample once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipesync import LocalSGD, PipeSyncAccelerator, PipeSyncPlugin
from lightning_pipesync.training.place import HandedOver
from tests.references.elastic_data import Data, seen
from tests.references.lost_rank import simulate
from tests.references.selsync import average
from tests.support.harness import DIED, assert_raised, raised
from tests.support.models import OPTIMIZERS, Counter, assert_same, loss, seeded_mlp, state
from tests.support.replica_jobs import DIES, TIMEOUT_S, WAITS, dies_and_comes_back, launch_replicas

PERIOD, EPOCHS, DATA = 2, 2, Data(60, 4)
#: The step after which a checkpoint is saved, within a round and an epoch, which has eight.
SAVED = 11


def accelerator_of(loaders: dict[str, Any] | None = None, accumulates: int = 1, **settings: Any) -> PipeSyncAccelerator:
    plugin = PipeSyncPlugin("local_sgd", **{"period": PERIOD, "timeout_s": TIMEOUT_S, **settings})
    data = DataLoaderConfiguration(data_seed=7, **(loaders or {}))
    return PipeSyncAccelerator(plugin, dataloader_config=data, gradient_accumulation_steps=accumulates)


def numbers(data: Data = DATA) -> DataLoader[int]:
    return DataLoader(range(data.size), data.batch_size, shuffle=True)  # type: ignore[arg-type]


@dataclass
class Training:
    """A training of a job's, of which `batches` has (epoch, batch) of each step."""

    rank: int
    data: Data = DATA
    accumulates: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    before_step: Callable[[int], object] = lambda _: None
    after_step: Callable[[int], object] = lambda _: None
    batches: list[tuple[int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        accelerator = self.accelerator = accelerator_of(accumulates=self.accumulates, **self.settings)
        self.counter, self.model = Counter(), seeded_mlp(self.rank)
        optimizer = OPTIMIZERS["sgd"](self.model)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        accelerator.register_for_checkpointing(self.counter)
        self.loader = accelerator.prepare_train_loader(numbers(self.data))  # before or after the model
        self.network, self.optimizer, self.scheduler = accelerator.prepare(self.model, optimizer, scheduler)

    def run(self, epochs: int = EPOCHS) -> None:
        """Trains for the rest of the epochs: the others' steps are counted, too."""
        accelerator = self.accelerator
        for epoch in range(self.loader.epoch, epochs):
            for batch in self.loader:
                self.before_step(self.counter.steps)
                self.batches.append((epoch, batch.tolist()))
                number = len(self.batches) - 1 if self.accumulates > 1 else self.counter.steps
                with accelerator.accumulate(self.network):
                    accelerator.backward(loss(self.network, number, self.rank))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.counter.steps += accelerator.sync_gradients
                self.after_step(self.counter.steps)
            assert epoch in dict(self.batches), "it is not empty"


def train(rank: int, data: Data, directory: Path) -> dict[str, Any]:
    """Trains as the job ``rank``; the last one is job 0, when it comes back."""
    comes_back = rank == 3
    rank, before_step = dies_and_comes_back(rank, 0, 3, directory)
    training = Training(rank, data, before_step=before_step)
    if comes_back:
        (directory / "started").touch()  # it is alive, so that the others wait for it in their next round
    training.run()
    own = state(training.model)
    training.accelerator.end()
    counted = {"steps": training.counter.steps, "scheduled": training.scheduler.scheduler.last_epoch}
    training.accelerator.free_memory()
    return {"own": own, "agreed": state(training.model), "seen": training.batches, **counted}


@pytest.mark.parametrize("data", [DATA, Data(80, 4)], ids=["within an epoch", "at the end of one"])
def test_the_first_dies_and_comes_back(data: Data, tmp_path: Path) -> None:
    died, *others, again = launch_replicas(train, 4, data, tmp_path, num_replicas=3, may_die=(0,))
    assert died == DIED
    steps = others[0]["steps"]
    came, lost = steps - len(again["seen"]), DIES + 1
    assert came > WAITS
    expected = seen(data, {0: "012", lost: "12", came: "012"}, EPOCHS)
    settings: dict[str, Any] = {"world_size": 3, "num_steps": steps, "period": PERIOD}
    replicas = simulate(seeded_mlp(), OPTIMIZERS["sgd"], loss, lost={0: lost}, back={0: came}, **settings)
    for rank, outcome in enumerate((again, *others)):
        assert outcome["seen"] == (expected[str(rank)][lost:] if rank == 0 else expected[str(rank)])
        assert outcome["steps"] == outcome["scheduled"] == steps
        assert_same(outcome["own"], state(replicas[rank]), rank)
    average([list(replica.parameters()) for replica in replicas.values()])
    for rank, outcome in enumerate((again, *others)):
        assert_same(outcome["agreed"], state(replicas[rank]), rank)


def in_plain_loop(rank: int) -> tuple[list[tuple[int, list[int]]], dict[str, Tensor]]:
    """Accumulates the gradients of two batches, and ends within a round."""
    model = seeded_mlp(rank)
    optimizer = OPTIMIZERS["sgd"](model)
    sync, batches = LocalSGD(model, optimizer, period=3, timeout_s=TIMEOUT_S), []
    loader = sync.prepare_train_loader(numbers(), seed=7)
    for epoch in range(EPOCHS):
        for batch in loader:
            (loss(model, len(batches), rank) / 2).backward()
            batches.append((epoch, batch.tolist()))
            if loader.num_batches % 2 == 0 or loader.num_batches == len(loader):
                sync.step()
                optimizer.zero_grad()
    sync.end()
    sync.detach()
    return batches, state(model)


def in_accelerate(rank: int) -> tuple[Any, ...]:
    training = Training(rank, accumulates=2, settings={"period": 3})
    training.run()
    training.network.eval()  # has the weights of the last round, until the end
    training.network.train()
    training.accelerator.end_training()
    return training.batches, state(training.model), training.counter.steps


def test_the_same_members_train_as_in_a_plain_loop() -> None:
    """With gradients that are accumulated, also over the end of an epoch."""
    of_loop, of_both = launch_replicas(in_plain_loop, 2), launch_replicas(in_accelerate, 2)
    for (batches, weights), (of_accelerate, others, steps) in zip(of_loop, of_both, strict=True):
        assert batches == of_accelerate
        assert_same(weights, others)
        assert steps == EPOCHS * 4


def evaluate(rank: int) -> dict[str, Any]:
    """Evaluates before the training, within it and after it; and looks at what the loaders say."""
    training = Training(rank)
    accelerator, network = training.accelerator, training.network
    test_loader = accelerator.prepare(DataLoader(range(10), 4))
    outcome: dict[str, Any] = {"tested": [], "weights": [], "gathered": [], "ends": [], "lengths": set()}

    def test() -> None:
        network.eval()
        outcome["tested"].append(
            [sample for batch in test_loader for sample in accelerator.gather_for_metrics(batch).tolist()]
        )
        outcome["weights"].append(state(training.model))
        network.train()

    def look(step: int) -> None:
        outcome["lengths"].add(len(training.loader))
        outcome["ends"].append(accelerator.gradient_state.end_of_dataloader)
        if step == 5:
            test()
            outcome["ends after the test"] = accelerator.gradient_state.end_of_dataloader

    test()
    training.before_step = look
    training.run(1)
    batch = torch.arange(3)
    for given in training.loader:
        outcome["gathered"].append(len(accelerator.gather_for_metrics(batch)) == len(batch) and len(given) > 0)
    accelerator.end()
    test()
    accelerator.end_training()
    return outcome


def test_evaluation_is_whole_in_each_job() -> None:
    one, other = launch_replicas(evaluate, 2)
    for outcome in (one, other):
        assert outcome["tested"] == [list(range(10))] * 3
        assert outcome["ends"] == [False] * 7 + [True]
        assert outcome["lengths"] == {8}
        assert not outcome["ends after the test"]
        assert all(outcome["gathered"])
    for before, after in zip(one["weights"][1:], other["weights"][1:], strict=True):
        assert_same(before, after)


def resume(rank: int, directory: Path, number: int, saves: bool) -> tuple[Any, ...]:
    """Trains two epochs, saving within the second; or what comes after that, in ``number`` of the jobs."""
    training = Training(rank, settings={"outer_optimizer": "nesterov"})
    accelerator, folder = training.accelerator, str(directory / str(rank))
    if saves:
        training.after_step = lambda step: accelerator.save_state(folder) if step == SAVED else None
    else:
        accelerator.load_state(folder)
        epoch = 1 if number == 1 else training.loader.epoch
        training.loader.set_epoch(epoch)  # as scripts do that count by themselves
        assert accelerator.skip_first_batches(training.loader, SAVED - 8) is training.loader
    training.run()
    accelerator.end_training()
    return training.batches, state(training.model), training.counter.steps


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Within an epoch: also alone, where each sample that is left is seen once."""
    whole = launch_replicas(resume, 2, tmp_path, 2, True)
    for (batches, weights, steps), (resumed, others, number) in zip(
        whole, launch_replicas(resume, 2, tmp_path, 2, False), strict=True
    ):
        assert resumed == batches[SAVED:]
        assert_same(weights, others)
        assert steps == number == 16
    rest = sorted({sample for batches, *_ in whole for _, batch in batches[SAVED:] for sample in batch})
    [(alone, *_)] = launch_replicas(resume, 1, tmp_path, 1, False)
    assert sorted(sample for _, batch in alone for sample in batch) == rest
    assert {epoch for epoch, _ in alone} == {1}


class Stream(IterableDataset):
    """Five numbers of this replica's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def iterate_over_a_stream(rank: int) -> dict[str, Any]:
    """Accumulates two batches of two numbers each, of which an epoch has three."""
    accelerator = accelerator_of(accumulates=2)
    model = seeded_mlp(rank)
    network, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loader = accelerator.prepare_train_loader(DataLoader(Stream(), 2))
    ends, steps = [], []
    for batch in loader:
        with accelerator.accumulate(network):
            accelerator.backward(loss(network, len(batch), rank))
            optimizer.step()
            optimizer.zero_grad()
        steps.append(accelerator.sync_gradients)
        ends.append(accelerator.gradient_state.end_of_dataloader)
    accelerator.end_training()
    return {"ends": ends, "steps": steps, "said": [str(one.message) for one in said]}


def test_data_of_its_own_are_not_divided() -> None:
    for outcome in launch_replicas(iterate_over_a_stream, 2):
        assert outcome["ends"] == [False, False, True]
        assert outcome["steps"] == [False, True, True]
        assert any("an iterable data set cannot be divided" in message for message in outcome["said"])


REFUSED = {"split_batches": True, "dispatch_batches": True, "even_batches": False}


def begin_badly(rank: int) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    for name, value in REFUSED.items():
        accelerator = accelerator_of({name: value})
        outcomes[name] = raised(lambda accelerator=accelerator: accelerator.prepare_train_loader(numbers()))
    accelerator = accelerator_of()
    loader = accelerator.prepare_train_loader(numbers())
    outcomes["no model"] = raised(lambda: loader.epoch)
    model, other = seeded_mlp(), seeded_mlp()
    accelerator.prepare(model, OPTIMIZERS["sgd"](model))
    outcomes["two models"] = raised(lambda: accelerator.prepare(other, OPTIMIZERS["sgd"](other)))
    accelerator.free_memory()
    return outcomes


def begin_elsewhere(rank: int) -> Any:
    """The second one counts its epochs by itself, as if they had not begun together."""
    training = Training(rank)
    training.loader.set_epoch(3 * rank)
    outcome = raised(lambda: training.run(1))
    training.accelerator.free_memory()  # at the end of its process: the others need not wait
    return outcome


def test_what_a_job_cannot_do_is_refused() -> None:
    [outcomes] = launch_replicas(begin_badly, 1)
    for name, value in REFUSED.items():
        assert_raised(outcomes[name], "ValueError", "lighthouse='127.0.0.1", f"{name}={value}", "DataLoaderConfig")
    assert_raised(outcomes["no model"], "RuntimeError", "call prepare(model, optimizer)")
    assert_raised(outcomes["two models"], "ValueError", "2 models with optimizers", "a job has one replica")
    together, alone = launch_replicas(begin_elsewhere, 2)
    assert together is None
    assert_raised(alone, "ValueError", "set_epoch(3)", "in epoch 0", "range(train_loader.epoch, epochs)")


def test_other_objects_are_refused() -> None:
    def of_job(steps: int, *schedulers: Any) -> HandedOver:
        return HandedOver(lambda: {"schedulers": schedulers}, lambda: {"batches a step": (steps, "set the same")})

    here = of_job(2)
    with pytest.raises(ValueError, match="2 batches a step, and the others have 3: set the same"):
        here.load_state_dict(of_job(3).state_dict())
    with pytest.raises(ValueError, match="has 0 schedulers, and the others have 1"):
        here.load_state_dict(of_job(2, Counter()).state_dict())
