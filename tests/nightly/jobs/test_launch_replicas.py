"""``pipesync launch --replicas``: what its jobs are given, what becomes of those that die, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_pipesync.cli import main
from lightning_pipesync.core.extras import is_installed
from lightning_pipesync.launch import command
from lightning_pipesync.launch.lighthouse import Lighthouse
from tests.support.commands import environment, run_together
from tests.support.harness import default_signals

pytestmark = pytest.mark.skipif(not is_installed("torchft"), reason="torchft is not installed")

#: Begins each script: its replica's name, how often it has begun, and what leaves a process behind, in a session of its
#: own, that holds the output open.
BEGIN = """
import json, os, signal, subprocess, sys, time
name = os.environ["PIPESYNC_REPLICA"]
folder = os.path.dirname(__file__)
with open(f"{folder}/begun{name}", "a+") as file:
    file.write("x")
    begun = file.tell()

def leave_behind():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(f"{folder}/left{name}-{begun}", "w") as file:
        file.write(str(child.pid))

def wait_for(*files):
    while not all(os.path.exists(f"{folder}/{file}") for file in files):
        time.sleep(0.01)

def tell_guard():
    with open(f"{folder}/guard.tmp", "w") as file:
        file.write(str(os.getppid()))
    os.rename(f"{folder}/guard.tmp", f"{folder}/guard")

def wait_for_end_of_guard():
    wait_for("guard")  # the launcher then knows that the replica has ended which has told its guard
    while os.path.exists("/proc/" + open(f"{folder}/guard").read()):
        time.sleep(0.01)

def touch(file):
    open(f"{folder}/{file}", "w").close()
