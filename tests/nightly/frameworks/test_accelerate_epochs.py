"""Prepared training loaders of Accelerate: the Trainer's order, which ranks share, and epochs that stop or resume."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from tests.support.accelerate_runs import end
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, raised
from tests.support.lightning_models import Classifier, train_loader, trainer

SAMPLES, BATCH = 56, 8
DATA = TensorDataset(torch.arange(SAMPLES))
#: By order of the data: the method's settings.
ORDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "seldp": ("selsync", {}),
    "defdp": ("dear", {}),
    "injection": ("selsync", {"injection": (0.5, 0.5)}),
    "pipeline": ("ea_pipe", {}),
}


class Shuffled(Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES, generator=self.generator).tolist()

    def __len__(self) -> int:
        return SAMPLES


SAMPLERS: dict[str, Any] = {
    "subset": lambda: SubsetRandomSampler(range(SAMPLES)),
    "weighted": lambda: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False),
    "own": Shuffled,
    "own, with a generator": lambda: Shuffled(torch.Generator().manual_seed(5)),
}


def accelerator_of(
    method: str, even_batches: bool = True, data_seed: int | None = 3, **settings: Any
) -> PipeSyncAccelerator:
    configuration = DataLoaderConfiguration(data_seed=data_seed, even_batches=even_batches)
    accelerator = PipeSyncAccelerator(PipeSyncPlugin(method, **settings), dataloader_config=configuration)
    if settings.get("injection"):  # which needs a method
        model = nn.Linear(1, 1)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator


def whole_or_not(name: str) -> dict[str, list[list[int]]]:
    """The samples of each epoch: of whole ones, of their first three batches, and resumed in the second one."""
    method, settings = ORDERS[name]
    epochs = {}
    for how in ("whole", "left early", "resumed"):
        accelerator = accelerator_of(method, **settings)
        loader = accelerator.prepare_train_loader(DataLoader(DATA, BATCH, shuffle=True))
        if how == "resumed":
            loader.set_epoch(1)
            iterated = [accelerator.skip_first_batches(loader, 1), loader]
        else:
            iterated = [loader] * 3
        number = 3 if how == "left early" else None
        epochs[how] = [[x for (batch,) in islice(one, number) for x in batch.tolist()] for one in iterated]
        end(accelerator)
    return epochs


def sampled(name: str) -> list[list[int]]:
    """The samples of two epochs, with other random numbers on each rank."""
    accelerator = accelerator_of("dear")
    set_seed(7, device_specific=True)
    loader = accelerator.prepare_train_loader(DataLoader(DATA, BATCH, sampler=SAMPLERS[name]()))
    found = []
    for _ in range(2):
        torch.manual_seed(100 * accelerator.process_index)
        found.append([x for (batch,) in loader for x in batch.tolist()])
    end(accelerator)
    return found


def gathered(partition: str) -> list[Tensor]:
    """Of each batch what ``gather_for_metrics`` returns."""
    accelerator = accelerator_of("selsync", partition=partition)
    loader = accelerator.prepare_train_loader(DataLoader(DATA, 16, shuffle=True))
    found = [accelerator.gather_for_metrics(batch) for (batch,) in loader]
    end(accelerator)
    return found


def uneven() -> tuple[Any, list[int]]:
    """What is said of ranks with 4 and 3 batches; and how many each has within ``join_uneven_inputs``."""
    accelerator = accelerator_of("dear", even_batches=False)
    model = nn.Linear(1, 1)
    network, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    refused = raised(lambda: accelerator.prepare_train_loader(DataLoader(DATA, BATCH)))
    loader = accelerator.prepare(DataLoader(DATA, BATCH))
    numbers = [sum(1 for _ in loader)]
    with accelerator.join_uneven_inputs([network], even_batches=True):
        numbers.append(sum(1 for _ in loader))
    numbers.append(sum(1 for _ in loader))
    end(accelerator)
    return refused, numbers


def resumed_with(folder: Path, *seeds: int) -> list[str]:
    """What is said where a checkpoint with a seed of the data's order is loaded by a run with another one."""
    said: list[str] = []
    for resumes, seed in enumerate(seeds):
        accelerator = accelerator_of("dear", data_seed=None)
        set_seed(seed)
        model = nn.Linear(1, 1)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.prepare_train_loader(DataLoader(DATA, BATCH, shuffle=True))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if resumes:
                accelerator.load_state(str(folder))
            else:
                accelerator.save_state(str(folder))
        said = [str(one.message) for one in caught if "another order" in str(one.message)]
        end(accelerator)
    return said


