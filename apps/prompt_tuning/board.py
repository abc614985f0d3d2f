"""Where each job is: one small file in its run folder, written by whoever has submitted it, read by everybody.

    runs/facts-20261122-101502/
        run.json                 what was submitted, and what makes two runs the same
        state.json               this file
        checkpoint               what the job can go on from; gone when it is done
        adapter_model.safetensors, adapter_config.json, tuned.json      the result
        results.jsonl            the evaluations on the way; where it stands the run is finished

A job whose submitter has died says so by its lock: nobody holds the run folder, and the job is not over.
"""

from __future__ import annotations

import enum
import fcntl
import os
import time
from pathlib import Path

import msgspec

from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError
from stoker.run_folder import write_whole
from stoker.units import forecast_tolerance_s

APP = "prompt_tuning"
RUNS = Path("runs")
_STATE, CHECKPOINT = "state.json", "checkpoint"


class Phase(enum.Enum):
    """What a job is doing."""

    QUEUED = "queued"
    """It waits for devices."""
    LOADING = "loading"
    """Its model is being loaded."""
    TUNING = "tuning"
    """It runs: it looks for its initial prompt, or iterates."""
    DONE = "done"
    """Its tuned prompt is there."""
    FAILED = "failed"
    """It ended without one."""
    DROPPED = "dropped"
    """It could not make its deadline, and was not to run without."""
    STOPPED = "stopped"
    """Whoever submitted it has stopped; its checkpoint is kept."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it by itself."""
        return self not in (Phase.QUEUED, Phase.LOADING, Phase.TUNING)


class BoardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One job at one moment. Times are seconds since the epoch, on the submitter's clock; None where there is none.

    `known_late_at`: since when it was known that it would miss its deadline. `looks_up`: it begins by looking its
    initial prompt up. `metric` is of the last evaluation that is known, `metric_name` what it is. `devices` are those
    it runs on; on these it was seen first at `seen_at`, after `seen_iteration` iterations, and at its pace there it
    ends at `measured_ends_at`. Before its first start it waited `loading_s` seconds for its model to load, and waits
    for that now since `loading_at`. `why`: what it waits for, or why it failed.
    """

    name: str
    phase: Phase = Phase.QUEUED
    iterations: int = 0
    metric_name: str = ""
    reach: float | None = None
    submitted_at: float = 0.0
    deadline_at: float | None = None
    session: str = ""
    call: str = ""
    iteration: int = 0
    loss: float | None = None
    metric: float | None = None
    devices: tuple[str, ...] = ()
    ends_at: float | None = None
    known_late_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    seen_at: float | None = None
    seen_iteration: int = 0
    measured_ends_at: float | None = None
    loading_at: float | None = None
    loading_s: float = 0.0
    looks_up: bool = False
    restarts: int = 0
    why: str = ""
    at: float = 0.0

    @property
    def end_at(self) -> float | None:
        """When it has ended, or is expected to."""
        return self.ended_at if self.phase.is_over else self.ends_at

    def in_time(self, now: float) -> bool | None:
        """Whether its tuned prompt is, or will be, there by the deadline; None without one, and before it is known: its
        end may be too near to the deadline for that."""
        if self.deadline_at is None:
            return None
        if self.phase.is_over:
            return self.phase is Phase.DONE and self.ended_at is not None and self.ended_at <= self.deadline_at
        if self.deadline_at <= now:
            return False
        if self.ends_at is None:
            return None
        if self.ends_at <= self.deadline_at:
            return True
        return False if self.ends_at - self.deadline_at >= forecast_tolerance_s(self.ends_at - now) else None


class BoardRow(msgspec.Struct, frozen=True):
    """A job on the board. `abandoned`: it is not over, and whoever submitted it is gone."""

    folder: str
    entry: BoardEntry
    abandoned: bool = False


def write_entry(folder: Path, entry: BoardEntry) -> None:
    """Put a job's state into its run folder. Raises ConfigError if that cannot be written."""
    said = msgspec.json.encode(msgspec.structs.replace(entry, at=time.time()))
    write_whole(folder, msgspec.json.format(said, indent=1), name=_STATE)


def read_entry(folder: Path) -> BoardEntry | None:
    """The state in a run folder; None where there is none that can be read."""
    try:
        return msgspec.json.decode((folder / _STATE).read_bytes(), type=BoardEntry)
    except (OSError, *UNREADABLE):
        return None


def read_board(root: Path = RUNS) -> list[BoardRow]:
    """Every job under this folder, in the order of their submission. Raises ConfigError for a path that is a file."""
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root}: is no folder of runs", file=str(root))
    folders = [root, *sorted(root.iterdir())] if root.is_dir() else []
    seen = []
    for folder in folders:
        entry = read_entry(folder) if folder.is_dir() else None
        if entry is not None:
            seen.append(BoardRow(str(folder), entry, not entry.phase.is_over and not _is_held(folder)))
    return sorted(seen, key=lambda one: one.entry.submitted_at)


def _is_held(folder: Path) -> bool:
    """Whether a process has the run folder's lock (`run_folder.open_run`)."""
    try:
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
