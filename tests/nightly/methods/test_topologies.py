"""All methods on a torus and on trees: the cases that tests/quick leaves out."""

from __future__ import annotations

from tests.quick.methods.test_topologies import CASES, assert_trains_as_in_a_ring


def test_all_others_train_what_they_do_in_a_ring() -> None:
    taken = {"pipe_sgd", "selsync, overlap", "local_sgd, outer", "dear, acp_sgd"}
    assert_trains_as_in_a_ring([case for case in CASES if case not in taken])
