"""Start the longest test files first, so that all workers end together. The time of a file comes from the last local
runs in pytest's cache (separate for `--long` and `--all`), else from `tests/file_seconds.json`, which `make test
ARGS=--write-seconds` writes. xdist keeps this order and runs a file on one worker.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

SHIPPED = Path(__file__).with_name("file_seconds.json")
SHORTEST_S = 5.0
"""Minimum seconds of a file in the shipped file. Files with shorter times keep the order of pytest-randomly."""
_KEY = "stoker/seconds"


class LongestFirst:
    """A pytest plugin. The xdist controller sends its times to workers, so that all workers sort alike."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._measured = Counter[str]()
        self._key = _KEY + "".join(f"-{part}" for part in ("long", "all") if config.getoption(part))
        told = getattr(config, "workerinput", {}).get("file_seconds")
        self.seconds: Mapping[str, float] = told if told is not None else self._known()

    def _known(self) -> dict[str, float]:
        shipped: dict[str, float] = json.loads(SHIPPED.read_text())
        cache = getattr(self._config, "cache", None)
        return {**shipped, **(cache.get(self._key, {}) if cache is not None else {})}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: object) -> None:
        node.workerinput["file_seconds"] = dict(self.seconds)  # type: ignore[attr-defined]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort files after the shuffle of pytest-randomly. Files below `SHORTEST_S` seconds keep the shuffled order."""
        items.sort(key=lambda item: -self._long(self.seconds.get(name_of(item.nodeid), 0.0)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._measured[name_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Record the times of completely run files."""
        over = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if not over or hasattr(self._config, "workerinput") or self._config.getoption("collectonly"):
            return
        names = ("keyword", "markexpr", "lf", "stepwise", "maxfail")
        # without pytest's cache the option "lf" does not exist
        chosen = any(self._config.getoption(name, None) for name in names)
        whole = {name for name in self._measured if not any(f"{name}::" in arg for arg in self._config.args)}
        if chosen or session.shouldstop or session.shouldfail:
            return
        measured = {name: round(self._measured[name], 1) for name in sorted(whole)}
        cache = getattr(self._config, "cache", None)
        if cache is not None:
            cache.set(self._key, {**cache.get(self._key, {}), **measured})
        if self._config.getoption("write_seconds"):
            kept = {**json.loads(SHIPPED.read_text()), **measured}
            there = {name: s for name, s in sorted(kept.items()) if self._long(s) and (SHIPPED.parent / name).exists()}
            SHIPPED.write_text(json.dumps(there, indent=1) + "\n")

    @staticmethod
    def _long(seconds: float) -> float:
        return seconds if seconds >= SHORTEST_S else 0.0


def name_of(nodeid: str) -> str:
    """Return a test's file, relative to `tests`."""
    return nodeid.partition("::")[0].removeprefix("tests/")
