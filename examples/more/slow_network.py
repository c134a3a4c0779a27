"""Runs a script of a Trainer on hosts with a slow network between them, all on this machine.

    python examples/more/slow_network.py examples/more/digits.py --epochs 6
    python examples/more/slow_network.py --hosts 4 --rate 100mbit examples/more/digits.py

Where the kernel allows it (Linux; root, or user namespaces), the hosts have links of that rate, as with
``pipesync netlab``. Elsewhere they are processes, and each waits as long as its messages would take to send.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from helpers.slow_link import SlowLink

from lightning_pipesync.lab.netlab import Network, enter_user_namespace, run_job
from lightning_pipesync.lab.netlab.network import check_requirements
from lightning_pipesync.lab.netlab.units import bits_per_second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default: %(default)s)")
    parser.add_argument("--rate", default="200mbit", help="of each host's link (default: %(default)s)")
    parser.add_argument("--delays", action="store_true", help="emulate no hosts: processes wait for their messages")
    parser.add_argument("script", help="with the options --devices, --num-nodes and --network, as digits.py has them")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args()

    if options.delays:
        if "RANK" in os.environ:
            return run_delayed(options)
        return launch_delayed(options, "--delays.")
    enter_user_namespace()
    try:
        check_requirements()
    except RuntimeError as error:
        return launch_delayed(options, str(error))
    with Network(options.hosts, options.rate) as network:
        where = ["--devices", "1", "--num-nodes", str(options.hosts), "--network", f"{options.rate}, emulated hosts"]
        return run_job(network, [sys.executable, options.script, *options.arguments, *where], output=print_rank_0)


def print_rank_0(host: int, line: str) -> None:
    """Prints what host 0 prints, and what another host says of its end."""
    if host == 0 or line.startswith("pipesync netlab:"):
        print(line, flush=True)


def launch_delayed(options: argparse.Namespace, reason: str) -> int:
    print(f"No hosts are emulated: {reason} Processes wait as long as their messages would take instead.", flush=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.hosts)]
    here: Sequence[str] = [__file__, "--rate", options.rate, "--delays", options.script, *options.arguments]
    os.execv(sys.executable, [*launcher, *here])


def run_delayed(options: argparse.Namespace) -> int:
    """Runs the script on this rank, which ``torchrun`` has launched."""
    SlowLink(bits_per_second(options.rate) / 8).install()
    sys.argv = [options.script, *options.arguments, "--network", f"{options.rate}, by delays"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
    runpy.run_path(options.script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
