from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("manager", "pilot", "contexts", "apps", "src/stoker/protocol", "src/stoker/tuning")
ROWS = re.findall(r"^\| .+ \| `(\w+)` \| `([\w/]+\.py)` \|$", (ROOT / "docs/finding.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def definitions() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    for path in [*files, *(ROOT / "src/stoker").glob("*.py")]:
        for name in re.findall(r"^\s*(?:async )?(?:def|class) (\w+)", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    return found


def test_page_has_twenty_questions() -> None:
    assert len(ROWS) >= 20


@pytest.mark.parametrize(("name", "file"), ROWS)
def test_name_on_the_page_is_defined_only_in_the_given_file(
    name: str, file: str, definitions: dict[str, list[str]]
) -> None:
    assert definitions.get(name) == [file]
