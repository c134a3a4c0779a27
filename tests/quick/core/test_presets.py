"""Presets: the names of papers' algorithms mean the same everywhere, and unknown names get an answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning.pytorch
import lightning_fabric
import pytest
import pytorch_lightning

from benchmarks.converge import config_of
from lightning_pipesync import LocalSGD, PipeSyncPlugin, register_method
from lightning_pipesync.lab.bench.candidates import makers
from lightning_pipesync.training.presets import PRESETS
from lightning_pipesync.training.registry import METHODS, make_config
from tests.support.commands import ROOT

#: Names with underscores, which may be typed as dashes, and capitals.
SPELLINGS = (str, lambda name: name.replace("_", "-"), str.upper)


def test_the_docs_have_the_settings_of_each_preset() -> None:
    page = (ROOT / "docs" / "local_sgd.md").read_text()
    rows = re.findall(r'^\| `strategy="(\w+)"` \| `(.*)` \|$', page, re.MULTILINE)
    assert {name: eval(f"dict({settings})") for name, settings in rows} == {
        name: preset.settings for name, preset in PRESETS.items()
    }


@pytest.mark.parametrize(("name", "spelled"), [(name, SPELLINGS[i % 3]) for i, name in enumerate([*METHODS, *PRESETS])])
def test_frameworks_know_a_name(name: str, spelled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each framework checks the settings of a plain loop or of a Trainer itself."""
    assert not (name in METHODS and name in PRESETS)
    method = PRESETS[name].method if name in PRESETS else name
    expected = make_config(method, PRESETS[name].settings if name in PRESETS else {})
    quiet = {"accelerator": "cpu", "devices": 1}
    for pl in (lightning.pytorch, pytorch_lightning):
        trainer = pl.Trainer(strategy=spelled(name), logger=False, **quiet)  # type: ignore[arg-type]
        assert (trainer.strategy.name, trainer.strategy.config) == (method, expected)  # type: ignore[attr-defined]
    for fabric in (lightning.fabric, lightning_fabric):
        if not METHODS[method].makes_passes:
            strategy: Any = fabric.Fabric(strategy=spelled(name), **quiet).strategy  # type: ignore[arg-type]
            assert (strategy.name, strategy.config) == (method, expected)
    (tmp_path / "pipesync.yaml").write_text(f"method: {spelled(name)}")
    monkeypatch.setenv("PIPESYNC_CONFIG", str(tmp_path / "pipesync.yaml"))
    from_file = PipeSyncPlugin.from_environment()
    monkeypatch.delenv("PIPESYNC_CONFIG")
    monkeypatch.setenv("PIPESYNC_METHOD", spelled(name))
    for plugin in (PipeSyncPlugin(spelled(name)), from_file, PipeSyncPlugin.from_environment()):
        assert plugin is not None
        assert (plugin.method, plugin.config) == (method, expected)


def test_the_users_settings_override_a_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = METHODS["local_sgd"].config_type(**{**PRESETS["diloco"].settings, "period": 30})
    monkeypatch.setenv("PIPESYNC_METHOD", "diloco")
    monkeypatch.setenv("PIPESYNC_PERIOD", "30")
    plugin = PipeSyncPlugin.from_environment()
    assert plugin is not None
    assert plugin.config == PipeSyncPlugin("diloco", period=30).config == config_of("diloco:period=30") == expected


def test_what_is_left_of_a_preset_without_effect_is_left_out() -> None:
    """The user's settings are checked as without a preset."""
    given = {"outer_optimizer": "elastic", "compression": "none"}
    kept = {"period": 100, "lr_scale": 1.0, "follow_lr": False, "fragments": 8, "overlap_steps": 1}
    expected = make_config("local_sgd", {**kept, **given})
    text = "streaming_diloco:outer_optimizer=elastic,compression=none"
    [maker] = makers([text], ())
    from_text = maker.keywords["declared"].config  # type: ignore[attr-defined]
    assert PipeSyncPlugin("streaming_diloco", **given).config == config_of(text) == from_text == expected
    with pytest.raises(ValueError, match=r"outer_lr=0\.5 has no effect with outer_optimizer='elastic'"):
        PipeSyncPlugin("streaming_diloco", **given, outer_lr=0.5)


def test_benchmarks_know_presets() -> None:
    for text, label in (
        ("local-sgd", "local_sgd"),
        ("diloco", "local_sgd (diloco)"),
        ("Streaming-DiLoCo:period=50", "local_sgd (Streaming-DiLoCo, period=50)"),
    ):
        [make] = makers([text], ())
        declared = make.keywords["declared"]  # type: ignore[attr-defined]
        assert (declared.name, declared.config) == (label, config_of(text))


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("selsnyc", {}, "Did you mean 'selsync'?"),
        ("DiLoCo2", {}, "Did you mean 'diloco'?"),
        ("selsync_notebook", {}, "Did you mean 'selsync'?"),
        (3, {}, "got 3."),
        ("fedavg", {"perido": 3}, "Did you mean 'period'?"),
        ("diloco", {"outer_optimizer": "nestrov"}, "Did you mean 'nesterov'?"),
        ("diloco", {"compression": "itn4"}, "Did you mean 'int4'?"),
    ],
)
def test_an_unknown_name_gets_the_closest_one(method: Any, settings: dict[str, Any], said: str) -> None:
    for make in (
        lambda: PipeSyncPlugin(method, **settings),
        lambda: PipeSyncPlugin.from_mapping({"method": method, **settings}),
    ):
        with pytest.raises(ValueError, match=re.escape(said) + "$"):
            make()


@pytest.mark.parametrize(
    ("text", "said"),
    [("dilcoo", "Did you mean 'diloco'?"), ("dpd", "Did you mean 'ddp'?"), ("diloco:perido=3", "mean 'period'?")],
)
def test_a_benchmark_names_the_closest_one(text: str, said: str) -> None:
    for parse in (config_of, lambda text: makers([text], ())):
        with pytest.raises(ValueError, match=re.escape(said)):
            parse(text)


def test_a_users_method_cannot_have_the_name_of_a_preset() -> None:
    with pytest.raises(ValueError, match="name='diloco' is that of a preset: choose another one"):
        register_method(type("Mine", (LocalSGD,), {"name": "diloco"}))
