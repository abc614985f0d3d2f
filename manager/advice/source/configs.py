"""Config files that the source opens: JSON, TOML, and YAML where PyYAML is installed."""

from __future__ import annotations

import importlib
import json
import tomllib
from pathlib import Path
from typing import Any

from stoker.manager.advice.source.reading import NotReadError, OwnFolders
from stoker.manager.advice.source.values import FieldBag, Known

MOST_VALUES = 5_000
"""A config of more values is not taken: aliases of YAML can make a short file stand for billions."""
DEEPEST = 20

READERS = {
    "json.load": "json",
    "json.loads": "json",
    "tomllib.load": "toml",
    "tomllib.loads": "toml",
    "tomli.load": "toml",
    "tomli.loads": "toml",
    "toml.load": "toml",
    "yaml.safe_load": "yaml",
    "yaml.load": "yaml",
    "yaml.full_load": "yaml",
    "omegaconf.OmegaConf.load": "yaml",
}
"""Calls that read a config, and its format."""


def read_config(name: str, form: str, folders: OwnFolders, *, beside: Path | None) -> Known:
    """The values of a config file that the source names. Raises NotReadError."""
    path = folders.find(name, beside=beside)
    if path is None:
        raise NotReadError(f"{name}: not read: the folders given have no such file")
    text, shown = folders.read(path), folders.name_of(path)
    try:
        data = _parsed(text, form)
        return _Lines(text, shown).value(data, (), depth=0)
    except (ValueError, RecursionError, MemoryError, TypeError) as error:
        raise NotReadError(f"{shown}: not taken: {str(error).splitlines()[0][:120] if str(error) else form}") from None


def _parsed(text: str, form: str) -> Any:
    if form == "json":
        return json.loads(text)
    if form == "toml":
        return tomllib.loads(text)
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ValueError("PyYAML is not installed") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from None


class _Lines:
    """Turns a config's data into values with their lines: that of the first line with the key, after its table's."""

    def __init__(self, text: str, shown: str) -> None:
        self._lines = text.splitlines()
        self._shown = shown
        self._left = MOST_VALUES

    def value(self, data: Any, keys: tuple[str, ...], *, depth: int, start: int = 0) -> Known:
        self._left -= 1
        if self._left < 0 or depth > DEEPEST:
            raise ValueError(f"it has more than {MOST_VALUES} values or is deeper than {DEEPEST}")
        where = f"{self._shown}:{start + 1}"
        if isinstance(data, dict):
            fields = {}
            for key, each in data.items():
                line = self._line_of(str(key), start)
                fields[str(key)] = self.value(each, (*keys, str(key)), depth=depth + 1, start=line)
            return Known(FieldBag(fields), where)
        if isinstance(data, list):
            return Known([self.value(each, keys, depth=depth + 1, start=start) for each in data], where)
        constant = data if data is None or isinstance(data, str | int | float | bool) else str(data)
        return Known(constant, where)

    def _line_of(self, key: str, start: int) -> int:
        for number in range(start, min(len(self._lines), start + 2_000)):
            if key in self._lines[number]:
                return number
        return start
