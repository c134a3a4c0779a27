"""The callback that plans, for ``lightning``."""

from typing import Any

from lightning.pytorch import Callback

from lightning_pipesync.lab.plan.in_run import PlanCallbackMixin

PlanCallback: Any = type("PlanCallback", (PlanCallbackMixin, Callback), {"__doc__": PlanCallbackMixin.__doc__})
