"""What commands that plan and measure refuse, in words that name the setting and its value."""

from __future__ import annotations

import pytest
import torch

from tests.support.bench_runs import run_command

#: By command: options, and what the message says of them.
REFUSED: dict[str, list[tuple[str, list[str]]]] = {
    "plan": [
        ("--from nowhere.json", ["nowhere.json is not the plan.json of an earlier plan"]),
        ("--from README.md", ["README.md is not the plan.json"]),
        ("--model resnet51", ["resnet51", "neither MODULE:FUNCTION nor one of"]),
        ("--model tests.support.models:nothing", ["has no attribute 'nothing'"]),
        ("--hosts 1", ["needs at least 2"]),
        ("--rate fast", ["'fast' is not a rate"]),
        ("--compute_ms 0", ["compute_ms must be positive"]),
        ("--rounds -1", ["rounds must not be negative"]),
        ("--device tpu", ["device must be 'cpu' or 'cuda'"]),
        *[("--device cuda", ["torch finds no GPU here"])] * (not torch.cuda.is_available()),
    ],
    "bench step": [
        ("--model emulated-bert", ["model='emulated-bert' is not known", "Did you mean 'emulated-bert-base'?"]),
        ("--model cnn --ratio 1", ["ratio=[1.0]", "cnn"]),
        ("--ratio 0", ["ratio must be positive"]),
        ("--methods dear", ["ddp has to be among them"]),
        ("--methods ddp magic", ["'magic'", "dear, ea_pipe, local_sgd", "pipesync --import MODULE"]),
        ("--methods ddp dear:edges=1", ["'edges=1'", "edge_mb"]),
        ("--methods ddp dear:overlap=best", ["overlap", "'best'"]),
        ("--hosts 2 1", ["hosts=[2, 1]"]),
        ("--racks 2", ["racks=2", "rate"]),
    ],
    "bench collectives": [
        ("--codecs zip", ["zip"]),
        ("--sizes_mib 0", ["sizes_mib"]),
        ("--rounds 0", ["rounds"]),
    ],
    "converge": [
        ("--task nope", ["task='nope'", "digits, topics"]),
        ("--methods selsync:detla=1", ["detla=1", "delta"]),
        ("--methods selsync:delta=x", ["delta", "'x'"]),
        ("--methods ddp ddp", ["different"]),
        ("--labels_per_worker 11", ["labels_per_worker=11", "from 1 to 10"]),
        ("--slow 1:50%", ["slow", "1:50%", "compute"]),
        ("--compute fast", ["compute", "'fast' is not a duration"]),
        ("--compute 1s --slow 2:50%", ["slow: there is no host 2"]),
        ("--compute 1s --stalls 5%", ["stalls='5%'", "SHARE%:FACTOR"]),
    ],
}
ROWS = [(name, *row) for name, rows in REFUSED.items() for row in rows]


@pytest.mark.parametrize(("name", "options", "words"), ROWS)
def test_bad_input_is_named(name: str, options: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(name, options) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert all(word in message for word in words), message
