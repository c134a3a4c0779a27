"""Import paths of the previous release work, and warn."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from lightning_pipesync.lab import netlab
from lightning_pipesync.lab.plan.in_run import PlanCallbackMixin


def former(name: str, now: str) -> object:
    for imported in [one for one in sys.modules if one == name.rpartition(".")[0] or one == name]:
        if imported != "lightning_pipesync":
            del sys.modules[imported]
    with pytest.warns(FutureWarning, match=f"is {now} now"):
        return import_module(name)


def test_netlab() -> None:
    module = former("lightning_pipesync.netlab", "lightning_pipesync.lab.netlab")
    assert {name: getattr(module, name) for name in netlab.__all__} == {n: getattr(netlab, n) for n in netlab.__all__}


def test_the_callback_of_the_twin() -> None:
    module = former("lightning_pipesync.plan.twin", "lightning_pipesync.lab.plan")
    assert issubclass(module.PlanCallback, PlanCallbackMixin)
