"""Sessions with calls over TaskVine; tests are skipped without TaskVine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.world import World, command_of

import stoker
from stoker.errors import ConfigError
from stoker.pilot.taskvine import factory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pilot"))  # make the manager's stand-in importable

SITE = """
name = "pool"
engine = "taskvine"

[pilot]
devices = "cpu:2"
init_blocks = {first}
max_blocks = {most}
"""


class Pool:
    def __init__(self, world: World, session: stoker.sessions.Session) -> None:
        self.world = world
        self.session = session

    def workers(self) -> list[int]:
        """Return the process ids of workers. (A child with the name of the worker serves files.)"""
        return [pid for pid in self.world.processes() if command_of(pid)[:1] == ["vine_worker"]]

    def log(self) -> str:
        return "".join(path.read_text() for path in self.session.folder.glob("pilots/*/pilot.log"))


def _load(folder: Path, *, first: int, most: int) -> Iterator[Pool]:
    with World(folder).entered() as world:
        site = world.path / "site.toml"
        site.write_text(SITE.format(first=first, most=most))
        with stoker.load(str(site), run_dir=str(world.runs)) as session:
            yield Pool(world, session)


@pytest.fixture(scope="session")
def taskvine() -> None:
    try:
        factory.find_programs()
        factory.import_taskvine()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_taskvine(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "ndcctools"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "ndcctools", None)


@pytest.fixture(scope="module")
def pool(taskvine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A session over one worker with two slots, for tests that do not change the session."""
    yield from _load(tmp_path_factory.mktemp("pool"), first=1, most=1)


@pytest.fixture
def two_workers(taskvine: None, tmp_path: Path) -> Iterator[Pool]:
    yield from _load(tmp_path / "world", first=2, most=2)


@pytest.fixture
def growing(taskvine: None, tmp_path: Path) -> Iterator[Pool]:
    yield from _load(tmp_path / "world", first=1, most=2)
