"""A fit of transformers' Trainer with a method: logged, evaluated, saved, resumed and trained again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from lightning_pipesync import PipeSyncPlugin, PipeSyncTrainer
from tests.support.case_table import launch_cases
from tests.support.transformers_models import train, weights_in


def test_dear_is_ddp(folder: Path) -> None:
    """Ranks agree, also after training again; a resumed run is the uninterrupted one."""
    dear = partial(train, PipeSyncTrainer, folder / "dear", pipesync=PipeSyncPlugin("dear", bucket_mb=0.01))
    cases: dict[str, Any] = {"ddp": partial(train, Trainer, folder / "ddp"), "dear": dear}
    outcomes = launch_cases({**cases, "resumed": partial(dear, resume=True)}, 2, init=False)
    for rank, (outcome, expected) in enumerate(zip(outcomes["dear"], outcomes["ddp"], strict=True)):
        for moment in ("weights", "further"):
            assert torch.equal(outcome[moment], expected[moment])
        assert torch.equal(outcome["weights"], outcomes["resumed"][rank]["weights"])
        assert outcome["losses"] == expected["losses"]
        assert all(map(torch.equal, outcome["followed"], expected["followed"])), "a callback reads that step's weights"
    assert torch.equal(outcome["weights"], weights_in(folder / "dear" / "final" / "model.safetensors"))
    steps = outcomes["dear"][0]["steps"]
    assert len(steps) == 8
    assert all("dear/mib_sent" in entry for entry in steps)
    norms = [[entry["grad_norm"] for entry in outcomes[name][0]["steps"]] for name in ("dear", "ddp")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
