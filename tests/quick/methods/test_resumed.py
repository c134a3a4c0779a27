"""A run that is saved and resumed goes on bit for bit, with all that a method keeps: residuals, factors and others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.method_runs import CASES, FACTORIZED, begin, interrupted
from tests.support.models import assert_same

#: Ranks, the case, and what is set beside its own settings.
Row = tuple[int, str, dict[str, Any]]

#: Those that pack several values into a byte, or send a few of them.
PACKED = ("int4", "int2", "chunked_topk")
#: Of three ranks the last has less. A codec refuses an outer momentum if it has residuals in place of it.
WITH_CODECS: list[Row] = [
    (3, case, {"compression": codec})
    for codec in PACKED
    for case in CASES
    if "DiLoCo" not in case or codec != "chunked_topk"
]
#: After an odd number of steps, so that the other factor is next.
WITH_FACTORS: list[Row] = [
    (2, case, {"low_rank": 2, "low_rank_method": kind}) for kind in ("acp_sgd", "power_sgd") for case in FACTORIZED
]
ARRANGED: list[Row] = [
    (4, case, {"compression": "int8", "topology": topology})
    for case in ("dear, replicated", "dear, sharded", "selsync, parameters", "selsync, gradients", "local_sgd, DiLoCo")
    for topology in ("torus2d", "tree")
    if (case, topology) != ("dear, sharded", "tree")
]
OTHERS: list[Row] = [
    (2, "dear, sharded", {}),
    (2, "dear, sharded", {"compression": "int8", "error_feedback": False}),
    (2, "dear, replicated", {"compression": "int8"}),
]
#: One of each kind: every other case with one of the codecs, and so on.
QUICK: list[Row] = [
    *(
        (3, case, {"compression": "int4" if "DiLoCo" in case else PACKED[i % 3]})
        for i, case in list(enumerate(CASES))[::2]
    ),
    *(WITH_FACTORS[i] for i in (0, 4, 2)),
    *ARRANGED[1::3],
]


def assert_resumes(rows: Sequence[Row]) -> None:
    """Asserts that a resumed run ends with the weights of one that was only saved, and all ranks with the same."""
    for world_size in dict.fromkeys(row[0] for row in rows):
        here = {
            (case, *settings.items(), resumes): partial(interrupted, case, settings, resumes)
            for number, case, settings in rows
            if number == world_size
            for resumes in (False, True)
        }
        outcomes = launch_cases(here, world_size)
        for *row, resumes in here:
            if not resumes:
                continue
            of_resumed = outcomes[(*row, True)]
            for rank, (whole, resumed) in enumerate(zip(outcomes[(*row, False)], of_resumed, strict=True)):
                assert_same(resumed[0], whole[0], (rank, row))
                assert_same(resumed[1], whole[1], (rank, row, "consolidated"))
                assert_same(resumed[1], of_resumed[0][1], (rank, row, "as rank 0"))


def test_an_uninterrupted_run_is_continued() -> None:
    assert_resumes(QUICK)


def load_with_other_settings() -> list[tuple[str, str] | None]:
    """Returns why a state is refused whose residuals are of another topology, and one with factors where none are."""
    outcomes = []
    for case, before, after in (
        ("selsync, gradients", {"compression": "int8", "topology": "tree"}, {"compression": "int8"}),
        ("dear", {"low_rank": 2}, {}),
    ):
        run = begin(case, **before)
        run.steps(range(2))
        run.sync.flush()
        saved = copy.deepcopy(run.sync.state_dict())
        run.sync.detach()
        other = begin(case, **after)
        outcomes.append(raised(partial(other.sync.load_state_dict, saved)))
        other.sync.detach()
    return outcomes


def test_a_checkpoint_of_other_settings_is_refused() -> None:
    for of_topology, of_rank in on_ranks(load_with_other_settings, 2):
        assert_raised(of_topology, "ValueError", "'topology': 'tree", "'topology': 'flat'")
        assert_raised(of_rank, "ValueError", "low_rank", "Use the same settings")
