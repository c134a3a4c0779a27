"""``python -m tests.cuda.steps MODEL RATE FOLDER``: steps of ranks that share the GPU, over emulated links."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_pipesync.lab.bench.step import Step
from lightning_pipesync.lab.netlab.network import check_requirements, enter_user_namespace
from tests.cuda.device import DEVICE, ON_GPU

METHODS = ("ddp", "dear", "dear:compression=int4", "pipe_sgd:compression=int8", "local_sgd")


def main(model: str, rate: str, folder: str) -> None:
    enter_user_namespace([sys.executable, "-m", "tests.cuda.steps", model, rate, folder])
    links: str | None = rate
    try:
        check_requirements()
    except (RuntimeError, ModuleNotFoundError) as error:
        links = None
        print(f"Over loopback, as no links can be emulated here: {error}\n")
    size = {"hosts": (4,), "steps": 2, "rounds": 3} if ON_GPU else {"hosts": (2,), "steps": 1, "rounds": 1}
    step = Step(
        model=model,
        rate=links,
        methods=METHODS,
        bucket_mb=(25.0,),
        device=DEVICE.type,
        backend="gloo",
        output=Path(folder),
        **size,  # type: ignore[arg-type]
    )
    print(step.report(step.results()))


if __name__ == "__main__":
    main(*sys.argv[1:])
