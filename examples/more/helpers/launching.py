"""Shared by the examples: options for where a script runs, starting its ranks, and a quiet Trainer."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp
from torch.distributed import TCPStore


def parse_launch_options(parser: argparse.ArgumentParser, devices: int = 2) -> argparse.Namespace:
    """Adds ``--accelerator``, ``--devices`` and ``--num-nodes``, parses all options, and silences Lightning.

    The defaults are what ``torchrun`` has launched, and without it ``devices`` processes.
    """
    launch = parser.add_argument_group("where to run")
    launch.add_argument("--accelerator", default="cpu", help="Trainer's accelerator (default: %(default)s)")
    launch.add_argument(
        "--devices",
        type=int,
        default=int(os.environ.get("LOCAL_WORLD_SIZE", devices)),
        help=f"processes on each machine (default: {devices}, or torchrun's --nproc-per-node)",
    )
    launch.add_argument(
        "--num-nodes",
        type=int,
        default=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        help="machines (default: 1, or torchrun's --nnodes)",
    )
    options = parser.parse_args()
    _silence_lightning()
    return options


def run_on_ranks(run: Callable[[argparse.Namespace], object], options: argparse.Namespace) -> None:
    """Calls ``run(options)`` on this rank if ``torchrun`` launched it, otherwise on ``options.processes`` new ranks.

    ``run`` is a top-level function that initializes ``torch.distributed`` from the environment.
    """
    if "RANK" in os.environ:
        run(options)
    else:
        # The store is in this process, as under torchrun: another program cannot take its port before rank 0 opens it.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(_run_rank, (store.port, run, options), nprocs=options.processes)


def _run_rank(rank: int, port: int, run: Callable[[argparse.Namespace], object], options: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(options.processes))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    run(options)


def trainer_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns Trainer arguments: where to run, without logs and checkpoints."""
    return {
        "accelerator": options.accelerator,
        "devices": options.devices,
        "num_nodes": options.num_nodes,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }


def _silence_lightning() -> None:
    """Silences Lightning's banners and tips, and warnings that do not matter in an example."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")
    for message in ("does not have many workers", "smaller than the logging interval", "it is recommended to use"):
        warnings.filterwarnings("ignore", message=f".*{message}.*")
