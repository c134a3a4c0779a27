"""What becomes of the default process group, which frameworks leave open, when a process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness import free_port

# What is registered with atexit first is called last.
SCRIPT = """
import atexit
atexit.register(lambda: print("open at the end:", dist.is_initialized()))
import torch.distributed as dist
from lightning_pipesync.core.comm.transport import Transport
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
Transport().close()
{last}
"""


@pytest.mark.parametrize(("last", "is_open"), [("", False), ("dist.destroy_process_group()", False), ("1 / 0", True)])
def test_groups_are_destroyed_before_the_interpreter_ends(last: str, is_open: bool) -> None:
    script = SCRIPT.format(port=free_port(), last=last)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert f"open at the end: {is_open}" in result.stdout, result.stderr
    assert result.returncode == (1 if "/" in last else 0), result.stderr
