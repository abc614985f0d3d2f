"""Those who start at once get most of it from each other."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from stoker.contexts.objects import object_of
from stoker.contexts.published import publish
from stoker.pilot.starter import fetching
from stoker.pilot.starter.place import StartError
from stoker.pilot.transfer import meeting
from stoker.pilot.transfer.meeting import Meetings
from stoker.pilot.transfer.seed import Seed

KEY = os.urandom(32)
SIZE = 48 << 20


class Session:
    """A session's folder, as far as a starter looks at it, with a seed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "keys").mkdir(parents=True)
        (folder / "objects").mkdir()
        (folder / "keys" / "transfer.json").write_text(json.dumps({"secret": KEY.hex()}))
        self.seed = Seed(folder / "objects").serve(key=KEY, host="127.0.0.1")
        (folder / "seed.address").write_text(self.seed.address)


@pytest.fixture
def session(tmp_path: Path):
    made = Session(tmp_path / "session")
    yield made
    made.seed.close()


@pytest.fixture
def packages(session: Session, tmp_path: Path) -> dict[str, object]:
    (tmp_path / "archive").write_bytes(os.urandom(SIZE))
    ref = object_of(tmp_path / "archive", memo=tmp_path / "memo")
    publish(session.folder / "objects", (ref,))
    return {"name": ref.name, "size_bytes": ref.size_bytes, "source": str(tmp_path / "nowhere")}


def test_many_that_start_at_once_read_the_seed_little(session, packages, tmp_path: Path) -> None:
    count = 6
    failures: list[Exception] = []

    def start(number: int) -> None:
        try:
            fetching.get(packages, tmp_path / f"copy-{number}", session=session.folder)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    content = (tmp_path / "archive").read_bytes()
    assert all((tmp_path / f"copy-{number}").read_bytes() == content for number in range(count))
    assert SIZE <= session.seed.sent_bytes < 0.75 * count * SIZE  # a small object: of its twelve parts many cross


def test_a_wrong_archive_at_the_source_is_not_taken(tmp_path: Path, packages) -> None:
    (tmp_path / "other").write_bytes(b"something else")
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(StartError, match="is not what it was"):
        fetching.get({**packages, "source": str(tmp_path / "other")}, tmp_path / "copy", session=bare)
    assert not (tmp_path / "copy").exists()


def test_a_source_that_is_seen_serves_without_a_seed(tmp_path: Path, packages) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    fetching.get({**packages, "source": str(tmp_path / "archive")}, tmp_path / "copy", session=bare)
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "archive").read_bytes()


def test_those_who_meet_are_told_of_each_other(session: Session) -> None:
    def meet(address: str) -> set[str]:
        return set(meeting.meet("one", address, seed=session.seed.address, key=KEY))

    assert meet("10.0.0.1:5") == set()
    assert meet("10.0.0.2:5") == {"10.0.0.1:5"}
    assert meet("10.0.0.1:5") == {"10.0.0.2:5"}
    assert meeting.meet("other", "10.0.0.3:5", seed=session.seed.address, key=KEY) == []


def test_who_is_silent_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    meetings = Meetings()
    meetings.meet("one", "10.0.0.1:5")
    monkeypatch.setattr(meeting, "FORGOTTEN_S", -1.0)
    assert meetings.meet("one", "10.0.0.2:5") == []
