"""Every method, on streams, in the settings that tests/quick leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.streams.table import FRAMEWORKS, LOOPS, OF_FOUR, QUICK, TRAININGS, assert_nothing_reported
from tests.streams.trainings import (
    copy_and_free,
    drop_a_handle,
    load_and_train,
    receive_ahead,
    receive_from_own_server,
    train,
    train_as_others,
)
from tests.support.harness import call_on_hosts


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_is_in_order(name: str) -> None:
    assert_nothing_reported(2, train, [(training,) for training in TRAININGS[name][name in QUICK :]])


def test_a_training_of_four_ranks_is_in_order() -> None:
    assert_nothing_reported(4, call_on_hosts, [(2, train, training) for training in OF_FOUR])


def test_servers_pipelines_and_staged_tensors_are_in_order() -> None:
    assert_nothing_reported(2, train_as_others, [*LOOPS])


def test_trainings_in_frameworks_and_with_a_loss_scaler_are_in_order() -> None:
    assert_nothing_reported(2, train_as_others, [*FRAMEWORKS])


@pytest.mark.parametrize(
    ("world_size", "settings"), [(2, {"policy": "sync"}), (3, {"policy": "k_async", "servers": 2})]
)
def test_what_servers_load_and_return_is_in_order(world_size: int, settings: dict[str, Any]) -> None:
    assert_nothing_reported(world_size, load_and_train, [(settings,)])


@pytest.mark.parametrize("run", [drop_a_handle, copy_and_free, receive_from_own_server, receive_ahead])
def test_memory_is_kept_for_the_stream_that_uses_it(run: Callable[[], None]) -> None:
    assert_nothing_reported(2, run, [()])
