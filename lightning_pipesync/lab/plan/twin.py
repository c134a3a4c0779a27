"""The callback that plans, for the twin distribution ``pytorch_lightning``."""

from pytorch_lightning import Callback

from lightning_pipesync.lab.plan.callback import PlanCallbackMixin


class PlanCallback(PlanCallbackMixin, Callback):  # type: ignore[misc]
    __doc__ = PlanCallbackMixin.__doc__
