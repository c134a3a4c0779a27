"""What the machine has; and the package is imported, with all of it that needs no other."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("torch", "triton", "lightning", "pytorch-lightning", "accelerate", "transformers", "numpy", "pytest")


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "-"
    return found


def test_versions(record_property: Callable[[str, object], None]) -> None:
    record_property("versions", ", ".join(f"{name} {number}" for name, number in versions().items()))
    record_property("cores", len(os.sched_getaffinity(0)))
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        record_property(
            "device",
            f"{torch.cuda.device_count()} x {device.name}, compute capability {device.major}.{device.minor}, "
            f"{device.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, NCCL {nccl}",
        )


def test_the_package_is_imported() -> None:
    import lightning_pipesync

    for name in lightning_pipesync.__all__:
        if "Trainer" not in name:  # of transformers, which may be missing
            assert getattr(lightning_pipesync, name) is not None, name
