"""What the examples share: options for where a script runs, how it starts its ranks, and a quiet Trainer."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


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


def run_on_ranks(run: Callable[[argparse.Namespace], object], options: argparse.Namespace) -> None:
    """Calls ``run(options)`` as the rank that ``torchrun`` has launched, or on ``options.processes`` new ones.

    Args:
        run: a function of the script itself, which initializes ``torch.distributed`` from the environment.
        options: its argument; ``processes`` is how many ranks to start on this machine.
    """
    if "RANK" in os.environ:
        run(options)
    else:
        mp.spawn(_run_rank, (_free_port(), run, options), nprocs=options.processes)


def _run_rank(rank: int, port: int, run: Callable[[argparse.Namespace], object], options: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(options.processes))
    run(options)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


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