"""


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Writes a script, and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(BEGIN + text)
        return str(path)

    return write


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process that a script has left behind is there when the launcher has ended."""
    for name in [name for name in os.environ if name.startswith(("PIPESYNC_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    yield
    signal.signal(signal.SIGINT, before)
    assert [path.name for path in tmp_path.glob("left*") if is_running(int(path.read_text()))] == []


def is_running(process: int) -> bool:
    try:
        return "sleep" in Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return False


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def launch(*words: object) -> int:
    return main(["launch", *map(str, words)])


def outputs(capfd: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """Returns the lines of both outputs: after the launcher's first one, and without those of torchft's log."""
    said = capfd.readouterr()
    first, *err = [line for line in said.err.splitlines() if "[torchft" not in line]
    assert first.startswith("pipesync launch: starts replica")
    return said.out.splitlines(), err


def test_what_a_replica_is_given(
    script: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.setenv(name, "1")  # of a launcher that has started this one
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,3,GPU-a,1,0,2,5,-1,6")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    text = "print(json.dumps([sys.argv[1:], dict(os.environ), sys.stdin.read()]))\nprint('an error', file=sys.stderr)"
    arguments = ["--replicas", "9", "a b", "--", "--config=x"]
    assert launch("--replicas=3", "--log_dir", tmp_path / "logs", script(text), *arguments) == 0
    out, err = outputs(capfd)
    assert sorted(err) == [f"[replica {number}] an error" for number in range(3)]
    lighthouses = set()
    for number, line in enumerate(sorted(out)):
        assert line.startswith(f"[replica {number}] ")
        given, variables, typed = json.loads(line.removeprefix(f"[replica {number}] "))
        assert (given, typed) == (arguments, "")
        assert variables["PIPESYNC_REPLICA"] == str(number)
        assert variables["CUDA_VISIBLE_DEVICES"] == ("7,3", "GPU-a,1", "0,2")[number]
        assert variables["PIPESYNC_NUM_REPLICAS"] == "3"
        assert variables["OMP_NUM_THREADS"] == "3"
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_NTASKS", "SLURM_PROCID"} & set(variables)
        lighthouses.add(variables["PIPESYNC_LIGHTHOUSE"])
        log = (tmp_path / "logs" / f"replica-{number}.log").read_text().splitlines()
        assert sorted(log) == sorted([line.removeprefix(f"[replica {number}] "), "an error"])
    assert re.fullmatch(r"127\.0\.0\.1:\d+", *lighthouses)


def test_a_module_is_run_as_python_does(
    script: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script("print(sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])  # the command adds the folder
    assert launch("--replicas", 1, "--lighthouse", "[::1]:29510", "-m", "train", "a") == 0
    said = capfd.readouterr()
    assert said.out == "[replica 0] ['a']\n"
    assert said.err == "pipesync launch: starts replica 0, with the lighthouse [::1]:29510.\n"


def test_a_replica_that_dies_is_started_again(script: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By a signal or an error; what it leaves behind is ended first. One that is done is not."""
    text = """
leave_behind()
if begun == 1 and name == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if begun <= 2 and name == "1":
    sys.exit("no luck")
if name == "2":
    sys.exit(0)
if name == "0":
    wait_for("begun1")
    while os.path.getsize(f"{folder}/begun1") < 3:  # or replica 1 would be alone
        time.sleep(0.01)
left = int(open(f"{folder}/left{name}-{begun - 1}").read())
try:
    os.kill(left, 0)
    print("it is still there")
except ProcessLookupError:
    print("again")
"""
    words = ("--replicas", 3, "--max_restarts", 2, "--backoff_s", 0.01, "--log_dir", tmp_path / "logs")
    assert launch(*words, script(text)) == 0
    out, err = outputs(capfd)
    assert sorted(out) == ["[replica 0] again", "[replica 1] again"]
    assert sorted(err) == [
        *["[replica 1] no luck"] * 2,
        "pipesync launch: replica 0 was killed by SIGKILL; it starts again in 0.01 s (restart 1 of 2).",
        "pipesync launch: replica 1 ended with exit status 1; it starts again in 0.01 s (restart 1 of 2).",
        "pipesync launch: replica 1 ended with exit status 1; it starts again in 0.02 s (restart 2 of 2).",
    ]
    assert [len((tmp_path / f"begun{number}").read_text()) for number in range(3)] == [2, 3, 1]
    log = (tmp_path / "logs" / "replica-0.log").read_text().splitlines()
    assert [line.partition(";")[0] for line in log] == ["pipesync launch: replica 0 was killed by SIGKILL", "again"]


def test_a_replica_does_not_train_alone(script: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It would find nobody who has the others' weights; elsewhere there may be others."""
    text = """
if name == "0":
    tell_guard()
else:
    wait_for_end_of_guard()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    words = ("--max_restarts", 1, "--backoff_s", 0.3, script(text))
    assert launch("--replicas", 2, *words) == 128 + signal.SIGKILL
    said = outputs(capfd)[1]
    assert "replica 1 was killed by SIGKILL, and is not started again: all others are done." in said[-2]
    assert said[-1] == "pipesync launch: replica 1 failed once; the last time it was killed by SIGKILL."
    assert (tmp_path / "begun1").read_text() == "x"
    assert launch("--replicas", 2, "--lighthouse", "machine0:29510", *words) == 128 + signal.SIGKILL
    assert (tmp_path / "begun1").read_text() == "xxx"


def test_a_replica_that_fails_for_good_does_not_end_the_others(script: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The exit status and the last line are those of the replica that failed first."""
    text = """
if name == "1":
    if begun == 2:
        tell_guard()
    print("ValueError: lr=-1\\n====", file=sys.stderr)
    sys.exit(3)
wait_for_end_of_guard()
if name == "2":
    sys.exit(4)
print("done")
"""
    assert launch("--replicas", 3, "--max_restarts", 1, "--backoff_s", 0.01, script(text)) == 3
    out, err = outputs(capfd)
    assert out == ["[replica 0] done"]
    assert err[-1] == (
        "pipesync launch: replica 1 failed 2 times; the last time it ended with exit status 3: ValueError: lr=-1"
    )
    assert any("replica 2 ended with exit status 4" in line for line in err), err


def test_replicas_leave_in_order(
    script: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher passes a signal on, and starts none again; those that stay are killed after a while."""
    monkeypatch.setenv("LAUNCHER", str(os.getpid()))
    text = """
leave_behind()
if name == "0":
    signal.signal(signal.SIGTERM, lambda *_: (print("leaves"), sys.exit(5)))
if name == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if name == "2":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
touch(f"ready{name}")
if name == "3":
    wait_for("ready0", "ready1", "ready2")
    os.kill(int(os.environ["LAUNCHER"]), signal.SIGINT)
time.sleep(1000)
"""
    assert launch("--replicas", 4, "--grace_s", 0.5, "--backoff_s", 0, script(text)) == 128 + signal.SIGINT
    assert outputs(capfd) == (["[replica 0] leaves"], [])


def test_a_second_signal_does_not_wait(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the first wait for a replica that was about to start again."""
    monkeypatch.setenv("LAUNCHER", str(os.getpid()))
    text = """
launcher = int(os.environ["LAUNCHER"])
leave_behind()
if name == "0":
    def twice(*_):
        os.kill(launcher, signal.SIGTERM)
        time.sleep(1000)
    signal.signal(signal.SIGTERM, twice)
    wait_for("died")
    time.sleep(0.3)
    os.kill(launcher, signal.SIGTERM)
    time.sleep(1000)
touch("died")
sys.exit(1)
"""
    assert launch("--replicas", 2, "--grace_s", 90000, "--backoff_s", 90000, script(text)) == 128 + signal.SIGTERM


def test_a_launcher_that_is_killed_leaves_nothing(script: Any, tmp_path: Path) -> None:
    text = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
leave_behind()
with open(f"{folder}/left{name}", "w") as file:
    file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
touch(f"ready{name}")
time.sleep(1000)
"""
    words = [sys.executable, "-m", "lightning_pipesync", "launch", "--replicas", "2", script(text)]
    launcher = subprocess.Popen(
        words, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True, preexec_fn=default_signals
    )
    try:
        wait_until(lambda: all((tmp_path / f"ready{name}").exists() for name in range(2)), "the replicas do not start")
        left = [int(path.read_text()) for path in tmp_path.glob("left*")]
        assert len(left) == 4
        wait_until(lambda: all(map(is_running, left)), "what they leave behind does not run")
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not any(map(is_running, left)), "processes are left")


#: Two ranks a replica. One is killed once, before it has begun. All wait in a step until the launcher is asked to end.
SEVERAL_RANKS = """
if name == os.environ["RANK"] == "1" and not os.path.exists(f"{folder}/died"):
    touch("died")
    os.kill(os.getpid(), signal.SIGKILL)
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from lightning_pipesync import LocalSGD
from tests.support.models import loss, seeded_mlp

dist.init_process_group("gloo")
model = seeded_mlp()
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sync = LocalSGD(model, optimizer, period=3, outer_optimizer="nesterov", timeout_s=100)
sync.join()
try:
    while True:
        optimizer.zero_grad()
        loss(model, sync.num_steps, dist.get_rank()).backward()
        if sync.num_steps == 4:
            if name == os.environ["RANK"] == "0":
                os.kill(int(os.environ["LAUNCHER"]), signal.SIGTERM)
            while sync._departure.notice.deadline is None:
                time.sleep(0.01)
        sync.step()
except SystemExit as error:
    # At once with its end of line: the ranks write to the same pipe, without a buffer.
    sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()} left {sync.num_steps} {sys.argv[1]}\\n")
    raise
"""


def test_replicas_of_several_ranks_are_started_again_and_leave_together(script: Any, tmp_path: Path) -> None:
    """They are torchrun's; all ranks leave after the same round when the launcher is asked to."""
    start = "import os, sys; os.environ['LAUNCHER'] = str(os.getpid()); from lightning_pipesync.cli import main; "
    options = ["launch", "--replicas", 2, "--ranks_per_replica", 2, "--backoff_s", 0.01, script(SEVERAL_RANKS), "a b"]
    words = [sys.executable, "-c", f"{start}sys.exit(main(sys.argv[1:]))", *options]
    [result] = run_together((words, environment(CUDA_VISIBLE_DEVICES="")), ranks=4)
    assert result.returncode == 143, result.stdout
    assert result.stdout.count("ended with exit status 1; it starts again in 0.01 s (restart 1 of 3).") == 1
    left = sorted(re.findall(r"\[replica (\d)\] rank (\d) of 2 left 6 a b", result.stdout))
    assert left == [(number, rank) for number in "01" for rank in "01"], result.stdout


def test_replicas_of_several_machines(
    script: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their numbers follow from Slurm's task, or are given; the lighthouse is another's."""
    path = script("print(os.environ['PIPESYNC_LIGHTHOUSE'], os.environ.get('PIPESYNC_NUM_REPLICAS'))")
    words = ("--replicas", 2, "--lighthouse", "machine0:29510")

    def said(*options: object) -> list[str]:
        assert launch(*options, path) == 0
        return sorted(outputs(capfd)[0])

    assert said(*words) == [f"[replica {number}] machine0:29510 None" for number in (0, 1)]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    monkeypatch.setenv("SLURM_PROCID", "2")
    assert said(*words) == [f"[replica {number}] machine0:29510 6" for number in (4, 5)]
    given = ("--first_replica", 7, "--num_replicas", 4)
    assert said(*words, *given) == [f"[replica {number}] machine0:29510 4" for number in (7, 8)]
    assert launch("--replicas", 2, path) == 2
    assert "Each of the 3 tasks of this Slurm step would have a lighthouse of its own" in capfd.readouterr().err


REFUSED = {
    "--replicas 0 train.py": "--replicas must be at least 1, got 0.",
    "--replicas 2 --ranks_per_replica 0 train.py": "--ranks_per_replica must be at least 1, got 0.",
    "--replicas 2 --first_replica -1 train.py": "--first_replica must be at least 0, got -1.",
    "--replicas 2 --num_replicas 0 train.py": "--num_replicas must be at least 1, got 0.",
    "--replicas 2 --max_restarts -1 train.py": "--max_restarts must be at least 0, got -1.",
    "--replicas 2 --backoff_s .nan train.py": "--backoff_s must be at least 0, got nan.",
    "--replicas 2 --grace_s -3 train.py": "--grace_s must be at least 0, got -3.0.",
    "--replicas 2 --min_replicas 0 train.py": "--min_replicas must be at least 1, got 0.",
    "--replicas 2 --join_timeout_s 0 train.py": "--join_timeout_s must be between 0.001 and 1000000 seconds, got 0.",
    "--replicas 2 --heartbeat_timeout_s .nan train.py": "--heartbeat_timeout_s must be between 0.001 and",
    "--replicas 2 --lighthouse mach train.py": "--lighthouse must be HOST:PORT, such as machine0:29510, got 'mach'.",
    "--replicas 2 --lighthouse m:0 train.py": "--lighthouse must be HOST:PORT, such as machine0:29510, got 'm:0'.",
    "--replicas 2 --lighthouse m:1 --join_timeout_s 5 train.py": (
        "--join_timeout_s 5.0 is for a lighthouse that runs here; the one at m:1 has its own: pipesync lighthouse "
        "--join_timeout_s 5.0."
    ),
    "--replicas 2": "There is no script: pipesync launch --replicas 4 train.py.",
    "--replicas 2 -m": "There is no script: pipesync launch --replicas 4 train.py.",
    "--replicas 2 trian.py": "There is no file trian.py, the script that each replica runs.",
    "--replicas 2 --log_dir gpus train.py": "--log_dir gpus: [Errno 17] File exists: 'gpus'.",
    "--replicas 3 gpus": "--replicas 3 --ranks_per_replica 1 needs 3 GPUs, and there are 2: start fewer here, or set",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for script in ("train.py", "gpus"):
        Path(script).write_text("raise AssertionError('it was started')")
    if "gpus" in words:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert launch(*words.split()) == 2
    assert capsys.readouterr().err.startswith(f"pipesync: error: {REFUSED[words]}")


def test_the_lighthouse_serves_where_it_says() -> None:
    from torchft.coordination import LighthouseClient

    second = timedelta(seconds=30)
    with Lighthouse(0, "127.0.0.1").serving() as port:
        client = LighthouseClient(f"http://127.0.0.1:{port}", second)
        found = client.quorum("0", second, address="here", store_address="", step=3, world_size=1, shrink_only=False)
        assert [(member.replica_id, member.step) for member in found.participants] == [("0", 3)]
        with pytest.raises(ValueError, match=rf"cannot listen at 127\.0\.0\.1:{port}: Address already in use"):
            Lighthouse(port, "127.0.0.1").serving().__enter__()


def test_a_lighthouse_of_its_own_ends_in_order() -> None:
    words = [sys.executable, "-m", "lightning_pipesync", "lighthouse", "--port", "0", "--host", "127.0.0.1"]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True, preexec_fn=default_signals)
    try:
        assert process.stdout is not None
        assert re.fullmatch(r"pipesync lighthouse: listens at 127\.0\.0\.1:\d+\.\n", process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_words_that_are_accelerates() -> None:
    assert command.starts_replicas(["--replicas", "2", "train.py"])
    assert command.starts_replicas(["--max_restarts=2", "--replicas=2", "train.py"])
    assert not command.starts_replicas(["--config_file", "a.yaml", "train.py", "--replicas", "2"])
    assert not command.starts_replicas(["train.py", "--help"])
    assert command.starts_replicas(["--help"])
