"""The options of a sweep, its checked file, and its combinations.

    data = "questions.jsonl"            rows: .jsonl, .csv, .parquet, .arrow, or a saved data set; from this folder
    id = "id"                           the column that names a row; default: its number
    [[models]]
    name = "small"
    path = "models/small"               a folder, a GGUF file or a hub name; empty: SmolLM2-135M-Instruct
    dtype = "auto"
    engine = "auto"                     and devices = 2: as in causal_lm
    [[prompts]]
    name = "plain"
    text = "Q: {question}\\nA:"          {column} is that column of the row
    chat = false                        true: a message in the model's chat format
    [parameters]                        the sweep runs every combination of these values
    max_new_tokens = [16, 64]
    temperature = [0.0, 0.7]

A combination is one model, one prompt and one value of each parameter. The digest of the combination and the id of the
row identify a result.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.common.data_rows import DataRows, check_rows, is_empty, read_toml
from stoker.errors import ConfigError
from stoker.toml_files import refuse_unknown

EXAMPLE = Path(__file__).parent / "data" / "sweep.toml"
PARAMETERS: dict[str, tuple[type, float, Any]] = {"max_new_tokens": (int, 1, 32), "temperature": (float, 0.0, 0.0)}
"""The generation parameters of a sweep, by name: type, minimum, and default value."""
_MOST = 1 << 40
"""Maximum value of a parameter. No model generates more tokens, and calculations do not overflow."""
_LEAST_ABOVE_0 = 1e-6
"""Minimum temperature above 0. A division by a smaller temperature overflows a float."""
_PLACES = re.compile(r"\{([^{}]+)\}")


class SweepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one sweep. An empty string selects the default. `limit`: number of rows to use (0: all rows);
    `tensor_batch`: maximum number of rows of a call that are generated in one batch (0: the engine decides).
    """

    sweep: str = ""
    data: str = ""
    limit: int = 0
    batch_size: int = 4
    tensor_batch: int = 0
    format: str = "parquet"
    site: str = ""


class SweepModel(msgspec.Struct, frozen=True):
    """One model of the sweep. `engine`, `devices`: as in `stoker.causal_lm`."""

    name: str
    path: str = ""
    dtype: str = "auto"
    engine: str = "auto"
    devices: int = 1


class Template(msgspec.Struct, frozen=True):
    """One prompt of the sweep: a text with columns in braces. `chat`: True for a message in the model's chat format."""

    name: str
    text: str
    chat: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_PLACES.findall(self.text)))

    def fill(self, fields: Mapping[str, Any]) -> str:
        """Return the text for one row. An empty cell becomes an empty text; braces in a value are kept."""
        return _PLACES.sub(lambda place: "" if is_empty(value := fields[place[1]]) else str(value), self.text)


class Sweep(msgspec.Struct, frozen=True):
    file: str
    models: tuple[SweepModel, ...]
    prompts: tuple[Template, ...]
    parameters: tuple[dict[str, Any], ...]
    rows: DataRows


class Combination(msgspec.Struct, frozen=True):
    model: SweepModel
    prompt: Template
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        """Readable name, such as `small, plain, max_new_tokens 16, temperature 0.0`."""
        return ", ".join([self.model.name, self.prompt.name, *(f"{key} {one}" for key, one in self.parameters.items())])

    @property
    def digest(self) -> str:
        """Digest of the model, the prompt and the parameters: 12 hex digits."""
        what = (self.model.path, self.model.dtype, self.prompt.text, self.prompt.chat, sorted(self.parameters.items()))
        return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:12]


def combinations(sweep: Sweep) -> list[Combination]:
    return [
        Combination(model=model, prompt=prompt, parameters=parameters)
        for model, prompt, parameters in itertools.product(sweep.models, sweep.prompts, sweep.parameters)
    ]


