"""``python -m tests.support.lines [COMMIT]``: lines of Python by storey and kind, and words of Markdown."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = ("code", "docstrings", "comments", "imports", "blank")


def kinds_of(text: str) -> Counter[str]:
    """Returns how many lines of a file are of each kind."""
    kind = dict.fromkeys(range(1, len(text.splitlines()) + 1), "code")
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            kind[number] = "comments"
    for node in ast.walk(ast.parse(text)):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (is_docstring and isinstance(node.value.value, str)):
            numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            kind.update(dict.fromkeys(numbers, "docstrings" if is_docstring else "imports"))
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            kind[number] = "blank"
    return Counter(kind.values())


def storey_of(path: Path) -> str:
    """Returns the part of the project that a file belongs to: of the package and the tests, the folder."""
    parts = path.parts[:-1]
    return "/".join(parts[:2] if parts[:1] in (("lightning_pipesync",), ("tests",)) else parts[:1]) or "."


def main(commit: str = "HEAD") -> None:
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    storeys: dict[str, Counter[str]] = {}
    words = 0
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files.getmembers():
            path, content = Path(member.name), files.extractfile(member)
            if content is not None and path.suffix in (".py", ".pyi"):
                counted = storeys.setdefault(storey_of(path), Counter())
                counted.update({"files": 1}, **kinds_of(content.read().decode()))
            elif content is not None and path.suffix == ".md":
                words += len(content.read().split())
    for folder in ("lightning_pipesync", "tests"):
        storeys[f"**{folder}**"] = sum((n for name, n in storeys.items() if name.startswith(folder)), Counter())
    print(f"| storey | files | lines | {' | '.join(KINDS)} |\n|---|---:|---:|{'---:|' * len(KINDS)}")
    for name, counted in sorted(storeys.items()):
        row = [counted["files"], sum(counted[kind] for kind in KINDS), *(counted[kind] for kind in KINDS)]
        print(f"| {name} | {' | '.join(f'{number:,}' for number in row)} |")
    print(f"\nWords of Markdown: {words:,}")


if __name__ == "__main__":
    main(*sys.argv[1:])
