"""What the examples share: options for where a script runs, and a quiet Trainer."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from typing import Any


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--accelerator``, ``--devices`` and ``--num-nodes``, by default what ``torchrun`` has launched."""
    launch = parser.add_argument_group("where to run")
    launch.add_argument("--accelerator", default="cpu", help="Trainer's accelerator (default: %(default)s)")
    launch.add_argument(
        "--devices",
        type=int,
        default=int(os.environ.get("LOCAL_WORLD_SIZE", 2)),
        help="processes on each machine (default: 2, or torchrun's --nproc-per-node)",
    )
    launch.add_argument(
        "--num-nodes",
        type=int,
        default=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        help="machines (default: 1, or torchrun's --nnodes)",
    )


def trainer_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the Trainer's arguments that say where it runs and that keep it from writing logs and checkpoints."""
    return {
        "accelerator": options.accelerator,
        "devices": options.devices,
        "num_nodes": options.num_nodes,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }


def keep_calm() -> None:
    """Silences Lightning's banners and tips, and the warnings that have nothing to say about an example."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):  # the last is there if it is installed
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")
    for message in ("does not have many workers", "smaller than the logging interval", "it is recommended to use"):
        warnings.filterwarnings("ignore", message=f".*{message}.*")