def read_sweep(path: Path, *, data: Path | None = None, limit: int = 0) -> Sweep:
    """Read a sweep file, with the rows of `data` if given, and only the first `limit` rows (0: all). Raises
    ConfigError.
    """
    whole = read_toml(path, keys=["data", "id", "models", "prompts", "parameters"])
    models = [
        SweepModel(**{**table, "path": _model_path(table.get("path", ""), folder=path.parent)})
        for table in _tables(whole, "models", SweepModel, file=path)
    ]
    prompts = [Template(**table) for table in _tables(whole, "prompts", Template, file=path)]
    _refuse_duplicates({model.name: (_real_path(model.path), model.dtype) for model in models}, "models", file=path)
    _refuse_duplicates({prompt.name: (prompt.text, prompt.chat) for prompt in prompts}, "prompts", file=path)
    parameters = _grid(whole.get("parameters", {}), file=path)
    source = data or path.parent / _text(whole, "data", file=path, where="top", empty=False)
    column = _text(whole, "id", file=path, where="top", empty=True)
    wanted = {f"the prompt {prompt.name}": prompt.columns for prompt in prompts}
    rows = check_rows(source, column=column, wanted=wanted, limit=limit, empty_means="the prompt has no text there")
    return Sweep(file=str(path), models=tuple(models), prompts=tuple(prompts), parameters=tuple(parameters), rows=rows)


def _tables(whole: Mapping[str, Any], name: str, kind: type[msgspec.Struct], *, file: Path) -> list[dict[str, Any]]:
    tables = whole.get(name, [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{file}: {name} is missing; write at least one [[{name}]]", file=str(file), key=name)
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    seen = set()
    for number, table in enumerate(tables, start=1):
        where = f"{name} {number}"
        refuse_unknown(table, kind.__struct_fields__, file=file, where=where)
        for field in kind.__struct_fields__:
            if field == "chat":
                if not isinstance(table.get("chat", False), bool):
                    raise ConfigError(f"{file}: {where}: chat must be true or false", file=str(file), key="chat")
            elif field == "devices":
                if type(found := table.get(field, 1)) is not int or found < 1:
                    wrong = f"devices = {found!r}: write a whole number, 1 or more"
                    raise ConfigError(f"{file}: {where}: {wrong}", file=str(file), key=field)
            elif field in required or field in table:
                _text(table, field, file=file, where=where, empty=field not in required)
        if table["name"] in seen:
            raise ConfigError(f"{file}: {where}: {table['name']} is used twice", file=str(file), key="name")
        seen.add(table["name"])
    return tables


def _refuse_duplicates(asked: Mapping[str, object], table: str, *, file: Path) -> None:
    """Raise ConfigError if two entries differ only in their names, because every call would run twice."""
    first: dict[object, str] = {}
    for number, (name, what) in enumerate(asked.items(), start=1):
        if what in first:
            raise ConfigError(
                f"{file}: {table} {number}: {name} and {first[what]} are the same; leave one of them out",
                file=str(file), key=table,
            )  # fmt: skip
        first[what] = name


def _text(table: Mapping[str, Any], key: str, *, file: Path, where: str, empty: bool) -> str:
    value = table.get(key, "")
    if not isinstance(value, str) or not (value.strip() or empty):
        problem = "is missing" if key not in table else f"must be text, and is {value!r:.40}"
        raise ConfigError(f"{file}: {where}: {key} {problem}", file=str(file), key=key)
    return value


def _model_path(path: str, *, folder: Path) -> str:
    """Resolve a path relative to the sweep file. A missing path may be a hub name."""
    return str((folder / path).absolute()) if path and (folder / path).exists() else path


def _real_path(path: str) -> str:
    return os.path.realpath(path) if path and os.path.exists(path) else path


def _grid(table: Any, *, file: Path) -> list[dict[str, Any]]:
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: parameters must be a table, [parameters]", file=str(file), key="parameters")
    refuse_unknown(table, PARAMETERS, file=file, where="parameters")
    axes: list[list[Any]] = []
    for name, (kind, least, default) in PARAMETERS.items():
        given = table.get(name, default)
        values = given if isinstance(given, list) else [given]
        for value in values:
            number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
            if not number or not least <= value <= _MOST or 0 < value < _LEAST_ABOVE_0:
                what = "a whole number" if kind is int else "a number"
                more = f" (0, or {_LEAST_ABOVE_0:g} or more)" if kind is float else ""
                raise ConfigError(
                    f"{file}: parameters: {name} is {value!r:.40}; it must be {what}, {least} or more{more}",
                    file=str(file), key=name,
                )  # fmt: skip
        if not values or len(set(values)) < len(values):
            problem = "the same value twice" if values else "no value"
            raise ConfigError(f"{file}: parameters: {name} has {problem}", file=str(file), key=name)
        axes.append([kind(value) for value in values])
    return [dict(zip(PARAMETERS, values, strict=True)) for values in itertools.product(*axes)]
