"""What chooses a method in the environment and in files: a setting reaches it, or is refused; nothing is imported."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from lightning_pipesync import DeARConfig, EAPipeConfig, PipeSyncPlugin, SelSyncConfig, TopK
from lightning_pipesync.accelerate.launched import check_num_processes
from lightning_pipesync.cli import main
from lightning_pipesync.training.registry import METHODS


def test_plugin_from_the_environment(tmp_path: Path) -> None:
    """A variable counts more than the file, of Accelerate's or of the plugin's own."""
    assert PipeSyncPlugin.from_environment({"HOME": "/", "PIPESYNC_NUM_PROCESSES": "2"}) is None
    of_launcher = {"PIPESYNC_LIGHTHOUSE": "host0:1", "PIPESYNC_REPLICA": "0", "PIPESYNC_NUM_REPLICAS": "2"}
    assert PipeSyncPlugin.from_environment(of_launcher) is None
    for given, settings in {
        ("inf", "[0.5, 0.25]"): {"delta": float("inf"), "injection": (0.5, 0.25)},
        ("auto", "null"): {"delta": "auto"},
        ("0.3", "null"): {"delta": 0.3},
    }.items():
        of_method = {"PIPESYNC_METHOD": "selsync", "PIPESYNC_DELTA": given[0], "PIPESYNC_INJECTION": given[1]}
        plugin = PipeSyncPlugin.from_environment(of_method)
        assert plugin is not None
        assert (plugin.method, plugin.config) == ("selsync", SelSyncConfig(**settings))
    file = tmp_path / "pipesync.yaml"
    for text in ("method: dear\nbucket_mb: 4\nupdate: sharded\n", "num_processes: 2\npipesync:\n  method: dear\n"):
        file.write_text(text)
        plugin = PipeSyncPlugin.from_environment({"PIPESYNC_CONFIG": str(file), "PIPESYNC_BUCKET_MB": "8"})
        assert plugin is not None
        assert plugin.config == DeARConfig(bucket_mb=8.0, update="sharded" if "sharded" in text else None)


def test_every_setting_of_every_method_reaches_it(tmp_path: Path) -> None:
    """From code, from a file and from the environment: none has the name of what chooses the method."""
    assert all("method" not in {field.name for field in fields(method.config_type)} for method in METHODS.values())
    file = tmp_path / "pipesync.yaml"
    file.write_text("method: ea_pipe\nalgorithm: gpipe\n")
    for plugin in (
        PipeSyncPlugin("ea_pipe", algorithm="gpipe"),
        PipeSyncPlugin.from_environment({"PIPESYNC_CONFIG": str(file)}),
        PipeSyncPlugin.from_environment({"PIPESYNC_METHOD": "ea_pipe", "PIPESYNC_ALGORITHM": "gpipe"}),
    ):
        assert plugin is not None
        assert (plugin.method, plugin.config) == ("ea_pipe", EAPipeConfig(algorithm="gpipe"))


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"METHOD": "sellsync"}, ["one of ", "dear", "ea_pipe", "'sellsync'"]),
        ({"METHOD": "selsync", "DELTAA": "0.3"}, ["no setting 'deltaa'", "delta, lssr, follow_lr"]),
        ({"METHOD": "selsync", "LIGHTHOUSE_": "host0:1"}, ["no setting 'lighthouse_'"]),
        ({"METHOD": "selsync", "DELTA": "a lot"}, ["delta", "'a lot'"]),
        ({"METHOD": "selsync", "DELTA": "-1"}, ["delta", "-1"]),
        ({"METHOD": "dear", "UPDATE": "halved"}, ["update", "sharded", "halved"]),
        ({"DELTA": "0.3"}, ["PIPESYNC_DELTA", "no PIPESYNC_METHOD"]),
        ({"CONFIG": "/nowhere.yaml"}, ["/nowhere.yaml cannot be read"]),
    ],
)
def test_wrong_settings_are_named(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        PipeSyncPlugin.from_environment({f"PIPESYNC_{name}": value for name, value in environment.items()})
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- dear\n", "names and values"),
        (b"delta: 0.3\n", "does not name a method"),
        (b"a: [\n", "no YAML file"),
        (bytes(range(256)), "no YAML file"),
    ],
)
def test_wrong_files_are_named(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        PipeSyncPlugin.from_environment({"PIPESYNC_CONFIG": str(file)})
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("lssr: null\nmethod: selsync\ndetla: 0.3\n", ", line 3: method='selsync' has no setting 'detla'."),
        ("num_processes: 2\npipesync:\n  method: selsync\n  delta: -1\n", ", line 4: delta must be "),
        ("\n# fast\nmethod: sellsync\ndelta: 0.3\n", ", line 3: method must be one of "),
        ("method: dear\n  bucket_mb: 4\n", " is no YAML file: line 2: mapping values are not allowed here."),
    ],
)
def test_a_wrong_line_of_a_file_is_told(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "method.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(file) + said)}"):
        PipeSyncPlugin.from_environment({"PIPESYNC_CONFIG": str(file)})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("num_procesess: 2", ", line 2: 'num_procesess' is not a key of Accelerate's configuration. Did you mean 'num"),
        ("distributed_type: MULTIGPU", ": 'MULTIGPU' is not a valid DistributedType"),
    ],
)
def test_a_wrong_line_of_accelerate_s_is_told(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the user's own file, of which the launcher gives Accelerate a part."""
    file = tmp_path / "config.yaml"
    file.write_text(f"distributed_type: MULTI_GPU\n{line}\npipesync:\n  method: dear\n")
    assert main(["launch", "--config_file", str(file), "nowhere.py"]) == 2
    assert capsys.readouterr().err.startswith(f"pipesync: error: {file}{said}")


