"""The callback that plans, for the twin distribution ``pytorch_lightning``."""

from typing import Any

from pytorch_lightning import Callback

from lightning_pipesync.lab.plan.in_run import PlanCallbackMixin

PlanCallback: Any = type("PlanCallback", (PlanCallbackMixin, Callback), {"__doc__": PlanCallbackMixin.__doc__})
