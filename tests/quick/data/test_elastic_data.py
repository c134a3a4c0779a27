"""The data of replicas that come and go: what is left of an epoch, divided among those that are there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import pytest
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.data import TrainLoader
from lightning_pipesync.data.training_data import TrainingData
from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig
from tests.references.elastic_data import Data, seen

EPOCHS = 3


class Members:
    """In place of a method's transport: who is there."""

    def __init__(self, place_of_data: tuple[int, int]) -> None:
        self.place_of_data = place_of_data


def numbers(batch: Tensor | int) -> list[int]:
    return batch.tolist() if isinstance(batch, Tensor) else [batch]


class Replica:
    """A job that trains in a plain loop; with a ``position`` one that comes later, and goes there."""

    def __init__(
        self, loader: DataLoader[Any], place: tuple[int, int], position: list[dict[str, Any]] | None, early: bool
    ) -> None:
        members = Members(place if position is None else (0, 9))
        self.data = TrainingData(LocalSGDConfig(partition="defdp"), cast("Transport", members))
        self.data.elastic = True
        if position is None or not early:
            self.loader = self.data.prepare(loader, seed=7, to_device=numbers)
        if position is not None:
            self.data.go_to(position)
            self.divide(place)
            self.data.skip_ended_epochs()
            if early:
                self.loader = self.data.prepare(loader, seed=7, to_device=numbers)
        self.seen: list[tuple[int, list[int]]] = []
        self.resumes = position is None  # perhaps to the end of an epoch, of which nothing is left
        self._steps = self._train()

    def divide(self, place: tuple[int, int]) -> None:
        cast("Members", self.data.transport).place_of_data = place
        self.data.redivide()

    def step(self) -> bool:
        return next(self._steps, False)

    def _train(self) -> Iterator[bool]:
        for epoch in range(self.loader.epoch, EPOCHS):
            before = len(self.seen)
            for batch in self.loader:
                assert self.loader.epoch == epoch
                self.seen.append((epoch, batch))
                yield True
            assert self.resumes or len(self.seen) > before, f"no batch in epoch {epoch}"


def run(
    data: Data, members: Mapping[int, Sequence[str]], make: Callable[[Data], DataLoader[Any]], early: bool = True
) -> dict[str, list[tuple[int, list[int]]]]:
    """Trains as :func:`seen` says; returns the same of the loaders. All take each step together."""
    replicas: dict[str, Replica] = {}
    found: dict[str, list[tuple[int, list[int]]]] = {}
    step = 0
    while True:
        if step in members:
            others = [replica for name, replica in replicas.items() if name in members[step]]
            positions = [replica.data.position() for replica in others]
            assert all(position == positions[0] for position in positions)
            for name in set(replicas) - set(members[step]):
                found[name] = found.get(name, []) + replicas.pop(name).seen
            for number, name in enumerate(members[step]):
                place = number, len(members[step])
                if name in replicas:
                    replicas[name].divide(place)
                else:
                    replicas[name] = Replica(make(data), place, positions[0] if positions else None, early)
        going_on = {replica.step() for replica in replicas.values()}
        assert len(going_on) == 1, "all members have the same number of steps"
        if going_on == {False}:
            return found | {name: found.get(name, []) + replica.seen for name, replica in replicas.items()}
        step += 1


