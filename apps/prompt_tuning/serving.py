"""The models file entry for a tuned prompt: `stoker tune submit --serve NAME`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
from pathlib import Path

import msgspec

from stoker.apps.common.models_file import ModelKind, parse_models
from stoker.apps.prompt_tuning.board import SubmissionOptions
from stoker.apps.prompt_tuning.submit import CheckedJob
from stoker.contexts import default_model, shown_name
from stoker.errors import ConfigError


class ServedPrompt(msgspec.Struct, frozen=True):
    """A tuned prompt and its base in a models file, and the command that serves the file."""

    name: str
    base: str
    models: str
    command: str


def check_prompt_can_be_served(options: SubmissionOptions, ready: CheckedJob) -> None:
    """Raise ConfigError if the prompt of a job cannot be added to the models file."""
    folder = options.models.parent
    if not folder.is_dir():
        raise ConfigError.in_file(folder, f"no such folder, so --models {options.models} cannot be written")
    _find_or_add_base_model(_read_or_empty(options.models), options, ready)


def add_prompt_to_models_file(options: SubmissionOptions, ready: CheckedJob, *, adapter: Path) -> ServedPrompt:
    """Add the prompt of a job, and its base if missing, to the models file. `adapter`: the folder of the prompt."""
    file = options.models
    try:
        with file.open("a+", encoding="utf-8") as opened:
            with contextlib.suppress(OSError):  # the file system does not support locks
                fcntl.flock(opened, fcntl.LOCK_EX)
            before = _read_or_empty(file)
            base, text = _find_or_add_base_model(before, options, ready)
            folder, there = file.absolute().parent, adapter.absolute()
            entry = {"base": base, "adapter": str(there.relative_to(folder) if there.is_relative_to(folder) else there)}
            text += _format_models_table(options.serve, entry, after=text)
            parse_models(text, file=str(file), folder=folder)
            opened.write(text.removeprefix(before))
    except OSError as error:
        raise ConfigError.in_file(file, f"cannot be written: {error.strerror}") from None
    where = ["--session", options.session] if options.session else [options.site] if options.site else []
    return ServedPrompt(options.serve, base, str(file), shlex.join(["stoker", "serve", *where, str(file)]))


def _find_or_add_base_model(text: str, options: SubmissionOptions, ready: CheckedJob) -> tuple[str, str]:
    """Return the base model's name in a models file, and the file's text, with the base added if missing."""
    file, name = options.models, options.serve
    folder = file.absolute().parent
    models = parse_models(text, file=str(file), folder=folder) if text.strip() else {}
    if name in models:
        what = f"[models.{name}] exists; give --serve another name, or remove the entry"
        raise ConfigError.in_file(file, what, key=name)
    model = ready.job.model or default_model()
    for each, settings in models.items():
        writes = settings.kind is ModelKind.CHAT and settings.engine != "static"
        if writes and not settings.base and os.path.realpath(settings.path) == os.path.realpath(model):
            return each, text
    base = shown_name(model)
    while base in models or base == name:
        base += "-base"
    return base, text + _format_models_table(
        base, {"path": os.path.abspath(model) if Path(model).exists() else model}, after=text
    )


def _format_models_table(name: str, settings: dict[str, str], *, after: str) -> str:
    """Return a TOML table that the caller appends to a models file. `after`: the text of the file."""
    key = name if re.fullmatch(r"[\w-]+", name, re.ASCII) else _quote_toml_text(name)
    lines = [f"[models.{key}]", *(f"{each} = {_quote_toml_text(value)}" for each, value in settings.items())]
    gap = "" if not after else "\n" if after.endswith("\n") else "\n\n"
    return gap + "\n".join(lines) + "\n"


def _quote_toml_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # the escapes of JSON are valid in TOML


def _read_or_empty(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.in_file(file, f"cannot be read: {error}") from None
