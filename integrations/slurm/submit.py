"""Submits a script to Slurm from Python, with submitit: python submit.py [OPTIONS] SCRIPT [OPTIONS OF THE SCRIPT].

    python integrations/slurm/submit.py --nodes 2 --tasks 8 --gpus 8 --partition gpu train.py --option value
    python integrations/slurm/submit.py --cluster local --tasks 2 train.py       processes on this machine, to try it

Each task runs the script with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. When its time is up, the job
is requeued; the script resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from submitit import AutoExecutor
from submitit.helpers import DelayedSubmission, TorchDistributedEnvironment


class Training:
    """What each task calls."""

    def __init__(self, script: str, options: list[str]) -> None:
        self.script, self.options = script, options

    def __call__(self) -> None:
        # A task sees all GPUs of its machine, as Lightning expects.
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        sys.argv, sys.path[0] = [self.script, *self.options], str(Path(self.script).parent)  # as python SCRIPT does
        runpy.run_path(self.script, run_name="__main__")

    def checkpoint(self) -> DelayedSubmission:
        """Returns what the requeued job calls: submitit calls this shortly before the time is up."""
        return DelayedSubmission(self)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", help="slurm or local (default: slurm, if this machine has it)")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=1, help="processes on each machine (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each machine (default: %(default)s)")
    parser.add_argument("--cpus", type=int, default=8, help="cores of each process (default: %(default)s)")
    parser.add_argument("--minutes", type=int, default=24 * 60, help="time limit (default: %(default)s)")
    parser.add_argument("--partition", help="of Slurm")
    parser.add_argument("--folder", default="outputs/slurm", help="for the tasks' output (default: %(default)s)")
    parser.add_argument("script")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    args = parser.parse_args()

    executor = AutoExecutor(args.folder, cluster=args.cluster)
    executor.update_parameters(
        name="pipesync",
        nodes=args.nodes,
        tasks_per_node=args.tasks,
        gpus_per_node=args.gpus,
        cpus_per_task=args.cpus,
        timeout_min=args.minutes,
        slurm_partition=args.partition,
    )
    job = executor.submit(Training(args.script, args.options))
    print(f"job {job.job_id}, output in {args.folder}/{job.job_id}_*", flush=True)
    if executor.cluster == "local":
        job.results()  # raises what a task has raised


if __name__ == "__main__":
    main()
