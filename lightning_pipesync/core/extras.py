"""Optional packages: which extra of this package installs a missing one."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

#: By extra in pyproject.toml, the modules without which nothing of it works.
MODULES = {
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "transformers": ("transformers", "accelerate"),
    "ray": ("ray", "lightning"),
    "tune": ("bayes_opt",),
    "netlab": ("pyroute2",),
    "plan": ("matplotlib", "pyroute2", "rich"),
    "bench": ("matplotlib", "pyroute2", "rich"),
    "torchft": ("torchft",),
}
#: Packages that take the place of another one.
TWINS = {"lightning": ("pytorch_lightning",)}
#: What messages call a package, if not as its module.
NAMES = {
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "ray": "Ray",
    "bayes_opt": "bayesian-optimization",
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "torchft": "torchft (Linux on x86-64)",
}


def is_installed(module: str) -> bool:
    """Returns whether a module can be imported; a folder of that name, without ``__init__.py``, is none."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def missing_extra(extra: str, what: str, *modules: str) -> str | None:
    """Returns the message that ``what`` needs an extra, or None if all its modules are installed.

    Args:
        extra: as in pyproject.toml.
        what: needs it, in the user's words.
        modules: that are needed; if none are given, those in :data:`MODULES`.
    """
    needed = modules or MODULES[extra]
    missing = [name for name in needed if not any(map(is_installed, (name, *TWINS.get(name, ()))))]
    if not missing:
        return None
    names = ", ".join(NAMES.get(name, name) for name in missing)
    return f'{what} needs {names}: pip install "lightning-pipesync[{extra}]"'


def check_extra(extra: str, what: str, *modules: str) -> None:
    """Raises ModuleNotFoundError with the message of :func:`missing_extra`, if there is one."""
    if message := missing_extra(extra, what, *modules):
        raise ModuleNotFoundError(message)


def import_first_installed(*modules: str) -> None:
    """Imports the first of ``modules`` that is installed, if any is."""
    if module := next(filter(is_installed, modules), None):
        import_module(module)
