"""A session has one Python version, because bytecode of another version crashes or computes wrongly."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from live.peers import Manager, key_pair, session_folder

from stoker.errors import SessionError
from stoker.manager.cli.ask import Observer
from stoker.manager.executor.client import ClientLink
from stoker.protocol import wire
from stoker.protocol.session import PYTHON, SessionFile, SessionFolder


@pytest.fixture
def folder(tmp_path: Path) -> SessionFolder:
    return session_folder(tmp_path / "session")


def written(folder: SessionFolder, python: str) -> None:
    folder.write(SessionFile("k3v9", wire.VERSION, "tcp://127.0.0.1:1", key_pair().public, python=python))


def test_program_of_another_python_is_refused_with_both_versions(folder: SessionFolder) -> None:
    written(folder, "3.0")
    with pytest.raises(SessionError) as refused:
        ClientLink(folder)
    assert "session k3v9 uses Python 3.0" in str(refused.value)
    assert f"under Python {PYTHON}" in str(refused.value)
    assert "stoker up" in str(refused.value)


@pytest.mark.parametrize("python", ["", PYTHON])
def test_program_of_the_same_python_joins(folder: SessionFolder, python: str) -> None:
    written(folder, python)
    ClientLink(folder).close()


def test_read_only_clients_may_use_any_python(folder: SessionFolder) -> None:
    with closing(Manager(folder)):
        folder.write(msgspec.structs.replace(folder.read(), python="3.0"))
        with Observer(folder) as observer:
            assert observer.status().session == folder.read().session


def test_manager_keeps_the_first_python_of_the_session(folder: SessionFolder) -> None:
    with closing(Manager(folder)) as manager:
        assert folder.read().python == PYTHON
        manager.kill()
        folder.write(msgspec.structs.replace(folder.read(), python="3.0"))
        manager.start()
        assert folder.read().python == "3.0", "the manager runs no functions; programs and pilots do"
