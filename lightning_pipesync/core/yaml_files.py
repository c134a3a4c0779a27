"""YAML files that users write: an error names the file, and the line if it is known."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from lightning_pipesync.core.names import did_you_mean


class YamlFile:
    """A YAML file of names and values.

    Attributes:
        path: of the file, as it was given.
        content: the values, and mappings of further ones, by name.

    Raises:
        ValueError: the file cannot be read, is no YAML, or holds anything else.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        try:
            text = Path(path).read_text()
            self._node = yaml.compose(text, yaml.SafeLoader)
            self.content: dict[str, Any] = yaml.safe_load(text)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
        except yaml.MarkedYAMLError as error:
            why = ", ".join(filter(None, (error.context, error.problem)))
            raise ValueError(f"{path} is no YAML file: {_line(error.problem_mark)}: {why}.") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no YAML file: {getattr(error, 'reason', error)}.") from None
        if not isinstance(self.content, dict):
            raise ValueError(f"{path} must hold names and values, as in 'name: value'; it holds {self.content!r}.")

    def at(self, *names: str) -> str:
        """Returns where a name is, such as ``method.yaml, line 3``; the names of mappings around it come first."""
        where, node = str(self.path), self._node
        for name in names:
            pairs = node.value if isinstance(node, yaml.MappingNode) else ()
            for key, value in pairs:
                if key.value == name:
                    where, node = f"{self.path}, {_line(key.start_mark)}", value
        return where

    def check_names(self, known: Collection[str], what: str) -> None:
        """Raises a ValueError with the closest one that is known if a name is not; ``what`` says what they are."""
        for name in self.content:
            if name not in known:
                raise ValueError(f"{self.at(str(name))}: {name!r} is not {what}.{did_you_mean(name, known)}")


def _line(mark: Any) -> str:
    return f"line {mark.line + 1}"
