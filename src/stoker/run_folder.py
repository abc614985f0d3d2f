"""Runs that can be stopped at any moment and resumed: a folder, a log of results, and files replaced whole.

    with contextlib.closing(open_run(Path("runs"), app="mine", prefix="mine", parameters=..., options=...)) as folder:
        with folder.log(key=("id",)) as log:            results so far; a key that is there is not written again
            log.append([{"id": 7, "answer": "yes"}])
        folder.finish(name="results.jsonl", write=...)  the final file, moved into place whole

    run.json              application, options, parameters (what makes two runs the same), when it was made
    results.jsonl.part    results so far; removed once the final file is in place
    attempt.jsonl.part    what an attempt keeps for itself, while it lasts
    results.parquet       the final file; a run that has one, and no .part, is finished (it may also be results.jsonl,
                          results.npy or responses.jsonl)
    summary.json          the facts of the last attempt

Two runs with equal `parameters` are the same run: the second resumes where the first was stopped. A folder is locked
while a run writes in it. A folder that cannot be used raises ConfigError, which names it; a disk that takes no more
raises StokerError, and what is there stays whole.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from stoker import whole_files
from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError, StokerError
from stoker.whole_files import append_whole, draft_of

__all__ = ["Record", "RecordLog", "RunFolder", "is_finished", "open_run", "read_options", "write_whole"]

Record = dict[str, Any]


class RecordLog:
    """The log at `path`, made when it is not there. `key` names the fields that identify a record.

    Raises ConfigError naming the line when something other than the last line is damaged.
    """

    def __init__(self, path: Path, *, key: tuple[str, ...]) -> None:
        self.path = path
        self._fields = key
        self._places: dict[tuple[Any, ...], int] = {}
        """The byte at which each record begins."""
        self.dropped_bytes = 0
        self._reader: BinaryIO | None = None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        at = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    os.ftruncate(self._file, at)
                    self.dropped_bytes = len(line)
                    return
                try:
                    self._places.setdefault(self.key_of(json.loads(line)), at)
                except (ValueError, RecursionError, KeyError, TypeError):
                    raise ConfigError(
                        f"{self.path}: line {number}: is not a result of this run; remove the line, and its result is"
                        " made again",
                        file=str(self.path),
                        line=number,
                    ) from None
                at += len(line)

    def key_of(self, record: Record) -> tuple[Any, ...]:
        """What identifies the record. Raises KeyError when a field of the key is missing."""
        return tuple(record[field] for field in self._fields)

    def append(self, records: Iterable[Record]) -> int:
        """Writes the records whose keys are new, all with one write. How many they were.

        Raises StokerError when the disk refuses, and then none of them is in the log.
        """
        fresh: dict[tuple[Any, ...], bytes] = {}
        for record in records:
            key = self.key_of(record)
            if key not in self._places and key not in fresh:
                text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
                fresh[key] = text.encode() + b"\n"
        before = os.fstat(self._file).st_size
        try:
            append_whole(self._file, b"".join(fresh.values()), at=before)
        except OSError as error:
            raise StokerError(
                f"{self.path}: cannot be written: {error.strerror}; the {len(self._places)} results before are kept",
                file=str(self.path),
            ) from error
        for key, line in fresh.items():
            self._places[key] = before
            before += len(line)
        return len(fresh)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Record]:
        """The records, in the order in which they were written."""
        return (self._record_at(place) for place in list(self._places.values()))

    def get(self, key: tuple[Any, ...]) -> Record | None:
        place = self._places.get(key)
        return None if place is None else self._record_at(place)

    def _record_at(self, place: int) -> Record:
        if self._reader is None:
            self._reader = self.path.open("rb")
        self._reader.seek(place)
        record: Record = json.loads(self._reader.readline())
        return record

    def close(self) -> None:
        """Closes the file; twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def write_whole(folder: Path, data: bytes, *, name: str) -> None:
    """Put these bytes into the folder under this name, whole or not at all; they reach the disk before the name does.

    Raises ConfigError if the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        whole_files.write_whole(folder / name, data, mode=0o666, sync=True)
    except OSError as error:
        raise ConfigError(f"{folder / name}: cannot be written: {error.strerror}", file=str(folder / name)) from None


PART = "results.jsonl.part"
ATTEMPT = "attempt.jsonl.part"
_RUN = "run.json"
_LOCK = ".lock"
FINALS = ("results.parquet", "results.jsonl", "results.npy", "responses.jsonl")
"""What the final file of a run may be called."""


class RunFolder:
    """An open run folder; `close` gives its lock back. Make one with `open_run`."""

    def __init__(self, path: Path, *, lock: int, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        """Whether an earlier run left results here that this one goes on with."""
        self._lock = lock

    def log(self, *, key: tuple[str, ...]) -> RecordLog:
        """The results so far."""
        return RecordLog(self.path / PART, key=key)

    @contextlib.contextmanager
    def attempt_log(self, *, key: tuple[str, ...]) -> Iterator[RecordLog]:
        """A log of this attempt alone, for what the next attempt does again. It is removed when the block ends."""
        path = self.path / ATTEMPT
        path.unlink(missing_ok=True)  # of an attempt that was killed
        try:
            with RecordLog(path, key=key) as log:
                yield log
        finally:
            path.unlink(missing_ok=True)

    def finish(self, *, name: str, write: Callable[[Path], None], complete: bool = True) -> Path:
        """Has `write` make the final file (one of FINALS) under a name of its own, then moves it into place and drops
        the log.

        A run that is not `complete` keeps the log: it can be gone on with, and then makes the final file anew.
        """
        final = self.write(name, write)
        for other in set(FINALS) - {name}:  # of an attempt that was not complete
            (self.path / other).unlink(missing_ok=True)
        if complete:
            (self.path / PART).unlink(missing_ok=True)
        return final

    def write(self, name: str, write: Callable[[Path], None]) -> Path:
        """Has `write` make a file under a name of its own, then moves it into place.

        Raises StokerError when the disk refuses; the file that was there before is kept.
        """
        return _write_whole(self.path / name, write)

    def write_json(self, name: str, value: Any) -> Path:
        """Writes `value` as JSON, moved into place whole."""
        return _write_json(self.path / name, value)

    def close(self) -> None:
        """Gives the lock back; twice is fine."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def open_run(
    root: Path,
    *,
    app: str,
    prefix: str,
    parameters: dict[str, Any],
    options: dict[str, Any],
    folder: Path | None = None,
    fresh: bool = False,
) -> RunFolder:
    """The run folder to work in, locked.

    With `folder`: that one, made when it is not there. Without: the newest unfinished run of `app` under `root` with
    the same parameters, unless `fresh`; else a new one, `<prefix>-<date>-<time>`. Raises ConfigError when `folder` has
    another run (saying what differs), a finished one or no run at all, and when another process is working in it.
    """
    # Parameters are compared with those in a file, so both sides go through JSON.
    parameters = json.loads(json.dumps(parameters))
    if folder is None:
        for path in [] if fresh else _unfinished(root, app=app, parameters=parameters):
            lock = _try_lock(path)
            if lock is not None:
                return RunFolder(path, lock=lock, resumed=True)
        folder = _make_new(root, prefix=prefix)
    existed = (folder / _RUN).exists()
    if existed:
        _check_same(folder, app=app, parameters=parameters)
    elif folder.exists() and (not folder.is_dir() or _holds_other_files(folder)):
        raise ConfigError(f"{folder}: is not a run folder and not empty; name another with --out", file=str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}", file=str(folder)) from None
    lock = _try_lock(folder)
    if lock is None:
        raise ConfigError(f"{folder}: another process works in this run; wait for it or stop it", file=str(folder))
    if not existed:
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        try:
            _write_json(folder / _RUN, {"app": app, "made": now, "options": options, "parameters": parameters})
        except BaseException:
            os.close(lock)
            raise
    return RunFolder(folder, lock=lock, resumed=existed)


