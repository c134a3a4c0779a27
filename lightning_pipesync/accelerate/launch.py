"""``pipesync launch``: Accelerate's launcher, with method and settings in the same YAML file as its options."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.utils import patch_environment
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lightning_pipesync.accelerate.plugin import (
    CONFIG_VARIABLE,
    NUM_PROCESSES_VARIABLE,
    SECTION,
    plugin_from,
    settings_in,
)
from lightning_pipesync.core.yaml_files import YamlFile

#: Keys of earlier versions, which Accelerate still reads.
_EARLIER = ("dynamo_backend", "fp16")

#: Signals that stop the launcher and its workers, unless they are ignored, as SIGHUP is under ``nohup``.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch_with_accelerate(arguments: Sequence[str]) -> int:
    """Runs ``accelerate launch ARGUMENTS`` with a configuration file that has a section ``pipesync``.

    Returns the exit status; a wrong file or section raises a ValueError before any process is started.
    """
    parsed = launch_command_parser().parse_args(list(arguments))
    if parsed.config_file is None:
        raise ValueError(
            "launch needs --replicas N, to start N replicas of a script; or --config_file FILE, a YAML file written by "
            f"'accelerate config', with a section '{SECTION}:'."
        )
    parsed.signals_to_handle = ",".join(number.name for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN)
    _check(file := YamlFile(parsed.config_file))
    content = file.content
    num_processes = content.get("num_processes") if parsed.num_processes is None else parsed.num_processes
    with tempfile.TemporaryDirectory(prefix="pipesync-") as folder:
        settings, rest = Path(folder, "pipesync.yaml"), Path(folder, "accelerate.yaml")
        settings.write_text(yaml.safe_dump(content.pop(SECTION)))
        rest.write_text(yaml.safe_dump(content))
        try:
            load_config_from_file(str(rest))
        except ValueError as error:
            raise ValueError(f"{file.path}: {error}") from None
        parsed.config_file = str(rest)
        environment = {CONFIG_VARIABLE: str(settings)}
        if parsed.cpu or content.get("use_cpu"):  # which Accelerate does not tell several processes
            environment["ACCELERATE_USE_CPU"] = "true"
        if num_processes is not None:
            environment[NUM_PROCESSES_VARIABLE] = str(num_processes)
        with patch_environment(**environment):
            try:
                launch_command(parsed)
            except ChildFailedError as error:
                print(error, file=sys.stderr)
                return 1
            except SignalException as error:  # for example Ctrl-C; the workers are stopped already
                return 128 + error.sigval
    return 0


def _check(file: YamlFile) -> None:
    """Raises a ValueError if a key of a configuration file, a method or a setting is wrong."""
    if SECTION not in file.content:
        raise ValueError(
            f"{file.path} has no section '{SECTION}:' with a method and its settings. Without one, use "
            "'accelerate launch'."
        )
    known = [SECTION, *(field.name for field in fields(ClusterConfig)), *_EARLIER]
    file.check_names(known, "a key of Accelerate's configuration")
    plugin_from(*settings_in(file))
