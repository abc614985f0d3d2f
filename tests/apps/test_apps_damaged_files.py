"""An error names a damaged file of an application; a replaceable damaged file counts as missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.apps.fact_verification.options import read_prompts
from stoker.apps.inference_sweep.plan import read_sweep
from stoker.apps.prompt_tuning import board
from stoker.apps.prompt_tuning.board import BoardEntry
from stoker.errors import ConfigError
from stoker.run_folder import read_options
from stoker.tuning import order, pace
from stoker.tuning.job import read_job

DAMAGED = {
    "cut off": b'{"name": "a", "ca',
    "not text": b'{"name": "\xff\xfe"}',
    "garbage": bytes(range(256)) * 4,
    "deep": b"[" * 200_000,
    "deep in a setting": b"x = " + b"[" * 200_000,
}


@pytest.fixture(params=list(DAMAGED))
def damaged(request: pytest.FixtureRequest) -> bytes:
    return DAMAGED[request.param]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("run.json", lambda path: read_options(path.parent, app="toy")),
        ("prompts.toml", read_prompts),
        ("sweep.toml", read_sweep),
        ("job.toml", read_job),
    ],
)
def test_damaged_user_file_is_refused_by_name(
    tmp_path: Path, damaged: bytes, name: str, read: Callable[[Path], Any]
) -> None:
    path = tmp_path / name
    path.write_bytes(damaged)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))


def test_damaged_status_or_timing_file_counts_as_missing(tmp_path: Path, damaged: bytes) -> None:
    for name in ("state.json", "pace.json"):
        (tmp_path / name).write_bytes(damaged)
    assert board.read_entry(tmp_path) is None
    assert pace.read_paces(tmp_path) == {}
    assert order.unpack(damaged) is None
    board.write_entry(tmp_path, BoardEntry(name="a"))
    assert board.read_entry(tmp_path) is not None
