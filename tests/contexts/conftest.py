"""A state folder of its own for every test here: no test reads or writes the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.contexts import ambient


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "state"
    monkeypatch.setenv("STOKER_HOME", str(folder))
    monkeypatch.delenv("STOKER_SNAPSHOTS", raising=False)
    yield folder
    ambient.leave_call()
    ambient.leave_library()
