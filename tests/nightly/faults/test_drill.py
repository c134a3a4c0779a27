"""A drill strikes trainings of ranks and of jobs, proves that each fault has happened, and judges what comes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.drill.__main__ import main
from tests.drill.case import Case, Strike
from tests.drill.command import Drill
from tests.drill.faults import JOBS


def test_faults_strike_and_are_judged(tmp_path: Path) -> None:
    """Where a rank dies, where one is only late, and where replicas go on without one."""
    cases = [
        Case(0, "dear", 0, "plain", 2, (Strike("kill", 1, "forward", 4),)),
        Case(1, "local_sgd", 0, "plain", 2, (Strike("pause", 1, "step", 4),)),
        Case(500_000, "local_sgd", 1, "plain", 3, (Strike("kill", 1, "collective", 3, message=1),), JOBS),
    ]
    assert len(list(Drill(out=tmp_path, timeout_s=20, jobs=1)._run_server(cases))) == len(cases)
    records = [json.loads((tmp_path / "cases" / f"{case.seed}.json").read_text()) for case in cases]
    killed, paused, lost = (f"{record['verdict']}: {record['why']}" for record in records)
    assert killed.startswith("ended: RuntimeError: Rank 1 (host ")
    assert records[0]["faults"][0]["proof"] == "exit status -9"
    assert records[0]["resumed_from"] == "at-4"
    assert paused == "survived: weights as an undisturbed run"
    assert lost == "survived: weights as in the simulation without job 1"
    assert not list((tmp_path / "work").iterdir()), "nothing is left"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "selsnyc"], "got 'selsnyc'. Did you mean 'selsync'?"),
        (["--frameworks", "torch"], "got 'torch'"),
        (["--kinds", "kil"], "got 'kil'. Did you mean 'kill'?"),
        (["--subjects", "job"], "got 'job'. Did you mean 'jobs'?"),
        (["--methods", "ea_pipe", "--frameworks", "fabric"], "frameworks=fabric do not have methods=ea_pipe"),
        (["--faults", "0"], "faults must be positive, got 0"),
    ],
)
def test_wrong_options_are_refused(words: list[str], said: str, capsys: Any) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err