def read_options(folder: Path, *, app: str) -> dict[str, Any]:
    """The options that the run in `folder` was started with. Raises ConfigError when there is no run of `app`."""
    options: dict[str, Any] = _read_run(folder, app=app)["options"]
    return options


def is_finished(folder: Path) -> bool:
    """Whether the run's final file stands, and is complete."""
    return _final_file(folder) is not None


def _final_file(folder: Path) -> Path | None:
    finals = (folder / name for name in FINALS)
    return None if (folder / PART).exists() else next((path for path in finals if path.exists()), None)


def _check_same(folder: Path, *, app: str, parameters: dict[str, Any]) -> None:
    there = _read_run(folder, app=app)["parameters"]
    differ = [
        f"  {name}: {_show(there.get(name))} there, {_show(parameters.get(name))} now"
        for name in sorted({*there, *parameters})
        if there.get(name) != parameters.get(name)
    ]
    if differ:
        raise ConfigError(
            "\n".join(
                [f"{folder}: holds a run with other parameters:", *differ, "start a new one with --fresh or --out DIR"]
            ),
            file=str(folder),
        )
    results = _final_file(folder)
    if results is not None:
        raise ConfigError(
            f"{folder}: this run is finished, its results are in {results}; start a new one with --fresh",
            file=str(folder),
        )


