"""Methods that are not DDP in transformers' Trainer: ranks agree, runs resume; and what it cannot do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipesync import PipeSyncPlugin, PipeSyncTrainer
from tests.support.case_table import Outcomes, launch_cases
from tests.support.transformers_models import bert, train, weights_in

METHODS: dict[str, dict[str, Any]] = {
    "parameter_server": {"policy": "sync"},
    "local_sgd": {"period": "0.375 epoch", "overlap_steps": 2, "outer_optimizer": "nesterov"},
    "selsync": {"delta": 0.05, "window": 3},
    "pipe_sgd": {"compression": "int4"},
}
RESUMED = ("local_sgd", "selsync", "pipe_sgd")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {
        (method, resumed): partial(
            train, PipeSyncTrainer, folder / method, resumed, pipesync=PipeSyncPlugin(method, **settings)
        )
        for method, settings in METHODS.items()
        for resumed in (False, True)
        if method in RESUMED or not resumed
    }
    return launch_cases(cases, 2, init=False)


@pytest.mark.parametrize("method", METHODS)
def test_trainer(method: str, trained: Outcomes, folder: Path) -> None:
    """Ranks agree, with what is saved, too; a resumed run is the uninterrupted one."""
    first, second = trained[method, False]
    for moment in ("weights", "further"):
        assert torch.equal(first[moment], second[moment])
    assert not torch.equal(first["weights"], first["further"])
    assert first["losses"] == second["losses"]
    assert len(first["losses"]) == 3
    assert len(first["steps"]) == 8
    assert all(f"{method}/mib_sent" in entry for entry in first["steps"])
    assert torch.equal(first["weights"], weights_in(folder / method / "final" / "model.safetensors"))
    assert (folder / method / "checkpoint-4" / "pipesync_1.bin").exists()
    if method in RESUMED:
        for resumed in trained[method, True]:
            assert torch.equal(resumed["weights"], first["weights"])
    if method == "local_sgd":
        rounds = [entry["local_sgd/rounds"] for entry in first["steps"]]
        assert rounds == [0, 0, 1, 1, 1, 2, 2, 2], "one every three of an epoch's eight steps"


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (PipeSyncPlugin("ea_pipe"), "prepare_pipeline"),
        (PipeSyncPlugin("selsync", injection=(0.5, 0.5)), "injection=\\(0.5, 0.5\\)"),
        (PipeSyncPlugin("parameter_server", partition="work_queue"), "partition='work_queue'"),
    ],
)
def test_what_the_trainer_cannot_do(plugin: PipeSyncPlugin, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PipeSyncTrainer(model=bert(), pipesync=plugin)