def plain(data: Data, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(range(data.size), data.batch_size, data.shuffle, drop_last=data.drop_last, **kwargs)  # type: ignore[arg-type]


#: From the step on: who is there. Epochs of 103 samples in batches of 4 have 9 steps of 3 members.
ONE_DIES: dict[int, Sequence[str]] = {0: "abc", 5: "ac"}
ALL_SORTS: dict[int, Sequence[str]] = {0: "abc", 4: "ab", 6: "abcd", 7: "d", 12: "dab", 20: "badce"}
#: a change where an epoch ends: three members have 4 epochs of 9 steps.
AT_THE_END: dict[int, Sequence[str]] = {0: "abc", 9: "ab", 22: "abc"}


@pytest.mark.parametrize("members", [ONE_DIES, ALL_SORTS, AT_THE_END])
@pytest.mark.parametrize("data", [Data(103, 4), Data(103, 4, shuffle=False, drop_last=True), Data(11, 1)])
@pytest.mark.parametrize("early", [True, False])
def test_what_is_left_of_an_epoch_is_divided_among_those_that_are_there(
    members: dict[int, Sequence[str]], data: Data, early: bool
) -> None:
    assert run(data, members, plain, early) == seen(data, members, EPOCHS)


@pytest.mark.parametrize("comes", [8, 9, 10])
@pytest.mark.parametrize("early", [True, False])
def test_one_that_comes_at_the_end_of_an_epoch_begins_with_the_next(comes: int, early: bool) -> None:
    """Also after 9 steps, where two cannot make whole batches of the rest; after 8 they can."""
    data, members = Data(40, 4, drop_last=True), {0: "a", comes: "ab"}
    assert run(data, members, plain, early) == seen(data, members, EPOCHS)


def with_workers(data: Data) -> DataLoader[Any]:
    return plain(data, num_workers=2, prefetch_factor=3, persistent_workers=data.shuffle)


def of_samples(data: Data) -> DataLoader[Any]:
    return DataLoader(range(data.size), None, data.shuffle)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "members", "make"),
    [
        (Data(40, 4), {0: "ab", 2: "a", 4: "ac"}, with_workers),
        (Data(40, 4, shuffle=False), {0: "ab", 2: "a", 4: "ac"}, with_workers),
        (Data(31, 1), ALL_SORTS, of_samples),
    ],
)
def test_what_workers_have_fetched_of_the_old_division_is_thrown_away(
    data: Data, members: dict[int, Sequence[str]], make: Callable[[Data], DataLoader[Any]]
) -> None:
    """And samples without batches are divided, too."""
    assert run(data, members, make) == seen(data, members, EPOCHS)


@pytest.mark.parametrize("data", [Data(103, 4), Data(103, 4, drop_last=True), Data(5, 2, shuffle=False)])
@pytest.mark.parametrize("num_members", [1, 3, 7])
@pytest.mark.parametrize("drops", [False, True])
def test_with_the_same_members_all_the_time_the_order_is_that_of_a_distributed_sampler(
    data: Data, num_members: int, drops: bool
) -> None:
    """Whether torch's sampler is the user's, in each job for a single rank, or is made of the loader's order."""
    names = "abcdefg"[:num_members]

    def make(data: Data) -> DataLoader[Any]:
        sampler = DistributedSampler(range(data.size), 1, 0, data.shuffle, seed=7, drop_last=drops)  # type: ignore[arg-type]
        return DataLoader(range(data.size), data.batch_size, sampler=sampler, drop_last=data.drop_last)  # type: ignore[arg-type]

    trained = run(data, {0: names}, make)
    for rank, name in enumerate(names):
        order = DistributedSampler(range(data.size), num_members, rank, data.shuffle, seed=7, drop_last=drops)  # type: ignore[arg-type]
        expected = []
        for epoch in range(EPOCHS):
            order.set_epoch(epoch)
            loader = DataLoader(range(data.size), data.batch_size, sampler=order, drop_last=data.drop_last)  # type: ignore[arg-type]
            expected += [(epoch, batch.tolist()) for batch in loader]
        assert trained.get(name, []) == expected


def test_the_length_is_that_of_the_epoch_as_it_is_divided_now() -> None:
    replica = Replica(plain(Data(100, 5)), (0, 4), None, early=True)
    assert len(replica.loader) == 5
    for _ in range(2):
        replica.step()
    replica.divide((0, 2))
    assert (len(replica.loader), replica.data.steps_per_epoch()) == (2 + 6, 2 + 6)
    replica.divide((0, 4))
    assert len(replica.loader) == 5
    replica.divide((0, 1))
    for _ in range(12):
        replica.step()
    assert (replica.loader.epoch, len(replica.loader)) == (0, 14)
    replica.step()
    assert (replica.loader.epoch, len(replica.loader)) == (1, 20)


def test_a_run_resumes_where_the_epoch_was_divided_before() -> None:
    """From a state within the epoch, or at its end, with more members than then."""
    for steps, place in [(3, (1, 3)), (8, (0, 1)), (9, (1, 2))]:
        saved: Replica = Replica(plain(Data(103, 4)), (0, 3), None, early=True)
        for _ in range(3):
            saved.step()
        saved.divide((0, 4))
        for _ in range(steps - 3):
            saved.step()
        resumed = Replica(plain(Data(103, 4)), place, None, early=True)
        resumed.loader.load_state_dict(saved.loader.state_dict())
        saved.divide(place)
        for _ in range(12):
            saved.step()
            resumed.step()
        assert resumed.seen == saved.seen[steps:]


