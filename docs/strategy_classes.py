"""Writes the strategy classes of Lightning, Fabric and Ray: each method's settings as typed and documented arguments.

Usage: python docs/strategy_classes.py
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from inspect import Parameter, cleandoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from settings_tables import docs_of

from lightning_pipesync.fabric.strategy import PipeSyncFabricStrategyMixin
from lightning_pipesync.fabric.strategy import mixin_of as fabric_mixin_of
from lightning_pipesync.lightning.pipeline import mixin_of as lightning_mixin_of
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.registry import METHODS
from lightning_pipesync.training.replica_layout import ReplicaLayout
from lightning_pipesync.training.strategies import MixinOf, signature_of

ROOT = Path(__file__).parents[1]
WRITTEN = "Written by docs/strategy_classes.py: change a method's settings instead, and run it."
#: The methods of the package, without those that users register.
BUILT_IN = [method for method in METHODS.values() if method.__module__.startswith("lightning_pipesync.")]
IN_FABRIC = [method for method in BUILT_IN if not method.makes_passes]
#: Docs of the arguments that are not settings.
FRAMEWORK_DOCS = {
    "process_group_backend": 'as in DDPStrategy; with ``"gloo"``, CUDA tensors are sent through host memory.',
    "start_method": 'as in DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.',
}
RAISES = """
    Raises:
        ValueError: a setting is unknown or out of its range."""


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


def mixins(mixin_of: MixinOf, ddp_strategy: type, suffix: str, methods: list[type[Method]]) -> tuple[Types, list[str]]:
    """Returns the source of the classes with arguments, one for each method."""
    types, classes = Types(), []
    for method in methods:
        mixin, without = mixin_of(method)
        types.imported.add(mixin)
        arguments = list(signature_of(method, mixin, ddp_strategy, without).parameters.values())[1:]
        classes.append(_mixin(method, mixin, suffix, arguments, types))
    return types, classes


def _mixin(method: type[Method], mixin: type, suffix: str, arguments: list[Parameter], types: Types) -> str:
    summary = textwrap.indent(cleandoc(method.__doc__ or "").partition("\n\n")[0], "    ").strip()
    docs = _arguments_docs(method, arguments) if mixin is not PipeSyncFabricStrategyMixin else _reference_docs(method)
    stated = [f"{argument.name}: {types.text(argument.annotation)} = {argument.default!r}," for argument in arguments]
    return f'''
class {method.__name__}{suffix}Mixin({mixin.__name__}):
    """{summary}

{docs}
    """

    name = {method.name!r}

    @passes_to({mixin.__name__})
    def __init__(self, {" ".join(stated)}) -> None: ...
'''


def _arguments_docs(method: type[Method], arguments: list[Parameter]) -> str:
    docs = {**docs_of(ReplicaLayout), **docs_of(method.config_type)}
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
    return "\n".join(["    Args:", *described, RAISES])


def _reference_docs(method: type[Method]) -> str:
    """Returns references to the full docs, those of the Trainer's strategy."""
    name = method.__name__
    return (
        f"    The settings are those of :class:`{method.config_type.__name__}`, as in :class:`{name}Strategy`.\n"
        "    The other arguments are those of DDPStrategy and :class:`FabricLayout`."
    )


