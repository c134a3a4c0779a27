"""Room behind the values of a buffer: who has it, and that nobody takes values for room."""

from __future__ import annotations

import gc

import pytest
import torch

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.room import with_room, zeros_with_room


def zeros(numel: int, num_shards: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return zeros_with_room(numel, num_shards, dtype, torch.device("cpu"))


def test_room_for_shards_of_one_size() -> None:
    flat = zeros(10, 4)
    gc.collect()  # the mark stays with the storage
    whole = with_room(flat, 12)
    assert whole is not None
    whole.fill_(1)
    assert flat.shape == (10,)
    assert flat.sum() == 10
    assert whole.data_ptr() == flat.data_ptr()
    assert with_room(flat, 13) is None
    assert with_room(flat, 10) is flat


@pytest.mark.parametrize("numel", [0, 1, 7, 12, 25])
def test_rows_and_columns_have_room_too(numel: int) -> None:
    flat = zeros(numel, 12)
    for size in (1, 2, 3, 4, 6, 12):
        assert with_room(flat, -(-numel // size) * size) is not None
    assert flat.untyped_storage().nbytes() < (numel + 12) * 4, "at most 11 values"


def test_no_other_value_is_taken_for_room() -> None:
    flat = zeros(10, 4)
    first, last = flat.split([6, 4])
    assert with_room(first, 8) is None
    assert with_room(flat[:9], 10) is None
    extended = with_room(last, 6)
    assert extended is not None
    assert extended.data_ptr() == last.data_ptr()
    assert with_room(flat.clone(), 12) is None
    assert with_room(torch.zeros(12)[:10], 12) is None, "values of somebody else"


def test_a_view_of_another_type_has_the_same_room() -> None:
    flat = zeros(10, 4, torch.bfloat16)
    as_bytes = flat.view(torch.uint8)
    assert with_room(as_bytes, 24) is not None
    assert with_room(as_bytes, 25) is None


def test_buckets_and_residuals_have_room_for_the_ranks() -> None:
    bucket = Bucket([torch.ones(3), torch.ones(20)], num_shards=5)
    assert bucket.flat.shape == (48,)
    assert with_room(bucket.flat, 50) is not None
    feedback = ErrorFeedback(bucket.flat, world_size=5)
    assert feedback.contribution.shape == (48,)
    assert with_room(feedback.contribution, 50) is not None
