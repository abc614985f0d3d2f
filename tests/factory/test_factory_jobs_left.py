"""What a factory writes of jobs that it could not cancel, on a disk that has no room for it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from stoker.manager.factory.factory import note_jobs_left


def test_jobs_that_are_left_are_a_line_a_site(tmp_path: Path) -> None:
    file = tmp_path / "jobs-left"
    note_jobs_left(file, ["lab: 7 8", "other: 9"])
    assert file.read_text() == "lab: 7 8\nother: 9\n"
    note_jobs_left(file, [])
    assert file.read_text() == ""


def test_a_full_disk_does_not_say_that_no_job_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file was made and stayed empty, which means that none is, and the factory failed."""
    file = tmp_path / "jobs-left"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3, hard))
        note_jobs_left(file, ["lab: 7 8"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not file.exists()
    assert "jobs-left cannot be written: File too large" in caplog.text
