"""Check that src/stoker defines each class name once, function names have a meaning, and test names are short."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("manager", "pilot", "contexts", "apps", "src/stoker")

_ACTION = "a policy's action, and the message that carries it out"
_BOTH_CORES = "the same event or command of two cores that never import each other"
_OWN_BASE = "a private base class of the messages of its own file"
ALLOWED = {
    "Ack": ({"src/stoker/protocol/to_client.py", "src/stoker/protocol/to_pilot.py"}, "one message, in both directions"),
    "Evict": ({"manager/core/seams.py", "src/stoker/protocol/to_library.py"}, _ACTION),
    "Fault": (
        {"manager/core/state.py", "manager/advice/logs/failures.py"},
        "a pilot's fault at a call, and a log's verdict: public names of layers that never import each other",
    ),
    "Gang": ({"manager/core/nouns.py", "contexts/ambient.py"}, "a gang, and a rank's public view of it"),
    "Load": ({"manager/core/seams.py", "src/stoker/protocol/to_library.py"}, _ACTION),
    "Pilot": ({"manager/core/nouns.py", "src/stoker/site.py"}, "a pilot, and the site file's public [pilot] table"),
    "ReleaseBlock": ({"manager/core/seams.py", "src/stoker/protocol/to_manager.py"}, _ACTION),
    "Resize": ({"manager/core/seams.py", "src/stoker/protocol/to_library.py"}, _ACTION),
    "Session": ({"manager/executor/session.py", "src/stoker/site.py"}, "public: a session, and its [session] table"),
    "Sleep": ({"manager/core/seams.py", "src/stoker/protocol/to_library.py"}, _ACTION),
    "SetTimer": ({"manager/core/events.py", "pilot/core/commands.py"}, _BOTH_CORES),
    "Wake": ({"manager/core/seams.py", "src/stoker/protocol/to_library.py"}, _ACTION),
    "TakeBack": ({"manager/core/seams.py", "src/stoker/protocol/to_pilot.py"}, _ACTION),
    "TimerFired": ({"manager/core/events.py", "pilot/core/events.py"}, _BOTH_CORES),
    "_Event": ({"manager/core/events.py", "pilot/core/events.py"}, _OWN_BASE),
}
"""Class names that two files define intentionally, with the files and the reason."""

VAGUE = {"look", "_look", "news", "ours", "shelf"}
"""Function names without a clear effect or result."""

LONGEST = 60
"""Maximum characters of a test name after `test_`."""

_DEFINITION = re.compile(r"^ *(?:async )?(class|def) (\w+)", re.MULTILINE)


def definitions(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield kind (`class` or `def`), name and line of each class and function."""
    for found in _DEFINITION.finditer(text):
        yield found[1], found[2], text.count("\n", 0, found.end()) + 1


def product(root: Path) -> Iterator[tuple[str, str, str, int]]:
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            for definition in definitions(path.read_text()):
                yield str(path.relative_to(root)), *definition


def homonyms(root: Path) -> dict[str, set[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path, kind, name, _ in product(root):
        if kind == "class":
            found[name].append(path)
    several = {name: paths for name, paths in found.items() if len(paths) > 1}
    return {
        name: set(paths)
        for name, paths in several.items()
        if name not in ALLOWED or ALLOWED[name][0] != set(paths) or len(paths) != len(set(paths))
    }


def vague(root: Path) -> list[str]:
    return [f"{path}:{line} {name}" for path, kind, name, line in product(root) if kind == "def" and name in VAGUE]


def test_each_class_name_is_defined_once():
    assert homonyms(ROOT) == {}, "rename one of them, or say in ALLOWED why both are called so"


def long_test_names(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{line} {name}"
        for path in sorted((root / "tests").rglob("test_*.py"))
        for kind, name, line in definitions(path.read_text())
        if kind == "def" and name.startswith("test_") and len(name) > LONGEST + len("test_")
    ]


def test_allowed_duplicate_class_names_still_exist():
    defined: dict[str, set[str]] = defaultdict(set)
    for path, kind, name, _ in product(ROOT):
        if kind == "class":
            defined[name].add(path)
    assert {name: defined[name] for name in ALLOWED} == {name: files for name, (files, _) in ALLOWED.items()}


def test_no_function_has_a_vague_name():
    assert vague(ROOT) == [], "name the effect (`refresh_devices`) or the answer (`job_status`)"


def test_test_names_are_short():
    assert long_test_names(ROOT) == [], f"state the behaviour in at most {LONGEST} characters"
