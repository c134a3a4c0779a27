"""The methods of this package; tests register others in the same process."""

from __future__ import annotations

from lightning_pipesync.training.registry import METHODS

OWN = {name: method for name, method in METHODS.items() if method.__module__.startswith("lightning_pipesync.")}
