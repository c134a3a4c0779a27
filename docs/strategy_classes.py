"""Writes the stubs of the strategy classes, which are made at import: for type checkers and editors.

Usage: python docs/strategy_classes.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy

from lightning_pipesync.fabric.strategy import mixin_of as fabric_mixin_of
from lightning_pipesync.lightning.pipeline import mixin_of as lightning_mixin_of
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.registry import METHODS
from lightning_pipesync.training.strategies import MixinOf, signature_of

ROOT = Path(__file__).parents[1]
#: The methods of the package, without those that users register.
BUILT_IN = [method for method in METHODS.values() if method.__module__.startswith("lightning_pipesync.")]
IN_FABRIC = [method for method in BUILT_IN if not method.makes_passes]
WRITTEN = "# Written by docs/strategy_classes.py."
TRAINER = """
class PipeSyncCallback(PipeSyncCallbackMixin, Callback): ...
class StepReport(StepReportMixin, Callback): ...
class TraceCallback(TraceCallbackMixin, Callback): ...
class _Strategy(DDPStrategy):
    callback_class: type[Callback]
"""


class Types:
    """Writes types, and records which classes must be imported."""

    def __init__(self) -> None:
        self.imported: set[type] = set()

    def text(self, annotation: Any) -> str:
        """Returns the source text of a type."""
        origin, args = get_origin(annotation), get_args(annotation)
        if isinstance(annotation, list):  # the arguments of a Callable
            return f"[{', '.join(self.text(part) for part in annotation)}]"
        if annotation in (None, NoneType, Ellipsis):
            return "..." if annotation is Ellipsis else "None"
        if origin in (Union, UnionType):
            return " | ".join(self.text(part) for part in args)
        if origin is Literal:
            return f"Literal[{', '.join(map(repr, args))}]"
        if origin is not None:
            if origin is Callable:
                self.imported.add(origin)
            return f"{origin.__name__}[{', '.join(self.text(part) for part in args)}]"
        if annotation.__module__ != "builtins":
            self.imported.add(annotation)
        return str(annotation.__name__)


def stub(
    mixin_of: MixinOf,
    ddp_strategy: type,
    suffix: str,
    base: str,
    imports: list[str],
    classes: str,
    methods: list[type[Method]],
) -> str:
    """Returns the stub of a module with the strategies of a framework; ``classes`` are others that it has."""
    types, stated = Types(), []
    for method in methods:
        mixin, without = mixin_of(method)
        types.imported.add(mixin)
        arguments = list(signature_of(method, mixin, ddp_strategy, without).parameters.values())[1:]
        given = ", ".join(f"{one.name}: {types.text(one.annotation)} = ..." for one in arguments)
        name = f"{method.__name__}{suffix}"
        stated.append(f"class {name}({mixin.__name__}, {base}):\n    def __init__(self, {given}) -> None: ...\n")
    imports += [f"from {_exported_by(cls)} import {cls.__name__}" for cls in types.imported if cls.__name__ != "device"]
    imports += ["from typing import Literal", "from torch import device"]
    imports += ["from lightning_pipesync.training.strategies import Strategies"]
    return "\n".join([WRITTEN, *sorted(set(imports)), classes, *stated, "STRATEGIES: Strategies"])


def twin(module: str, text: str) -> str:
    """Returns the stub of the twin distribution: the same classes."""
    names = [line.partition("(")[0].removeprefix("class ") for line in text.splitlines() if line.startswith("class ")]
    names = [name for name in names if not name.startswith("_")] + ["STRATEGIES"]
    return "\n".join([WRITTEN, *(f"from {module} import {name} as {name}" for name in names)])


def files() -> Iterator[tuple[Path, str]]:
    """Yields each file that this script writes, and its text."""
    adapter = "lightning_pipesync.lightning"
    of_trainer = [
        f"from {adapter}.callback import PipeSyncCallbackMixin",
        f"from {adapter}.distribution import Callback, DDPStrategy",
        f"from {adapter}.step_report import StepReportMixin, TraceCallbackMixin",
    ]
    of_fabric = ["from lightning_pipesync.fabric.distribution import DDPStrategy"]
    trainer = stub(lightning_mixin_of, DDPStrategy, "Strategy", "_Strategy", of_trainer, TRAINER, BUILT_IN)
    fabric = stub(fabric_mixin_of, FabricDDPStrategy, "FabricStrategy", "DDPStrategy", of_fabric, "", IN_FABRIC)
    texts = {
        "lightning/__init__.pyi": trainer,
        "lightning/twin.pyi": twin("lightning_pipesync.lightning", trainer),
        "fabric/__init__.pyi": fabric,
        "fabric/twin.pyi": twin("lightning_pipesync.fabric", fabric),
    }
    for name, text in texts.items():
        path = ROOT / "lightning_pipesync" / name
        yield path, _formatted(text, path)


def _exported_by(cls: type) -> str:
    """Returns the name of the outermost module that exports a class; of Lightning's, of the adapter's that does."""
    parts = cls.__module__.split(".")
    if parts[0] == "lightning":
        adapter = "fabric" if parts[1] == "fabric" else "lightning"
        return f"lightning_pipesync.{adapter}.distribution"
    modules = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return next(name for name in modules if getattr(sys.modules[name], cls.__name__, None) is cls)


def _formatted(text: str, path: Path) -> str:
    for command in (["check", "--fix-only", "--select=I", "--quiet"], ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, f"--stdin-filename={path}", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text)
