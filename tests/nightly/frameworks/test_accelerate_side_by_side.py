"""Pipelines side by side in Accelerate's loop: two of two stages."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.nightly.frameworks.test_accelerate_state import LOSS, accelerator_of
from tests.support.case_table import launch_cases
from tests.support.lightning_models import Classifier, dataset, train_loader
from tests.support.models import OPTIMIZERS

SAVED_AFTER = 5


def train(folder: Path, average: str, resumed: bool) -> tuple[Tensor, list[list[int]]]:
    """The weights, and the samples of each batch; saves after some batches, or resumes there."""
    settings = {"split": (2,), "num_pipelines": 2, "average": average, "average_period": 2}
    accelerator = accelerator_of("ea_pipe", **settings)
    torch.manual_seed(100 * resumed + accelerator.process_index)
    model = Classifier(batch_norm=True, dropout=0.3)
    loader = accelerator.prepare_train_loader(train_loader())
    evaluated = accelerator.prepare(train_loader())
    assert len(evaluated) == 2 * len(loader)
    engine = accelerator.prepare_pipeline(
        model.model, LOSS, lambda parameters: OPTIMIZERS["adamw"](nn.ParameterList(parameters))
    )
    seen = []
    loader.set_epoch(0)
    if resumed:
        accelerator.load_state(str(folder / average))
        loader = accelerator.skip_first_batches(loader, SAVED_AFTER)
    for number, (indices, x, y) in enumerate(loader, start=1):
        seen.append(indices.tolist())
        engine.train_batch((x, y))
        if number == SAVED_AFTER and not resumed:
            accelerator.save_state(str(folder / average))
    engine.gather()
    accelerator.free_memory()
    return model.weights(), seen


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Bit for bit; the ranks of a pipeline load the same batches, and the pipelines divide the samples."""
    averages = ("gradients", "elastic")
    cases = {
        (average, resumed): partial(train, tmp_path, average, resumed) for average in averages for resumed in (0, 1)
    }
    outcomes = launch_cases(cases, 4)
    for average in averages:
        whole, resumed = outcomes[average, 0], outcomes[average, 1]
        assert whole[0][1] == whole[1][1]
        assert whole[2][1] == whole[3][1]
        assert sorted(i for rank in (0, 2) for batch in whole[rank][1] for i in batch) == list(range(len(dataset())))
        for weights, _ in [*whole, *resumed]:
            assert torch.equal(weights, whole[0][0])
        assert [seen for _, seen in resumed] == [seen[SAVED_AFTER:] for _, seen in whole]
