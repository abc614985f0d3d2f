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


def product() -> Iterator[tuple[str, str, str, int]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for definition in definitions(path.read_text()):
                yield str(path.relative_to(ROOT)), *definition


def test_each_class_name_is_defined_once_or_allowed_twice():
    found: dict[str, list[str]] = defaultdict(list)
    for path, kind, name, _ in product():
        if kind == "class":
            found[name].append(path)
    several = {name: sorted(paths) for name, paths in found.items() if len(paths) > 1}
    allowed = {name: sorted(files) for name, (files, _) in ALLOWED.items()}
    differ = {name: several.get(name) for name in several.keys() | allowed if several.get(name) != allowed.get(name)}
    assert differ == {}, "rename one of them, or say in ALLOWED why both are called so"


def test_no_function_has_a_vague_name():
    vague = [f"{path}:{line} {name}" for path, kind, name, line in product() if kind == "def" and name in VAGUE]
    assert vague == [], "name the effect (`refresh_devices`) or the answer (`job_status`)"


def test_test_names_are_short():
    long = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for kind, name, line in definitions(path.read_text())
        if kind == "def" and name.startswith("test_") and len(name) > LONGEST + len("test_")
    ]
    assert long == [], f"state the behaviour in at most {LONGEST} characters"