def arguments_file(
    mixin_of: MixinOf, ddp_strategy: type, suffix: str, framework: str, methods: list[type[Method]] = BUILT_IN
) -> str:
    """Returns the file with the arguments of a framework's strategies."""
    types, classes = mixins(mixin_of, ddp_strategy, suffix, methods)
    imports = [f"from {_exported_by(cls)} import {cls.__name__}" for cls in types.imported if cls.__name__ != "device"]
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
    twin = distribution == "pytorch_lightning"
    conflict = "  # type: ignore[misc]" if twin else ""
    imports = "from lightning_pipesync.lightning.distribution import Callback, DDPStrategy, StrategyRegistry"
    if twin:
        imports = f"from {distribution} import Callback\n"
        imports += f"from {distribution}.strategies import DDPStrategy, StrategyRegistry"
    return f'''"""Strategies of the Trainer of ``{distribution}``; importing this module registers their names.

{WRITTEN}
"""

from __future__ import annotations

{imports}

from lightning_pipesync.lightning import arguments
from lightning_pipesync.lightning.callback import PipeSyncCallbackMixin
from lightning_pipesync.lightning.step_report import StepReportMixin
from lightning_pipesync.lightning.pipeline import mixin_of
from lightning_pipesync.lightning.trace import TraceCallbackMixin
from lightning_pipesync.training.strategies import Strategies


class PipeSyncCallback(PipeSyncCallbackMixin, Callback): ...{conflict}


class StepReport(StepReportMixin, Callback): ...{conflict}


class TraceCallback(TraceCallbackMixin, Callback): ...{conflict}


class _Strategy(DDPStrategy):
    callback_class: type[Callback] = PipeSyncCallback

{"".join(_concrete(method, "Strategy", "_Strategy", conflict) for method in BUILT_IN)}

STRATEGIES = Strategies(StrategyRegistry, globals(), "Strategy", _Strategy, mixin_of)
'''


def fabric_file(distribution: str) -> str:
    """Returns the file with the strategies of a distribution of Fabric."""
    twin = distribution == "lightning_fabric"
    conflict = "  # type: ignore[misc]" if twin else ""
    imported_from = f"{distribution}.strategies" if twin else "lightning_pipesync.fabric.distribution"
    first = """
from lightning_pipesync.core.extras import import_first_installed

# This registers the Trainer's strategies, which import modules of this package.
import_first_installed("lightning", "lightning_fabric")
"""
    classes = [_concrete(method, "FabricStrategy", "DDPStrategy", conflict) for method in IN_FABRIC]
    return f'''"""Strategies of the Fabric of ``{distribution}``; importing this module registers their names.

{WRITTEN}
"""

from __future__ import annotations
{"" if twin else first}
from {imported_from} import STRATEGY_REGISTRY, DDPStrategy

from lightning_pipesync.fabric import arguments
from lightning_pipesync.fabric.strategy import mixin_of
from lightning_pipesync.training.strategies import Strategies

{"".join(classes)}

STRATEGIES = Strategies(STRATEGY_REGISTRY, globals(), "FabricStrategy", DDPStrategy, mixin_of)
'''


def ray_file() -> str:
    """Returns the file with the strategies of the Trainer for workers of Ray Train."""
    names = [f"{method.__name__}Strategy" for method in BUILT_IN]
    classes = [f"\nclass Ray{name}({name}, RayStrategy): ...\n" for name in names]
    return f'''"""Strategies of the Trainer for workers of Ray Train.

{WRITTEN}
"""

from __future__ import annotations

from lightning_pipesync.core.extras import check_extra

check_extra("ray", __name__)

from lightning_pipesync.lightning import {", ".join(names)}
from lightning_pipesync.ray.strategy import RayStrategy

{"".join(classes)}'''


def _concrete(method: type[Method], suffix: str, base: str, conflict: str) -> str:
    name = f"{method.__name__}{suffix}"
    return f"\nclass {name}(arguments.{name}Mixin, {base}): ...{conflict}\n"


def files() -> Iterator[tuple[Path, str]]:
    """Yields each file that this script writes, and its text."""
    package = ROOT / "lightning_pipesync"
    texts = {
        "lightning/arguments.py": arguments_file(lightning_mixin_of, DDPStrategy, "Strategy", "the Trainer's"),
        "lightning/__init__.py": trainer_file("lightning.pytorch"),
        "lightning/twin.py": trainer_file("pytorch_lightning"),
        "fabric/arguments.py": arguments_file(
            fabric_mixin_of, FabricDDPStrategy, "FabricStrategy", "Fabric's", IN_FABRIC
        ),
        "fabric/__init__.py": fabric_file("lightning.fabric"),
        "fabric/twin.py": fabric_file("lightning_fabric"),
        "ray/__init__.py": ray_file(),
    }
    for name, text in texts.items():
        yield package / name, _formatted(text, package / name)


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
