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
from typing import Annotated, Any

import msgspec

from stoker.apps.common.data_rows import DataRows, Text, check_rows, is_empty, read_toml, refuse_duplicates

EXAMPLE = Path(__file__).parent / "data" / "sweep.toml"
_MOST = 1 << 40
"""Maximum value of a parameter, so that calculations do not overflow."""
_LEAST_ABOVE_0 = 1e-6
"""Minimum temperature above 0. A division by a smaller temperature overflows a float."""
_PLACES = re.compile(r"\{([^{}]+)\}")


class SweepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a sweep. An empty string selects the default. `limit`: 0 for all rows."""

    sweep: str = ""
    data: str = ""
    limit: int = 0
    batch_size: int = 4
    tensor_batch: int = 0
    format: str = "parquet"
    site: str = ""


class SweepModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of a sweep. `engine`, `devices`: as in `stoker.causal_lm`."""

    name: Text
    path: str = ""
    dtype: Text = "auto"
    engine: Text = "auto"
    devices: Annotated[int, msgspec.Meta(ge=1)] = 1


class SweepPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt text with column names in braces. `chat`: True for a message in the model's chat format."""

    name: Text
    text: Text
    chat: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_PLACES.findall(self.text)))

    def fill(self, fields: Mapping[str, Any]) -> str:
        """Return the prompt for a row. An empty cell becomes an empty text; braces in a value are kept."""
        return _PLACES.sub(lambda place: "" if is_empty(value := fields[place[1]]) else str(value), self.text)


_Tokens = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
_Temperature = Annotated[float, msgspec.Meta(ge=0, le=_MOST)]


class ParameterValues(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The values of each parameter. A sweep runs every combination of the values."""

    max_new_tokens: tuple[_Tokens, ...] | _Tokens = 32
    temperature: tuple[_Temperature, ...] | _Temperature = 0.0

    def __post_init__(self) -> None:
        for name, values in zip(PARAMETERS, self.value_lists, strict=True):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} has {'the same value twice' if values else 'no value'}")
        if any(0 < value < _LEAST_ABOVE_0 for value in self.value_lists[1]):
            raise ValueError(f"temperature must be 0, or {_LEAST_ABOVE_0:g} or more")

    @property
    def value_lists(self) -> list[tuple[float, ...]]:
        given = (self.max_new_tokens, self.temperature)
        return [values if isinstance(values, tuple) else (values,) for values in given]


PARAMETERS = ParameterValues.__struct_fields__


class _SweepFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data: Text
    models: Annotated[list[SweepModel], msgspec.Meta(min_length=1)]
    prompts: Annotated[list[SweepPrompt], msgspec.Meta(min_length=1)]
    id: str = ""
    parameters: ParameterValues = ParameterValues()


class Combination(msgspec.Struct, frozen=True):
    model: SweepModel
    prompt: SweepPrompt
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


class Sweep(msgspec.Struct, frozen=True):
    models: list[SweepModel]
    prompts: list[SweepPrompt]
    combinations: list[Combination]
    rows: DataRows


def read_sweep(path: Path, *, data: Path | None = None, limit: int = 0) -> Sweep:
    """Read a sweep file. `data`: a data file that replaces the sweep's; `limit`: read only the first `limit` rows (0:
    all).
    """
    found = read_toml(path, _SweepFile)
    models = [_resolve_model_path(model, folder=path.parent) for model in found.models]
    refuse_duplicates("models", [(one.name, (os.path.realpath(one.path), one.dtype)) for one in models], file=path)
    refuse_duplicates("prompts", [(one.name, (one.text, one.chat)) for one in found.prompts], file=path)
    rows = check_rows(
        data or path.parent / found.data, column=found.id, limit=limit, empty_means="the prompt has no text there",
        wanted={f"the prompt {prompt.name}": prompt.columns for prompt in found.prompts},
    )  # fmt: skip
    grid = [dict(zip(PARAMETERS, values, strict=True)) for values in itertools.product(*found.parameters.value_lists)]
    combined = [Combination(*each) for each in itertools.product(models, found.prompts, grid)]
    return Sweep(models, found.prompts, combined, rows)


def _resolve_model_path(model: SweepModel, *, folder: Path) -> SweepModel:
    """Resolve the path of a model relative to the sweep file. A missing path may be a hub name."""
    there = folder / model.path
    return msgspec.structs.replace(model, path=str(there.absolute())) if model.path and there.exists() else model
