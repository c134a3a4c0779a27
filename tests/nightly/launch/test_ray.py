"""The strategies on workers of Ray Train: as under plain Lightning; checkpoints, restarts, a worker that is lost."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import environment, run_together
from tests.support.docs_pages import DOCS, snippets_of
from tests.support.harness import assert_raised, on_ranks
from tests.support.lightning_models import make_strategy

pytest.importorskip("ray", reason="ray is not installed: make test-ray")

from tests.nightly.launch import ray_fits

TWIN = """
import sys
sys.modules["lightning"] = None
from lightning_pipesync.ray import RayDeARStrategy
from pytorch_lightning.strategies import DDPStrategy
assert issubclass(RayDeARStrategy, DDPStrategy)
"""
#: How often Ray asks its workers, and how long it waits for a frozen one to end: shorter than by default.
TIMES = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": 0.2, "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What workers and driver have left."""
    folder = tmp_path_factory.mktemp("ray")
    command = [sys.executable, "-m", "tests.nightly.launch.ray_fits", folder]
    [driver] = run_together((command, environment(**TIMES, RAY_USAGE_STATS_ENABLED=0)), timeout_s=400)
    assert driver.returncode == 0, driver.stdout
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "driver.pt")


def of_ranks(folder: Path, run: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{run}-{rank}.pt") for rank in range(2)]


def fit_plainly(name: str, folder: Path, **kwargs: Any) -> torch.Tensor:
    """As in a worker of Ray, under plain Lightning."""
    return ray_fits.fit(make_strategy({"name": name, **ray_fits.STRATEGIES[name]}), 2, folder, **kwargs)


@pytest.mark.parametrize("name", ray_fits.STRATEGIES)
def test_weights_are_those_under_plain_lightning(name: str, folder: Path, tmp_path: Path) -> None:
    expected = on_ranks(fit_plainly, 2, name, tmp_path, init=False)
    for rank, found in enumerate(of_ranks(folder, "each")):
        assert torch.equal(found[name][0], expected[rank])


def test_workers_on_a_machine_are_counted(folder: Path) -> None:
    """As rows of a torus."""
    for found in of_ranks(folder, "each"):
        assert {found[name][1] for name in ray_fits.STRATEGIES} == {2}


@pytest.mark.parametrize("given", ["str", "DeARStrategy"])
def test_ray_refuses_other_strategies(given: str, folder: Path) -> None:
    for found in of_ranks(folder, "each"):
        assert_raised(found[f"refused {given}"], "RuntimeError", "Invalid strategy class", "DeARStrategy'>")


def test_a_worker_that_dies_is_restarted_from_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    expected = on_ranks(partial(fit_plainly, ray_fits.LOST, tmp_path, max_epochs=ray_fits.EPOCHS), 2, init=False)
    for rank, found in enumerate(of_ranks(folder, "restart")):
        assert found["resumed_from"] == 8
        assert torch.equal(found["weights"], expected[rank])


def test_a_reported_checkpoint_is_lightnings(outcomes: dict[str, Any]) -> None:
    saved = torch.load(Path(outcomes["path"]) / "checkpoint.ckpt", weights_only=True)
    assert saved["global_step"] == outcomes["metrics"]["step"] == 8 * ray_fits.EPOCHS
    assert saved["pipesync"]["world_size"] == 2
    ray_fits.Classifier(dropout=0.3).load_state_dict(saved["state_dict"])
    assert {"loss", "val_loss", "selsync/lssr"} <= set(outcomes["metrics"])


def test_the_driver_names_the_worker_that_is_frozen(outcomes: dict[str, Any]) -> None:
    """After ``timeout_s``, long before Ray does."""
    assert_raised(outcomes["raised"], "WorkerGroupError", "[Rank 0 Error Snippet]", "Rank 1 (host ", "is at fault")


def test_the_twin_takes_the_place_of_lightning() -> None:
    [result] = run_together(([sys.executable, "-c", TWIN], environment()))
    assert result.returncode == 0, result.stdout


def test_the_script_of_the_page(tmp_path: Path) -> None:
    [(_, script)] = [found for found in snippets_of(DOCS / "ray.md") if "__main__" in found[1]]
    (tmp_path / "train.py").write_text(script)
    [result] = run_together(
        ([sys.executable, tmp_path / "train.py", tmp_path], environment(**TIMES, RAY_USAGE_STATS_ENABLED=0))
    )
    assert result.returncode == 0, result.stdout
    assert "after 48 steps" in result.stdout