def test_a_wrong_variable_is_told(tmp_path: Path) -> None:
    file = tmp_path / "method.yaml"
    file.write_text("method: selsync\ndelta: 0.3\n")
    with pytest.raises(ValueError, match=r"^PIPESYNC_DELTA: delta must be .*-1"):
        PipeSyncPlugin.from_environment({"PIPESYNC_CONFIG": str(file), "PIPESYNC_DELTA": "-1"})


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("dear", "compression: {class_path: surprise.Thing}"),
        ("dear", "compression: surprise.Thing"),
        ("dear", "elementwise: [surprise.Thing]"),
        ("parameter_server", "compression: {class_path: surprise.inner.Thing, init_args: {ratio: 0.5}}"),
        ("selsync", "delta: {class_path: surprise.Thing}"),
    ],
)
def test_settings_import_nothing(method: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, or a variable, that names a class of a module which the script has not imported is refused before."""
    (tmp_path / "surprise.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nclass Thing: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "pipesync.yaml"
    file.write_text(f"method: {method}\n{setting}\n")
    name, _, value = setting.partition(": ")
    for environment in (
        {"PIPESYNC_CONFIG": str(file)},
        {"PIPESYNC_METHOD": method, f"PIPESYNC_{name.upper()}": value},
    ):
        with pytest.raises(ValueError, match=rf"{name}.*surprise"):
            PipeSyncPlugin.from_environment(environment)
        assert not (tmp_path / "imported").exists()
        assert "surprise" not in sys.modules


def test_settings_name_classes_that_are_imported(tmp_path: Path) -> None:
    file = tmp_path / "pipesync.yaml"
    file.write_text(
        "method: dear\nelementwise: [torch.optim.Rprop]\n"
        "compression: {class_path: lightning_pipesync.TopK, init_args: {ratio: 0.5}}\n"
    )
    plugin = PipeSyncPlugin.from_environment({"PIPESYNC_CONFIG": str(file)})
    assert plugin is not None
    assert isinstance(plugin.config, DeARConfig)
    assert plugin.config.elementwise == (torch.optim.Rprop,)
    assert plugin.config.compression == TopK(ratio=0.5)


def test_a_launcher_that_starts_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    check_num_processes(1)
    monkeypatch.setenv("PIPESYNC_NUM_PROCESSES", "2")
    with pytest.raises(ValueError, match="num_processes=2, and this is one of 1"):
        check_num_processes(1)
    check_num_processes(2)
    monkeypatch.delenv("PIPESYNC_NUM_PROCESSES")
    launched = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.warns(UserWarning, match="asked for several processes"):
        check_num_processes(1)
