"""Writes the strategy classes of Lightning and Fabric: each method's settings as typed and documented arguments.

Usage: python docs/strategy_classes.py
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from inspect import Parameter, cleandoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from settings_tables import docs_of

from lightning_pipesync.fabric.strategy import PipeSyncFabricStrategyMixin
from lightning_pipesync.lightning.pipeline import PipelineStrategyMixin
from lightning_pipesync.lightning.sync import SyncStrategyMixin
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.registry import METHODS
from lightning_pipesync.training.strategies import signature_of

ROOT = Path(__file__).parents[1]
WRITTEN = "Written by docs/strategy_classes.py: change a method's settings instead, and run it."
#: The methods of the package itself, also where a user's are registered.
OWN = [method for method in METHODS.values() if method.__module__.startswith("lightning_pipesync.")]
#: Docs of the arguments that are no settings.
FRAMEWORK_DOCS = {
    "process_group_backend": 'as in DDPStrategy; with ``"gloo"``, CUDA tensors are sent through host memory.',
    "start_method": 'as in DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.',
}


class Types:
    """Writes types, and notes which classes have to be imported."""

    def __init__(self) -> None:
        self.imported: set[type] = set()

    def text(self, annotation: Any) -> str:
        """Returns a type as it stands in the source."""
        origin, args = get_origin(annotation), get_args(annotation)
        if annotation in (None, NoneType, Ellipsis):
            return "..." if annotation is Ellipsis else "None"
        if origin in (Union, UnionType):
            return " | ".join(self.text(part) for part in args)
        if origin is Literal:
            return f"Literal[{', '.join(map(repr, args))}]"
        if origin is not None:
            return f"{origin.__name__}[{', '.join(self.text(part) for part in args)}]"
        if annotation.__module__ != "builtins":
            self.imported.add(annotation)
        return str(annotation.__name__)


def mixins(base: type, ddp_strategy: type, suffix: str) -> tuple[Types, list[str]]:
    """Returns the source of the classes with arguments, one for each method that ``base`` serves."""
    types, classes = Types(), []
    for method in OWN:
        mixin, without = _served_by(base, method)
        if mixin is None:
            continue
        arguments = list(signature_of(method, ddp_strategy, without).parameters.values())[1:]
        classes.append(_mixin(method, mixin, suffix, arguments, types))
    return types, classes


def _served_by(base: type, method: type[Method]) -> tuple[type | None, Any]:
    if base is PipeSyncFabricStrategyMixin:
        return (None if method.makes_passes else base), method.config_type.for_trainer
    return (PipelineStrategyMixin if method.makes_passes else SyncStrategyMixin), method.config_type.set_by_trainer


def _mixin(method: type[Method], mixin: type, suffix: str, arguments: list[Parameter], types: Types) -> str:
    docs = docs_of(method.config_type)
    described = [
        textwrap.fill(
            f"{argument.name}: {docs.get(argument.name) or FRAMEWORK_DOCS.get(argument.name, 'as in DDPStrategy.')}",
            width=120,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for argument in arguments
    ]
    stated = [f"{argument.name}: {types.text(argument.annotation)} = {argument.default!r}," for argument in arguments]
    summary = textwrap.indent(cleandoc(method.__doc__ or "").partition("\n\n")[0], "    ").strip()
    return f'''
class {method.__name__}{suffix}Mixin({mixin.__name__}):
    """{summary}

    Args:
{chr(10).join(described)}

    Raises:
        ValueError: a setting is unknown or out of its range.
    """

    name = {method.name!r}

    @passes_to({mixin.__name__})
    def __init__(self, {" ".join(stated)}) -> None: ...
'''


def arguments_file(base: type, ddp_strategy: type, suffix: str, framework: str) -> str:
    """Returns the file with the arguments of a framework's strategies."""
    types, classes = mixins(base, ddp_strategy, suffix)
    names = {cls for cls in types.imported if cls.__name__ != "device"}
    used = {_served_by(base, method)[0] for method in OWN} - {None}
    imports = [f"from {_exported_by(cls)} import {cls.__name__}" for cls in [*names, *used] if cls is not None]
    return "\n".join(
        [
            f'"""The arguments of {framework} strategies: the settings of each method.\n\n{WRITTEN}\n"""',
            "from __future__ import annotations",
            "from typing import Literal",
            "from torch import device",
            *sorted(imports),
            "from lightning_pipesync.training.strategies import passes_to",
            *classes,
        ]
    )


