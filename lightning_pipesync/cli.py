"""The command ``pipesync``."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_pipesync.bench.commands import collectives, converge, pipeline, stages, step, timeline
from lightning_pipesync.netlab.command import netlab
from lightning_pipesync.plan.command import accuracy, plan


def launch(arguments: Sequence[str]) -> int:
    """Runs ``accelerate launch``, with a method and its settings from the section ``pipesync`` of the same file.

    ``pipesync launch --config_file FILE SCRIPT ...``; all options are those of ``accelerate launch``.

    Args:
        arguments: options, the script, and the script's own.
    """
    from lightning_pipesync.accelerate.launch import launch_with_accelerate

    return launch_with_accelerate(arguments)


#: A function a subcommand, or a dictionary of further ones with ``_help``. Options and help come from the function's
#: signature and docstring; it returns the exit status, or None for 0. What is slow to import, it imports itself.
SUBCOMMANDS: dict[str, Callable[..., int | None] | dict[str, Any]] = {
    "launch": launch,
    "plan": plan,
    "netlab": netlab,
    "bench": {
        "_help": "Measures communication and training steps, beside what a user would pick instead, and the limits.",
        "collectives": collectives,
        "step": step,
        "stages": stages,
        "timeline": timeline,
        "converge": converge,
        "pipeline": pipeline,
        "plan": accuracy,
    },
}


#: Options of ``pipesync bench`` that take several values.
LIST_OPTIONS = (
    "hosts",
    "sizes_mib",
    "codecs",
    "ratio",
    "bucket_mb",
    "methods",
    "seeds",
    "stage_ms",
    "learning_rates",
    "batch_sizes",
    "rates",
    "models",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``pipesync ARGUMENTS`` and returns the exit status; 2 for what the user got wrong."""
    try:
        from jsonargparse import auto_cli
    except ImportError:
        return _fail("jsonargparse is missing: pip install 'lightning-pipesync[bench]'.")
    words = _for_parser(list(sys.argv[1:] if arguments is None else arguments))
    try:
        return auto_cli(SUBCOMMANDS, args=words, as_positional=False, prog="pipesync", allow_abbrev=False) or 0
    except (ValueError, RuntimeError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output is gone. Python would complain again when it flushes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _for_parser(words: list[str]) -> list[str]:
    """Writes the command after ``--``, and options that may be given again, as the parser takes them."""
    if words[:1] == ["launch"] and words[1:] not in (["-h"], ["--help"]):
        return ["launch", "--arguments", json.dumps(words[1:])]  # another program's, whatever they look like
    options, command = words, None
    if "--" in words:
        cut = words.index("--")
        options, command = words[:cut], words[cut + 1 :]
    if options[:1] == ["plan"]:
        options = [re.sub(r"^--from(?=$|=)", "--from_file", option) for option in options]
    if options[:1] == ["bench"]:
        options = list(_with_lists(options))
    options = [re.sub(r"^--(slow|kill|freeze)(?=$|=)", r"--\1+", option) for option in options]
    return options if command is None else [*options, "--command", json.dumps(command)]


def _with_lists(options: list[str]) -> Iterator[str]:
    """Writes ``--hosts 2 4`` as ``--hosts [2,4]``."""
    for name, values in _by_option(options):
        if name.removeprefix("--") in LIST_OPTIONS and values and not values[0].startswith("["):
            quoted = (json.dumps(value) if re.search("[,:]", value) else value for value in values)
            values = [f"[{','.join(quoted)}]"]
        yield from [name, *values]


def _by_option(options: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each word that is not a value, and the values behind it."""
    starts = [i for i, word in enumerate(options) if i == 0 or word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(options)], strict=True):
        yield options[start], options[start + 1 : end]


def _fail(message: str) -> int:
    print(f"pipesync: error: {message}", file=sys.stderr)
    return 2
