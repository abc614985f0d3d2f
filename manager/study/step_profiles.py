"""Step times of engines in a scenario: a table of its own, or the file that `stoker profile --json` has written.

[world.contexts.llm.engine.a10]
times = "smollm2-a10.json"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stoker.contexts.step_times import StepTimes
from stoker.decoding import why_not_json
from stoker.errors import ConfigError


def read_into(data: dict[str, Any], folder: Path) -> None:
    """Put what the files hold in the place of their names. They count from `folder`. Raises ConfigError with facts
    `file` and `key`."""
    for engine in _engines(data):
        if isinstance(engine.get("times"), str):
            engine["times"] = msgspec.to_builtins(read_profile(folder / Path(engine["times"]).expanduser()))


def read_profile(path: Path) -> StepTimes:
    """The step times of a file, which holds a whole profile or `times` alone. Raises ConfigError."""
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(data)
        times = msgspec.convert(found.get("times", found) if isinstance(found, dict) else found, StepTimes)
    except OSError as error:
        raise ConfigError(f"times: {path}: cannot be read: {error.strerror}", file=str(path), key="times") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = f"times: {path}: is no profile that stoker profile --json has written: {why_not_json(data, error)}"
        raise ConfigError(problem, file=str(path), key="times") from None
    if not times.prefill or not times.decode or not times.is_sound():
        problem = f"times: {path}: has no sound step times: prefill and decode, each [tokens, length, seconds, count]"
        raise ConfigError(problem, file=str(path), key="times")
    return times


def _engines(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The engines of all contexts, as far as the scenario has the shape of one."""
    found: Any = [data]
    for key in ("world", "contexts", "*", "engine", "*"):
        inner = [each.values() if key == "*" else [each.get(key)] for each in found]
        found = [one for each in inner for one in each if isinstance(one, dict)]
    return list(found)
