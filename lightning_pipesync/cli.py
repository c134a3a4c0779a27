"""The command ``pipesync``."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise, takewhile
from pkgutil import resolve_name
from typing import Any

from lightning_pipesync import __version__
from lightning_pipesync.core.extras import check_extra
from lightning_pipesync.core.names import did_you_mean_module
from lightning_pipesync.lab.netlab.command import Netlab
from lightning_pipesync.lab.plan.command import Plan
from lightning_pipesync.launch.command import Launch, split_command, starts_replicas
from lightning_pipesync.launch.lighthouse import Lighthouse
from lightning_pipesync.training.registry import METHODS

#: A function a subcommand, which returns the exit status, or None for 0; or a dataclass with a method ``run``; or a
#: dictionary of further ones with ``_help``. Options and help come from the signature and the docstring. Those by name
#: are slow to import.
SUBCOMMANDS: dict[str, Callable[..., Any] | dict[str, Any]] = {
    "launch": Launch,
    "lighthouse": Lighthouse,
    "plan": Plan,
    "netlab": Netlab,
    "bench": {
        "_help": "Measures communication and training steps, beside what a user would pick instead, and the limits.",
        "collectives": "lightning_pipesync.lab.bench.collectives:Collectives",
        "step": "lightning_pipesync.lab.bench.step:Step",
    },
}

#: The extra that each subcommand needs.
EXTRAS = {"launch": "torchft", "lighthouse": "torchft"}
EXTRAS |= {"plan": "plan", "netlab": "netlab", "bench": "bench"}

#: Models that ``transformers`` builds.
MODELS_OF_TRANSFORMERS = ("resnet50", "bert-base")

#: The end of the help, about the option that comes before a subcommand.
EPILOG = (
    "pipesync --import MODULE SUBCOMMAND ... imports a module of yours first, from this folder or installed, which "
    "calls lightning_pipesync.register_method: its methods are benchmarked and planned like the others. The option may "
    "be given several times."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``pipesync ARGUMENTS`` and returns the exit status; 2 for what the user got wrong."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for the user's modules, last: a yaml.py among them is not what libraries import
    if arguments is None:
        arguments = sys.argv[1:]
        if emulates(arguments) and "RANK" not in os.environ:  # a launcher's ranks would lose their hosts' network
            from lightning_pipesync.lab.netlab.network import enter_user_namespace

            enter_user_namespace()
    return exit_status(lambda: _run(list(arguments)))


def emulates(words: Sequence[str]) -> bool:
    """Returns whether a command emulates a network. Options of the user's own script do not count."""
    _, words = split_imports(words)
    subcommand = next(iter(words), "")
    options = {word.partition("=")[0] for word in takewhile(lambda word: word != "--", words)}
    measures = subcommand in ("plan", "bench") and "--from" not in options
    return subcommand == "netlab" or (measures and "--rate" in options)


def _run(words: list[str]) -> int | None:
    words = import_modules(words)
    _check_subcommand(words)
    if words[:1] == ["launch"] and not starts_replicas(words[1:]):
        return _launch_with_accelerate(words[1:])
    _check_packages([*words[:1], *split_command(words[1:])[0]] if words[:1] == ["launch"] else words)
    components: Any = dict(SUBCOMMANDS)
    if words[:1] == ["bench"]:
        components["bench"] = _imported(components["bench"])
    else:
        components["bench"] = {"_help": components["bench"]["_help"]}
    found = parse(components, _for_parser(words, components), prog="pipesync", version=__version__, epilog=EPILOG)
    result: int | None = found.run() if hasattr(found, "run") else found
    return result


def _launch_with_accelerate(arguments: Sequence[str]) -> int:
    """Runs ``accelerate launch``: all options are its own, whatever they look like."""
    check_extra("accelerate", "pipesync launch")
    from lightning_pipesync.accelerate.launch import launch_with_accelerate

    return launch_with_accelerate(arguments)


def parse(components: Any, words: Sequence[str], **options: Any) -> Any:
    """Parses options by signatures and docstrings; returns a dataclass, or what a function has returned."""
    from jsonargparse import auto_cli

    from lightning_pipesync.cli_help import HelpFormatter, Parser

    shared: dict[str, Any] = {"parser_class": Parser, "formatter_class": HelpFormatter, "allow_abbrev": False}
    return auto_cli(components, args=list(words), as_positional=False, return_instance=True, **shared, **options)


