"""Fetches objects for tests."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from stoker.pilot.transfer.board import FetchOutcome, ObjectSource
from stoker.pilot.transfer.fetch import ObjectFetch


def get(name: str, target: Path, *, addresses: Iterable[str], key: bytes) -> FetchOutcome:
    """Fetch an object to `target`, completely or not at all."""
    draft = target.with_name(f".{target.name}.draft")
    fetch = ObjectFetch(name, key=key)
    fetch.set_sources(ObjectSource(address=address, origin=True) for address in addresses)
    outcome = fetch.run(draft, no_source_limit_s=0.0)
    os.replace(draft, target)
    return outcome
