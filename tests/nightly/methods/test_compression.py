"""Every codec in every method that compresses: what tests/quick does with one codec for each method, with all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from tests.quick.methods.test_compression import (
    ARRIVING,
    FLAT,
    LOSSY,
    ON_A_TREE,
    ON_HOSTS,
    Row,
    assert_arrive,
    assert_follows,
    in_turns,
    refused,
)

#: Quick cases among them are left out.
TAKEN = {*in_turns([(case, place) for place in ("2", "3") for case in FLAT])}
ARRANGED = [*ON_HOSTS, *ON_A_TREE]


def rows_of(pairs: Sequence[tuple[str, str]], codecs: Sequence[str], feedback: bool) -> list[Row]:
    rows = [(case, place, codec, feedback) for (case, place), codec in product(pairs, codecs)]
    return [row for row in rows if row not in TAKEN and not refused(row[0], row[2])]


@pytest.mark.parametrize("case", FLAT)
def test_a_method_follows_one_rule_with_every_codec(case: str) -> None:
    """On two ranks and on three; also without error feedback."""
    assert_follows(rows_of([(case, "2"), (case, "3")], LOSSY, True))
    assert_follows(rows_of([(case, "2")], ("fp8", "int8", "int4", "chunked_topk"), False))


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4", "chunked_topk"])
def test_methods_on_hosts_and_on_trees_follow_it(codec: str) -> None:
    assert_follows(rows_of(ARRANGED, [codec], codec != "int4"))


def test_codecs_arrive_where_methods_do_uncompressed() -> None:
    """Each method with one of them, and each codec: what each does in a step is what the tests above have shown."""
    assert_arrive([(ARRIVING[i % len(ARRIVING)], codec) for i, codec in enumerate(LOSSY)])