def exit_status(run: Callable[[], int | None]) -> int:
    """Runs a command and returns its exit status; prints what the user got wrong, which is 2."""
    try:
        return run() or 0
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        print(f"pipesync: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output is gone. Python would complain again when it flushes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def import_modules(words: list[str]) -> list[str]:
    """Imports the user's modules that ``--import`` names, and returns the words after these options.

    Raises:
        ValueError: a module cannot be imported, or registers no method.
    """
    modules, rest = split_imports(words)
    for module in modules:
        _import(module)
    return rest


def split_imports(words: Sequence[str]) -> tuple[list[str | None], list[str]]:
    """Returns the modules that ``--import`` names, None without a name, and the words after these options."""
    match words:
        case ["--import"]:
            return [None], []
        case ["--import", module, *others]:
            pass
        case [option, *others] if option.startswith("--import="):
            module = option.removeprefix("--import=")
        case _:
            return [], list(words)
    modules, rest = split_imports(others)
    return [module, *modules], rest


def _import(module: str | None) -> None:
    if module is None:
        raise ValueError("--import needs the name of a module.")
    known, is_new = set(METHODS), module not in sys.modules
    try:
        import_module(module)
    except ImportError as error:
        hint = did_you_mean_module(module, error)
        raise ValueError(f"--import {module}: {type(error).__name__}: {error}.{hint}") from error
    if is_new and known == set(METHODS):
        raise ValueError(f"--import {module} registers no method: call lightning_pipesync.register_method in it.")


def _imported(components: Any) -> dict[str, Any]:
    """Returns subcommands, of which those that are given by name are imported."""
    places = {name: place for name, place in components.items() if isinstance(place, str) and name != "_help"}
    return {**components, **{name: resolve_name(place) for name, place in places.items()}}


def _check_subcommand(words: Sequence[str]) -> None:
    """Raises ValueError if a subcommand does not exist; its message names one with a similar name."""
    known: Any = SUBCOMMANDS
    for depth, word in enumerate(words):
        if not isinstance(known, dict) or word.startswith("-"):
            return
        names = [name for name in known if name != "_help"]
        if word not in names:
            close = get_close_matches(word, names, n=1)
            hint = f" Did you mean {' '.join(['pipesync', *words[:depth], *close])}?" if close else ""
            raise ValueError(f"There is no subcommand {word!r}.{hint} There are {', '.join(names)}.")
        known = known[word]


def _check_packages(words: Sequence[str]) -> None:
    """Raises ModuleNotFoundError if a command that is to run needs a package of an extra that is not installed."""
    if not words or words[0] not in EXTRAS or {"-h", "--help"} & set(words):
        return
    command = " ".join(["pipesync", *words[: 2 if words[0] == "bench" else 1]])
    check_extra(EXTRAS[words[0]], command)
    values = {value.rpartition("=")[2] for value in words}
    if words[0] in ("plan", "bench") and (models := values.intersection(MODELS_OF_TRANSFORMERS)):
        check_extra("transformers", f"{command} with {' and '.join(sorted(models))}", "transformers")


def _for_parser(words: list[str], components: Any) -> list[str]:
    """Writes the options of a subcommand, and the command after ``--``, as the parser takes them."""
    options, command = words, None
    if words[:1] == ["launch"]:
        given, command = split_command(words[1:])
        options = ["launch", *given]
    elif "--" in words:
        cut = words.index("--")
        options, command = words[:cut], words[cut + 1 :]
    if options[:1] == ["netlab"]:
        _check_dashes(options)
    if options[:1] == ["plan"]:
        options = [re.sub(r"^--from(?=$|=)", "--from_file", option) for option in options]
    component = components
    for word in takewhile(lambda word: not word.startswith("-"), options):
        component = component[word] if isinstance(component, dict) else component
    if not isinstance(component, dict):
        options = with_lists(options, component)
    return options if command is None else [*options, "--command", json.dumps(command)]


def _check_dashes(options: list[str]) -> None:
    """Raises ValueError if there is a word that is neither an option nor its value: the begin of the user's command."""
    for number, (before, word) in enumerate(pairwise(options), 1):
        if not word.startswith("-") and (not before.startswith("-") or "=" in before):
            hosts = [] if any(option.startswith("--hosts") for option in options) else ["--hosts", "4"]
            line = ["pipesync", *options[:number], *hosts, "--", *options[number:]]
            raise ValueError(f"{word!r} is no option: write -- before the command, as in {shlex.join(line)}")


def with_lists(options: list[str], component: Any) -> list[str]:
    """Writes options of a component as the parser takes them.

    ``--hosts 2 4`` of a tuple becomes ``--hosts [2,4]``. An option of a list or sequence may be given again: it gets a
    plus. A bool without a value is true.
    """
    types = {f"--{name}": str(one.annotation) for name, one in inspect.signature(component).parameters.items()}
    starts = [i for i, word in enumerate(options) if i == 0 or word.startswith("--")]
    written: list[str] = []
    for start, end in zip(starts, [*starts, len(options)][1:], strict=True):
        name, *values = options[start:end]
        option, equals, value = name.partition("=")
        annotation = types.get(option, "")
        if annotation.startswith("tuple") and values and not values[0].startswith("["):
            quoted = (json.dumps(value) if re.search("[,:]", value) else value for value in values)
            values = [f"[{','.join(quoted)}]"]
        if annotation == "bool" and not equals and not values:
            values = ["true"]
        again = annotation.startswith(("list", "Sequence"))
        written += [f"{option}+{equals}{value}" if again else name, *values]
    return written
