"""The tables in the docs are what the dataclasses and the cost model state."""

from __future__ import annotations

import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from lightning_pipesync.methods.settings import docs_of
from lightning_pipesync.training.registry import METHODS

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["dear", "ea_pipe", "local_sgd", "parameter_server", "pipe_sgd", "selsync"])
def test_the_table_of_settings_is_up_to_date(name: str) -> None:
    script = runpy.run_path(str(DOCS / "settings_tables.py"))
    page = (DOCS / f"{name}.md").read_text()
    assert script["BEGIN"] in page
    assert page == script["page_with_table"](name), "run python docs/settings_tables.py"


def test_the_table_of_the_cost_model_is_up_to_date() -> None:
    script = runpy.run_path(str(DOCS / "cost_table.py"))
    page = (DOCS / "benchmarks.md").read_text()
    assert script["BEGIN"] in page
    assert page == script["page_with_table"](), "run python docs/cost_table.py"


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_is_documented(name: str) -> None:
    config_type = METHODS[name].config_type
    assert set(docs_of(config_type)) == {field.name for field in fields(config_type)}