def trainer_file(distribution: str) -> str:
    """Returns the file with the strategies of a distribution of Lightning's Trainer."""
    conflict = "" if distribution == "lightning.pytorch" else "  # type: ignore[misc]"
    return f'''"""Strategies of the Trainer of ``{distribution}``; importing this module registers their names.

{WRITTEN}
"""

from __future__ import annotations

from {distribution} import Callback
from {distribution}.strategies import DDPStrategy, StrategyRegistry

from lightning_pipesync.lightning import arguments
from lightning_pipesync.lightning.callback import PipeSyncCallbackMixin
from lightning_pipesync.lightning.step_report import StepReportMixin
from lightning_pipesync.lightning.users_strategy import users_strategy
from lightning_pipesync.training.strategies import Strategies


class PipeSyncCallback(PipeSyncCallbackMixin, Callback):{conflict}
    __doc__ = PipeSyncCallbackMixin.__doc__


class StepReport(StepReportMixin, Callback):{conflict}
    __doc__ = StepReportMixin.__doc__

{"".join(_concrete(method, "Strategy", conflict, "callback_class = PipeSyncCallback") for method in OWN)}

_make = users_strategy(DDPStrategy, PipeSyncCallback, __name__)
STRATEGIES = Strategies(StrategyRegistry, globals(), "Strategy", _make)
'''


def fabric_file(distribution: str) -> str:
    """Returns the file with the strategies of a distribution of Fabric."""
    conflict = "" if distribution == "lightning.fabric" else "  # type: ignore[misc]"
    classes = [_concrete(method, "FabricStrategy", conflict, "") for method in OWN if not method.makes_passes]
    return f'''"""Strategies of the Fabric of ``{distribution}``; importing this module registers their names.

{WRITTEN}
"""

from __future__ import annotations

from {distribution}.strategies import STRATEGY_REGISTRY, DDPStrategy

from lightning_pipesync.fabric import arguments
from lightning_pipesync.fabric.users_strategy import users_strategy
from lightning_pipesync.training.strategies import Strategies

{"".join(classes)}

_make = users_strategy(DDPStrategy, __name__)
STRATEGIES = Strategies(STRATEGY_REGISTRY, globals(), "FabricStrategy", _make)
'''


def _concrete(method: type[Method], suffix: str, conflict: str, attributes: str) -> str:
    name = f"{method.__name__}{suffix}"
    return f"""
class {name}(arguments.{name}Mixin, DDPStrategy):{conflict}
    __doc__ = arguments.{name}Mixin.__doc__
    {attributes}
"""


def files() -> Iterator[tuple[Path, str]]:
    """Yields each file that this script writes, and its text."""
    package = ROOT / "lightning_pipesync"
    of_fabric = PipeSyncFabricStrategyMixin, FabricDDPStrategy
    texts = {
        "lightning/arguments.py": arguments_file(SyncStrategyMixin, DDPStrategy, "Strategy", "the Trainer's"),
        "lightning/__init__.py": trainer_file("lightning.pytorch"),
        "lightning/twin.py": trainer_file("pytorch_lightning"),
        "fabric/arguments.py": arguments_file(*of_fabric, "FabricStrategy", "Fabric's"),
        "fabric/__init__.py": fabric_file("lightning.fabric"),
        "fabric/twin.py": fabric_file("lightning_fabric"),
    }
    for name, text in texts.items():
        yield package / name, _formatted(text, package / name)


def _exported_by(cls: type) -> str:
    """Returns the name of the outermost module that exports a class."""
    parts = cls.__module__.split(".")
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