def _read_run(folder: Path, *, app: str) -> dict[str, Any]:
    try:
        run = json.loads((folder / _RUN).read_bytes())
        if not isinstance(run["parameters"], dict) or not isinstance(run["options"], dict):
            raise TypeError
    except FileNotFoundError:
        raise ConfigError(f"{folder}: is not a run folder (it has no {_RUN})", file=str(folder)) from None
    except (OSError, KeyError, TypeError, *UNREADABLE):
        raise ConfigError(f"{folder / _RUN}: cannot be read as a run", file=str(folder / _RUN)) from None
    if run.get("app") != app:
        raise ConfigError(f"{folder}: is a run of {run.get('app')}, not of {app}", file=str(folder))
    return dict(run)


def _unfinished(root: Path, *, app: str, parameters: dict[str, Any]) -> list[Path]:
    """Newest first. Folders that cannot be read are passed over: they may belong to anybody."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        try:
            run = _read_run(path, app=app)
            if run["parameters"] == parameters and not is_finished(path):
                found.append(((path / _RUN).stat().st_mtime_ns, path))
        except (ConfigError, OSError):
            continue
    return [path for _, path in sorted(found, reverse=True)]


def _make_new(root: Path, *, prefix: str) -> Path:
    """Makes a new folder that no other process has made, also when many start in the same second."""
    stem = f"{prefix}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    path, count = root / stem, 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not root.is_dir():
                raise ConfigError(f"{root}: is not a folder", file=str(root)) from None
            count += 1
            path = root / f"{stem}-{count}"
        except OSError as error:
            raise ConfigError(f"{path}: cannot be made: {error.strerror}", file=str(path)) from None


def _holds_other_files(folder: Path) -> bool:
    """True unless the folder is empty, or holds what a run leaves that ended before its first file was written."""
    return not {path.name for path in folder.iterdir()} <= {_LOCK, _partial_of(folder / _RUN).name}


def _try_lock(folder: Path) -> int | None:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}", file=str(folder)) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _write_json(path: Path, value: Any) -> Path:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"

    def write(partial: Path) -> None:
        partial.write_text(text, encoding="utf-8")

    return _write_whole(path, write)


def _write_whole(path: Path, write: Callable[[Path], None]) -> Path:
    try:
        with draft_of(path, draft=_partial_of(path)) as partial:
            write(partial)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise StokerError(
            f"{path}: cannot be written: {why}; make room or let it be written, and run again", file=str(path)
        ) from error
    return path


def _partial_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_show(part)}" for name, part in value.items())
    return "nothing" if value is None else str(value)
