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
    """A manager without pilots; at the end every pilot is told to go, and nothing may be left of it."""
    made = FakeManager(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def served(manager: FakeManager) -> FakeManager:
    """A manager with one pilot of two CPU devices."""
    manager.start_pilot()
    manager.hello()
    return manager
