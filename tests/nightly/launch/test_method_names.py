"""No method is named outside its folder: what differs between methods is a property that they declare."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.own_methods import OWN

ROOT = Path(__file__).parents[3] / "lightning_pipesync"

#: Where methods are listed.
LISTED = {"__init__.py", "training/presets.py", "training/registry.py"}
#: The first lines of a file that a script has written from the registry.
GENERATED = "Written by docs/strategy_classes.py"

#: What else names one, by file, and why.
EXCEPTIONS = {
    "accelerate/plugin.py": {"selsync"},  # an example, in the error for a file without the key
    "lab/bench/step_report.py": {"DeAR"},  # cited for its equations
    "lab/bench/timeline.py": {"dear"},  # its figure is drawn if no methods are named
    "methods/local_sgd/clock.py": {"selsync"},  # a value of the setting period
    "methods/local_sgd/config.py": {"selsync"},  # the same
}


def words_of(tree: ast.Module) -> Iterator[str]:
    """The names, attributes, imports and texts in a file, but not its docstrings and comments."""
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        for field in ("id", "attr", "name", "module", "arg"):
            if isinstance(text := getattr(node, field, None), str):
                yield text
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def named_in(path: Path) -> set[str]:
    """The methods that a file outside their folders names."""
    words = set(words_of(ast.parse(path.read_text())))
    found = set()
    for method in OWN.values():
        folder = ROOT.parent.joinpath(*method.__module__.split(".")[:-1])
        for name in (method.name, method.__name__):
            pattern = re.compile(rf"(?<![A-Za-z_]){name}(?:Config|Strategy)?(?![A-Za-z_])")
            if not path.is_relative_to(folder) and any(map(pattern.search, words)):
                found.add(name)
    return found


def test_methods_are_named_in_their_folders_alone() -> None:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        inside = path.relative_to(ROOT).as_posix()
        if inside not in LISTED and GENERATED not in path.read_text()[:300] and (names := named_in(path)):
            found[inside] = names
    assert len(OWN) == 6
    assert found == EXCEPTIONS, "an exception that is no longer needed is to go, too"


def test_a_name_is_found(tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    path.write_text("from lightning_pipesync.methods.dear import DeARConfig\nif method == 'selsync':\n    LocalSGD()\n")
    assert named_in(path) == {"dear", "DeAR", "selsync", "LocalSGD"}
    path.write_text('"""As in DeAR, Eq. 7."""\n\nclass ParameterServerBaseline:\n    """See SelSync."""  # local_sgd\n')
    assert named_in(path) == set()
