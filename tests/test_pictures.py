"""Methods look alike in all pictures, and unlike each other, in black and white as well."""

from __future__ import annotations

from pathlib import Path

from lightning_pipesync.lab.bench.pictures import COLOURS, look_of, looks_of, markers_of, picture
from tests.own_methods import OWN


def test_each_method_has_a_colour_and_a_marker_of_its_own() -> None:
    looks = [look_of(method) for method in ("ddp", *OWN)]
    assert all(len({look[part] for look in looks}) == len(looks) <= len(COLOURS) for part in ("color", "marker"))


def test_a_method_looks_alike_by_any_name_and_its_line_tells_its_settings() -> None:
    looks = looks_of(
        [
            "DDP, 2 MiB",
            "DDP, 25 MiB",
            "selsync:delta=0.1",
            "SelSync, local step",
            "fedavg:period=4",
            "Pipe-SGD (compression=int8)",
        ]
    )
    methods = ["ddp", "ddp", "selsync", "selsync", "local_sgd", "pipe_sgd"]
    assert [{**look, "linestyle": "-"} for look in looks.values()] == [
        {**look_of(method), "linestyle": "-"} for method in methods
    ]
    assert [look["linestyle"] for look in looks.values()] == ["-", "--", "-", "--", "-", "-"]


def test_markers_of_further_settings_are_not_filled() -> None:
    looks = markers_of(["dear", "dear (low_rank=4)", "pipe_sgd"])
    assert [look["fillstyle"] for look in looks.values()] == ["full", "none", "full"]
    assert all(look["linestyle"] == "" for look in looks.values())


def test_other_methods_get_what_is_left() -> None:
    names = ["sgd", "pipedream", "weight_stashing", "spectrain", "naive", "ea_pipe:elastic_force=0.1"]
    looks = looks_of(names)
    assert looks["ea_pipe:elastic_force=0.1"] == {**look_of("ea_pipe"), "linestyle": "-"}
    assert looks["sgd"] == {**look_of("ddp"), "linestyle": "-"}
    assert all(len({look[part] for look in looks.values()}) == len(names) for part in ("color", "marker"))


def test_logarithmic_axes_may_be_without_data(tmp_path: Path) -> None:
    """Those with data stay logarithmic, beside panels without, too, with which they share an axis or not."""
    path = tmp_path / "some.png"
    for sharey in (False, True):
        with picture(path, (6, 4), columns=2, sharey=sharey) as [[empty, drawn]]:
            empty.plot([], [])
            drawn.plot([1, 10], [2, 20])
            for panel in (empty, drawn):
                panel.set(xscale="log", yscale="log")
        assert (drawn.get_xscale(), drawn.get_yscale()) == ("log", "log")
        assert empty.get_yscale() == ("log" if sharey else "linear")
        path.unlink()
