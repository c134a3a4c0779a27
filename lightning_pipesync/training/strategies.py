"""Strategy classes: views of a method's settings, and their registration with a framework.

A class is made when its method is registered; type checkers read those of the package's methods in stubs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, MutableMapping
from dataclasses import fields
from typing import Any, ParamSpec, get_type_hints

from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.presets import PRESETS
from lightning_pipesync.training.registry import METHODS

P = ParamSpec("P")
MixinOf = Callable[[type[Method]], tuple[type, Collection[str]]]

#: The arguments of a framework's DDPStrategy that strategies have, too, besides a method's settings.
OF_DDP = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision", "precision_plugin"),
    *("process_group_backend", "start_method"),
)

#: What is to be said of them.
OF_DDP_DOCS = {
    **dict.fromkeys(OF_DDP, "as in DDPStrategy."),
    "process_group_backend": 'as in DDPStrategy; with ``"gloo"``, CUDA tensors are sent through host memory.',
    "start_method": 'as in DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.',
}
RAISES = "    ValueError: a setting is unknown, out of its range or without effect."
_INDENTED: dict[str, Any] = {
    "initial_indent": " " * 4,
    "subsequent_indent": " " * 8,
    "break_long_words": False,
    "break_on_hyphens": False,
}

#: The end of the names of strategies whose processes are forked, which start in notebooks, too, as ``ddp_notebook``.
NOTEBOOK = "_notebook"


class Strategies:
    """Registers the strategies of all methods and presets with the ``registry`` of a distribution of a framework.

    ``classes`` are the globals of a module, to which the strategy classes are added. ``suffix`` follows the method's
    name in that of a class. ``base`` is the distribution's DDPStrategy. ``mixin_of`` returns the mixin of a method's
    strategy, and the settings that are not arguments.
    """

    def __init__(
        self, registry: Any, classes: MutableMapping[str, Any], suffix: str, base: type, mixin_of: MixinOf
    ) -> None:
        self._registry, self._classes, self._suffix = registry, classes, suffix
        self._base, self._mixin_of = base, mixin_of
        for method in METHODS.values():
            self.register(method)

    def register(self, method: type[Method]) -> None:
        name = method.__name__ + self._suffix
        strategy: Any = self._classes.get(name)
        if getattr(strategy, "name", None) != method.name:
            mixin, without = self._mixin_of(method)
            strategy = strategy_class(name, method, (mixin, self._base), without, self._classes["__name__"])
            self._classes[name] = strategy
        self._add(method.name, strategy, (inspect.getdoc(strategy) or "").partition("\n")[0])
        for preset_name, preset in PRESETS.items():
            if preset.method == method.name:
                self._add(preset_name, strategy, preset.summary, **preset.settings)

    def _add(self, name: str, strategy: type, summary: str, **settings: Any) -> None:
        """Registers a strategy under ``name``, and as one for notebooks; also with dashes in place of underscores."""
        for registered, arguments in ((name, settings), (name + NOTEBOOK, {**settings, "start_method": "fork"})):
            for spelled in {registered, registered.replace("_", "-"), registered.replace(name, name.replace("_", "-"))}:
                self._registry.register(spelled, strategy, summary, override=True, **arguments)


def check_interactive(strategy: Any) -> None:
    """Raises a ValueError in an interactive session if a strategy starts its processes by running the script again."""
    if (hasattr(sys, "ps1") or sys.flags.interactive) and not strategy.launcher.is_interactive_compatible:
        raise ValueError(
            f"strategy={strategy.name!r} cannot start processes in an interactive session, which has no script to run "
            f"again: set strategy={strategy.name + NOTEBOOK!r}, add {NOTEBOOK!r} to the name of a preset, or "
            f"start_method='fork' to the arguments of {type(strategy).__name__}."
        )


def passes_to(base: type) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorator of an ``__init__`` that states arguments: it passes those that are given, by name, to that of ``base``.

    Whatever else is given by name is passed on, too: ``base`` refuses what is no setting.
    """

    def decorate(stated: Callable[P, None]) -> Callable[P, None]:
        names = list(inspect.signature(stated).parameters)[1:]

        @functools.wraps(stated)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if len(args) > len(names):
                raise TypeError(f"{type(self).__name__} takes at most {len(names)} arguments, got {len(args)}.")
            base.__init__(self, **dict(zip(names, args, strict=False)), **kwargs)  # type: ignore[misc]

        return __init__  # type: ignore[return-value]

    return decorate


@functools.cache
def docs_of(dataclass: Any) -> dict[str, str]:
    """Returns the docstring of each field, also of a base's, as one paragraph, by its name; none without the source."""
    docs: dict[str, str] = {}
    for base in reversed(inspect.getmro(dataclass)[:-1] if dataclass else ()):
        try:
            [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):
            continue
        assert isinstance(definition, ast.ClassDef)
        for field, doc in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                docs[field.target.id] = " ".join(str(doc.value.value).split())
    return {name: doc for name, doc in docs.items() if name in dataclass.__dataclass_fields__}


def settings_in(arguments: dict[str, Any]) -> dict[str, Any]:
    """Removes the settings from a strategy's arguments, and returns them; those of DDPStrategy stay."""
    return {name: arguments.pop(name) for name in list(arguments) if name not in OF_DDP}


def signature_of(method: type[Method], mixin: type, ddp_strategy: type, without: Collection[str]) -> inspect.Signature:
    """Returns the signature of a strategy: the method's settings but ``without``, and arguments of ``ddp_strategy``.

    If ``mixin`` has a ``layout_type``, its fields follow.
    """
    init = ddp_strategy.__init__  # type: ignore[misc]
    layout: Any = getattr(mixin, "layout_type", None)
    types = {**get_type_hints(init), **get_type_hints(layout or object), **get_type_hints(method.config_type)}
    settings = {field.name: field.default for field in fields(method.config_type) if field.name not in without}
    of_layout = {
        field.name: field.default for field in (fields(layout) if layout else ()) if field.name not in settings
    }
    of_ddp = {name: given.default for name, given in inspect.signature(init).parameters.items() if name in OF_DDP}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    arguments = [
        inspect.Parameter(name, kind, default=default, annotation=types[name])
        for name, default in {**settings, **of_ddp, **of_layout}.items()
    ]
    return inspect.Signature([inspect.Parameter("self", kind), *arguments])


def strategy_class(
    name: str, method: type[Method], bases: tuple[type, ...], without: Collection[str], module: str
) -> type[Any]:
    """Creates the strategy class of a method; ``module`` exports it."""

    def __init__(self: Any) -> None: ...

    signature = signature_of(method, bases[0], bases[-1], without)
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__annotations__ = {name: argument.annotation for name, argument in signature.parameters.items()}
    summary = inspect.cleandoc(method.__doc__ or "").partition("\n\n")[0]
    config: Any = method.config_type
    layout: Any = getattr(bases[0], "layout_type", None)
    elsewhere = dict.fromkeys(signature.parameters, f"see :class:`{config.__name__}`.")  # in a package without sources
    docs = {**elsewhere, **OF_DDP_DOCS, **docs_of(layout), **docs_of(config)}
    described = [
        textwrap.fill(f"{argument}: {docs[argument]}", 110, **_INDENTED) for argument in list(signature.parameters)[1:]
    ]
    contents = {
        "__init__": passes_to(bases[0])(__init__),
        "__doc__": "\n".join([summary, "", "Args:", *described, "", "Raises:", RAISES]),
        "name": method.name,
        "__module__": module,
    }
    return type(name, bases, contents)