@pytest.mark.parametrize("ahead", [2, 12, 13, 30])
def test_a_replica_that_is_behind_goes_to_the_others(ahead: int) -> None:
    """Within its epoch, to the end of it, or from within the batches of one epoch to those of a later one."""
    first, second = (Replica(plain(Data(103, 4)), (number, 2), None, early=True) for number in range(2))
    for _ in range(1 + ahead):
        first.step()

    def batches() -> Iterator[list[int]]:
        while second.loader.epoch < EPOCHS:
            yield from second.loader

    following = batches()
    next(following)
    second.data.go_to(first.data.position())
    second.data.redivide()
    for _ in range(3 * 13 - ahead - 1):
        assert first.step()
        next(following)
        assert second.data.position() == first.data.position()


def test_one_that_leaves_at_the_end_of_an_epoch_ends_before_the_next() -> None:
    """So its loop does what follows an epoch, and a resumed run has no epoch of no batches."""
    job, ended = Replica(plain(Data(12, 4)), (0, 1), None, early=True), []

    def end_if_left() -> None:
        if len(job.seen) == 3:
            raise SystemExit

    def train() -> None:
        for epoch in range(EPOCHS):
            for batch in job.loader:
                job.seen.append((epoch, batch))
            ended.append(epoch)

    job.data.between_batches = end_if_left
    with pytest.raises(SystemExit):
        train()
    assert ended == [0]
    assert job.loader.state_dict().items() >= {"epoch": 1, "num_batches": 0, "offset": 0}.items()


def test_another_replicas_data_must_be_the_same() -> None:
    here = Replica(plain(Data(103, 4)), (0, 2), None, early=True)
    for name, other in [
        ("samples_in_data_set=104", Data(104, 4)),
        ("batch_size=5", Data(103, 5)),
        ("shuffle=False", Data(103, 4, shuffle=False)),
        ("drop_last=True", Data(103, 4, drop_last=True)),
    ]:
        for early in (True, False):
            with pytest.raises(ValueError, match=f"{name}.*give all replicas the same"):
                Replica(plain(other), (1, 2), here.data.position(), early)


class Stream(IterableDataset[int]):
    """Has no order to divide."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


class Own(Sampler[int]):
    """An order of the user's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("kind", ["stream", "sampler"])
def test_a_users_own_order_stays(kind: str) -> None:
    """With a warning; who comes skips what its own loader would have given."""

    def make(data: Data) -> DataLoader[Any]:
        if kind == "stream":
            return DataLoader(Stream(), 4)
        return DataLoader(range(12), 4, sampler=Own())  # type: ignore[arg-type]

    with pytest.warns(UserWarning, match="cannot be divided among replicas that come and go"):
        trained = run(Data(12, 4), {0: "ab", 2: "ac"}, make)
    whole = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [batch for _, batch in trained["a"]][:3] == whole
    assert [batch for _, batch in trained["c"]][:1] == whole[2:]
    assert len(trained["a"]) == 2 + len(trained["c"])


def test_a_loop_that_loads_its_own_data_is_warned_once() -> None:
    data = TrainingData(LocalSGDConfig(partition="defdp"), cast("Transport", Members((0, 2))))
    data.elastic = True
    with pytest.warns(UserWarning, match="No loader was given to prepare_train_loader"):
        data.check_followed()
    prepared = Replica(plain(Data(12, 4)), (0, 2), None, early=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.check_followed()
        prepared.data.check_followed()


def test_batches_that_would_be_the_same_on_all_are_refused() -> None:
    class Pairs(BatchSampler):
        """A batch sampler of the user's own."""

    def replica() -> TrainLoader:
        loader = DataLoader(range(12), batch_sampler=Pairs(SequentialSampler(range(12)), 2, False))  # type: ignore[arg-type]
        return Replica(loader, (0, 2), None, early=True).loader

    with pytest.raises(ValueError, match=r"same batches: a Pairs makes them in torch's order.*Leave out"):
        replica()


def test_loaders_are_divided_each_at_its_place_and_forgotten_when_they_are_gone() -> None:
    data = TrainingData(LocalSGDConfig(partition="defdp"), cast("Transport", Members((0, 2))))
    data.elastic = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = (data.prepare(plain(Data(size, 4)), seed=7) for size in (40, 24))
    batches = iter(first)
    next(batches)
    assert [place["offset"] for place in data.position()] == [8, 0]
    cast("Members", data.transport).place_of_data = (0, 1)
    data.redivide()
    assert (len(first), len(second)) == (1 + 8, 6)
    del first, batches
    assert [place["samples_in_data_set"] for place in data.position()] == [24]
