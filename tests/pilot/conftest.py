from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from fake_manager import FakeManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeManager]:
    made = FakeManager(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def alone(manager: FakeManager) -> FakeManager:
    """A manager with one pilot of two CPU devices, for a test that may end or damage the pilot."""
    manager.start_pilot()
    manager.hello()
    return manager


@pytest.fixture(scope="module")
def shared_pilot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeManager]:
    """Start one pilot per file, because a start takes most of a second. The lease allows long pauses between tests."""
    made = FakeManager(tmp_path_factory.mktemp("manager"), lease_s=900)
    try:
        made.start_pilot()
        made.hello()
        yield made
    finally:
        made.close()


@pytest.fixture
def served(shared_pilot: FakeManager) -> FakeManager:
    """A manager with one pilot of two CPU devices without libraries, shared by the tests of a file."""
    shared_pilot.begin_test()
    return shared_pilot


@pytest.fixture
def keyed(manager: FakeManager) -> FakeManager:
    """A manager with a transfer key that answers object requests only when the test says so."""
    manager.take_key()
    return manager
