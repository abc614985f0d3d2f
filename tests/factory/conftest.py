from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from factory.fake_slurm import FakeSlurm
from factory.manager_end import ManagerEnd
from live.peers import session_folder

from stoker.protocol.session import SessionFolder


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    slurm = FakeSlurm(tmp_path / "slurm")
    for key, value in slurm.environ().items():
        monkeypatch.setenv(key, value)
    yield slurm
    slurm.close()


@pytest.fixture
def folder(tmp_path: Path) -> SessionFolder:
    return session_folder(tmp_path / "session")


@pytest.fixture
def manager(folder: SessionFolder) -> Iterator[ManagerEnd]:
    manager = ManagerEnd(folder)
    yield manager
    manager.close()
