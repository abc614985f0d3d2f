from __future__ import annotations

import sys
from pathlib import Path

import pytest
from environment.small import SmallEnvironment

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pilot"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallEnvironment:
    base = tmp_path_factory.mktemp("small")
    made = SmallEnvironment(base / "venv", base / "home")
    made.script("say-where", "import sys\nprint(sys.prefix)\n")
    return made
