"""Emulates hosts on a slow network on one Linux machine, in network namespaces with links of limited bandwidth."""

from lightning_pipesync.lab.netlab.faults import Fault, Freeze, Kill, Slow
from lightning_pipesync.lab.netlab.job import TIMED_OUT, run_job
from lightning_pipesync.lab.netlab.network import Network, enter_user_namespace

__all__ = ["TIMED_OUT", "Fault", "Freeze", "Kill", "Network", "Slow", "enter_user_namespace", "run_job"]
