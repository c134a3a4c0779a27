"""``pipesync bench`` under a launcher."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from lightning_pipesync.cli import main
from tests.support.harness import on_ranks


def said_by_rank(words: list[str]) -> str:
    with redirect_stdout(StringIO()) as said:
        assert main(words) == 0
    return said.getvalue()


def test_under_a_launcher(tmp_path: Path) -> None:
    """The ranks in its environment are what is measured; only the first one shows and writes anything."""
    options = ["bench", "collectives", "--sizes_mib", "0.01", "0.1", "--rounds", "1", "--output", str(tmp_path)]
    first, second = on_ranks(said_by_rank, 2, options, init=False)
    assert "Results and pictures" in first
    assert second == ""
    assert json.loads((tmp_path / "collectives.json").read_text())["results"][0]["world_size"] == 2
