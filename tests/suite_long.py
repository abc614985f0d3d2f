"""Choose tests by length: pytest runs the short tests, `--long` the long tests, `--all` both.

A test is marked `long` if it takes more than 15 s, or if a short test shows the same behaviour. A test that the command
line names (`FILE::TEST`) always runs.

Hypothesis tries `SHORT_EXAMPLES` examples in a short run. Properties with more examples run again with `--long`.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest

SHORT_EXAMPLES = 25
"""Maximum examples of each property in a short run. The first failing example is usually among the first ten."""


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("length of tests")
    group.addoption("--long", action="store_true", help="run the tests marked long, and every example of properties")
    group.addoption("--all", action="store_true", help="run short and long tests, and every example of properties")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("all"):
        return
    wanted = _is_long_run if config.getoption("long") else _is_short_run
    named = [argument for argument in config.args if "::" in argument]
    kept = [item for item in items if wanted(item) or any(_names(argument, item) for argument in named)]
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept


def _names(argument: str, item: pytest.Item) -> bool:
    file, _, test = argument.partition("::")
    name = item.nodeid.partition("::")[2]
    return item.path.as_posix().endswith(file) and (name == test or name.startswith((f"{test}[", f"{test}::")))


def _is_short_run(item: pytest.Item) -> bool:
    if item.get_closest_marker("long"):
        return False
    _limit_examples(item)
    return True


def _is_long_run(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None or _examples(item) > SHORT_EXAMPLES


def _owner(item: pytest.Item) -> tuple[Any, str] | None:
    """Return the object and attribute with a property's settings; None for other tests."""
    function = getattr(item, "function", None)
    machine = getattr(item, "cls", None)
    if machine is not None and isinstance(getattr(machine, "settings", None), hypothesis.settings):
        return machine, "settings"
    if getattr(function, "is_hypothesis_test", False):
        return function, "_hypothesis_internal_use_settings"
    return None


def _examples(item: pytest.Item) -> int:
    owner = _owner(item)
    return 0 if owner is None else _settings(owner).max_examples


def _settings(owner: tuple[Any, str]) -> hypothesis.settings:
    found: hypothesis.settings | None = getattr(*owner, None)
    return found or hypothesis.settings.default


def _limit_examples(item: pytest.Item) -> None:
    owner = _owner(item)
    if owner is not None and (settings := _settings(owner)).max_examples > SHORT_EXAMPLES:
        setattr(*owner, hypothesis.settings(settings, max_examples=SHORT_EXAMPLES))