def as_in_a_trainer(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """The samples of each batch of two epochs, in a Trainer and here."""
    model = Classifier()
    trainer("selsync", 2, folder).fit(model, train_loader())
    accelerator = accelerator_of("selsync", data_seed=0)
    loader = accelerator.prepare_train_loader(train_loader())
    found = [indices.tolist() for _ in range(2) for indices, _, _ in loader]
    end(accelerator)
    return model.seen, found


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {("epochs", name): partial(whole_or_not, name) for name in ORDERS}
    cases |= {("sampled", name): partial(sampled, name) for name in SAMPLERS}
    cases |= {("gathered", partition): partial(gathered, partition) for partition in ("seldp", "defdp")}
    cases |= {"uneven": uneven, "Trainer": partial(as_in_a_trainer, folder)}
    cases |= {("seeds", seeds): partial(resumed_with, folder / f"{seeds}", *seeds) for seeds in ((1, 2), (1, 1))}
    return launch_cases(cases, 2, init=False)


def test_the_order_of_seldp_is_the_trainers(trained: Outcomes) -> None:
    (in_trainer, first), (of_other, second) = trained["Trainer"]
    assert first == in_trainer
    assert second == of_other != first


@pytest.mark.parametrize("name", ORDERS)
def test_an_epoch_that_stops_early_or_is_resumed_does_not_come_again(name: str, trained: Outcomes) -> None:
    """The first samples of each epoch: with data injection the number of rows from others is random."""
    one, other = trained["epochs", name]
    assert (one["whole"] == other["whole"]) == (name == "pipeline"), "all ranks of a pipeline load the same batches"
    for epochs in (one, other):
        first, second, third = ([*one[:4]] for one in epochs["whole"])
        assert first != second
        assert [one[:4] for one in epochs["left early"]] == [first, second, third]
        rest, after = epochs["resumed"]
        assert after[:4] == third
        if name != "injection":
            assert 0 < len(rest) < len(epochs["whole"][1])
            assert epochs["whole"][1][-len(rest) :] == rest


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_share_the_order_of_a_sampler_that_shuffles(name: str, trained: Outcomes) -> None:
    """All samples come, and in another order in another epoch, whatever random numbers the ranks have.

    Of seven batches the second rank has three, and one of the first again.
    """
    first, second = trained["sampled", name]
    for one, other in zip(first, second, strict=True):
        assert len(one) == len(other) == 4 * BATCH
        assert set(one + other) == set(range(SAMPLES))
    assert first[0] != first[1]


def test_metrics_are_gathered_of_all_samples(trained: Outcomes) -> None:
    for partition in ("seldp", "defdp"):
        for batches in trained["gathered", partition]:
            assert sorted(torch.cat(batches).tolist()) == list(range(SAMPLES)), partition


def test_ranks_with_other_numbers_of_batches_are_refused(trained: Outcomes) -> None:
    for rank, (refused, numbers) in enumerate(trained["uneven"]):
        assert_raised(refused, "ValueError", "4, 3 training batches", "even_batches=False")
        assert numbers == [4 - rank, 4, 4 - rank]


def test_another_order_is_told_when_a_run_resumes(trained: Outcomes) -> None:
    first, second = trained["seeds", (1, 2)]
    assert len(first) == 1
    assert "data_seed=1" in first[0]
    assert second == []
    assert trained["seeds", (1, 1)] == [[], []]
