"""Importing the package imports no framework, and registers the strategies with those that the user imports."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import lightning_pipesync
imported = {name.partition(".")[0] for name in sys.modules}
assert imported.isdisjoint({"lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers"})

import lightning.fabric, lightning.pytorch, lightning_fabric, pytorch_lightning
for package in (lightning.pytorch, pytorch_lightning):
    for name in ("dear", "ea_pipe", "local_sgd", "parameter_server", "pipe_sgd", "selsync"):
        strategy = package.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy
        assert strategy.name == name
        assert isinstance(strategy, package.strategies.DDPStrategy)
for package in (lightning.fabric, lightning_fabric):
    for name in ("dear", "local_sgd", "parameter_server", "pipe_sgd", "selsync"):
        strategy = package.Fabric(strategy=name, accelerator="cpu", devices=1).strategy
        assert strategy.name == name
        assert isinstance(strategy, package.strategies.DDPStrategy)
    try:
        package.Fabric(strategy="ea_pipe", accelerator="cpu", devices=1)
    except ValueError as error:
        assert "train_batch" in str(error)
    else:
        raise AssertionError("EA-Pipe makes the backward passes itself")
"""


def test_importing() -> None:
    """All other tests import the frameworks before the package."""
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
