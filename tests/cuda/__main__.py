"""``python -m tests.cuda``: what one GPU can prove and measure in ten minutes, with the Python that is there.

It installs nothing and needs no network. What the machine lacks is brought in a folder of wheels, see wheels.txt. The
stages run in the order of their value. What has ended is kept, whatever ends the rest, and the next call goes on there.
Without a GPU each stage rehearses what a CPU can, and says what it has left out.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).parent
#: Without these nothing runs: modules, which wheels.txt and the machine have.
NEEDED = ("torch", "lightning", "accelerate", "jsonargparse", "pytest", "xdist", "wrapt", "yaml")
#: Seconds that a stage gets to print where it was, once its time is over.
GRACE_S = 5.0
#: How a stage ended that goes on, if there is time.
TIME_OVER, NO_TIME = "its time was over", "no time was left"


@dataclass(frozen=True)
class Stage:
    """Tests that run in one process, or side by side in several.

    Attributes:
        limit_s: seconds after which it is ended; what it has not done then is done at the end, if time is left.
        workers: processes on a machine with as many cores; 0: what is timed has the GPU for itself.
    """

    name: str
    files: tuple[str, ...]
    limit_s: float
    workers: int = 0


STAGES = (
    Stage("versions", ("versions",), 60),
    Stage("codecs", ("kernels", "codecs", "checksum"), 100, workers=4),
    Stage("methods", ("one_rank", "nccl", "gloo", "shards", "tasks"), 180, workers=8),
    Stage("host", ("waits", "streams", "memory", "plan"), 100),
    Stage("two ranks over NCCL", ("two_ranks",), 80, workers=4),
    Stage("measurements", ("measurements",), 240),
    Stage("faults", ("faults",), 90, workers=4),
)


class Run:
    """The stages, within ``seconds``, and what is known of them in ``output``."""

    def __init__(self, output: Path, seconds: float) -> None:
        self._output, self._end = output, time.monotonic() + seconds
        self._paths = [str(HERE.parents[1])]
        self._how: dict[str, str] = {}  # each stage has ended
        self._process: subprocess.Popen[bytes] | None = None

    def bring(self, wheels: Path) -> None:
        """Unpacks wheels beside the output: what is installed comes after them."""
        site = self._output / "site"
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        sys.path.insert(0, str(site.resolve()))
        self._paths.append(str(site.resolve()))

    def run(self) -> int:
        """Runs all stages, and once more those that were ended; returns the exit status."""
        signal.signal(signal.SIGTERM, self._raise)
        try:
            for stage in STAGES:
                self._run(stage, min(stage.limit_s, self._left_s))
            for stage in STAGES:
                if self._how[stage.name] in (TIME_OVER, NO_TIME):
                    self._run(stage, self._left_s)
        finally:
            self._kill()
            text = self.write()
            print(text, flush=True)
        failed = any(row["outcome"] == "failed" for stage in STAGES for row in self._rows(stage))
        cut_off = any(how != "complete" for how in self._how.values())
        return 1 if failed else 3 if cut_off else 0

    @property
    def _left_s(self) -> float:
        return self._end - time.monotonic()

    def _run(self, stage: Stage, limit_s: float) -> None:
        if limit_s < 2 * GRACE_S:
            self._how.setdefault(stage.name, NO_TIME)
            return
        print(f"{stage.name}: at most {limit_s:.0f} s", flush=True)
        workers = min(stage.workers, (os.cpu_count() or 1) - 1)
        parallel = ["-n", str(workers), "--dist", "loadgroup"] if workers > 1 else ["-p", "no:xdist"]
        files = [str(HERE / f"test_{name}.py") for name in stage.files]
        options = ["-q", "-rs", "--record", str(self._file(stage, "jsonl")), *parallel]
        with self._file(stage, "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *files],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([*self._paths, os.environ.get("PYTHONPATH", "")])},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            try:
                status = self._process.wait(limit_s - GRACE_S)
                nothing_left = 5
                self._how[stage.name] = "complete" if status in (0, 1, nothing_left) else f"pytest ended with {status}"
            except subprocess.TimeoutExpired:
                self._how[stage.name] = TIME_OVER
                self._process.send_signal(signal.SIGINT)  # it prints where it was
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_S)
            self._kill()
        self.write()

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @staticmethod
    def _raise(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    def _file(self, stage: Stage, ending: str) -> Path:
        number = STAGES.index(stage) + 1
        return self._output / f"{number}-{stage.name.replace(' ', '_')}.{ending}"

    def _rows(self, stage: Stage) -> list[dict[str, Any]]:
        from tests.cuda.conftest import read

        return read(self._file(stage, "jsonl"))

    def write(self) -> str:
        """Writes what is known by now, as JSON and Markdown, which is returned."""
        all_rows = {stage.name: self._rows(stage) for stage in STAGES}
        summary = {
            name: {"ended": self._how.get(name, "not yet run"), "tests": rows} for name, rows in all_rows.items()
        }
        (self._output / "summary.json").write_text(json.dumps(summary, indent=1))
        text = "\n".join(_as_markdown(all_rows, self._how))
        (self._output / "summary.md").write_text(text)
        return text


def _as_markdown(all_rows: dict[str, list[dict[str, Any]]], how: dict[str, str]) -> Iterator[str]:
    yield "| stage | passed | failed | left out | seconds of tests | how it ended |\n|---|---:|---:|---:|---:|---|"
    for name, rows in all_rows.items():
        counts = Counter(row["outcome"] for row in rows)
        seconds = sum(row["seconds"] for row in rows)
        numbers = f"{counts['passed']} | {counts['failed']} | {counts['skipped']} | {seconds:.0f}"
        yield f"| {name} | {numbers} | {how.get(name, 'not yet run')} |"
    for row in (row for rows in all_rows.values() for row in rows):
        for figure, value in row["figures"].items():
            separator = "\n\n" if "\n" in str(value) else " "
            yield f"\n{figure}:{separator}{value}"
    for name, rows in all_rows.items():
        for why, number in Counter(row["why"] for row in rows if row["outcome"] == "skipped").items():
            yield f"\n{name}, {number} left out: {why}"
        for row in (row for row in rows if row["outcome"] == "failed"):
            yield f"\nFAILED {row['test']}: {row['why'].splitlines()[-1] if row['why'] else ''}"


def _end_with_parent() -> None:
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda", description=__doc__.partition("\n")[0])
    parser.add_argument("--wheels", type=Path, help="folder of wheels, which are unpacked to the output")
    parser.add_argument("--output", type=Path, default=Path("outputs/cuda"), help="folder for what is found")
    parser.add_argument("--seconds", type=float, default=500, help="after which all ends; the next call goes on")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    run = Run(options.output, options.seconds)
    if options.wheels:
        run.bring(options.wheels)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(f"Missing: {', '.join(missing)}. {(HERE / 'wheels.txt').read_text()}")
        return 2
    return run.run()


if __name__ == "__main__":
    sys.exit(main())
