"""Folders of runs that can be stopped at any moment and resumed. Final files are replaced atomically.

    with contextlib.closing(open_run(Path("runs"), app="mine", prefix="mine", parameters=..., options=...)) as folder:
        with folder.log(key=("id",)) as log:            the results so far; `append` skips a key that the log has
            log.append([{"id": 7, "answer": "yes"}])
        folder.finish(name="results.jsonl", write=...)  writes the final file

    run.json              application, options, parameters, time of creation
    results.jsonl.part    results so far; removed when the final file is complete
    attempt.jsonl.part    the log of one attempt; removed when the attempt ends
    results.parquet       the final file (or results.jsonl, results.npy, responses.jsonl); the run is finished if this
                          file exists and results.jsonl.part does not
    summary.json          a summary of the last attempt

Two runs with equal `parameters` are the same run. A process locks its run folder. A full disk raises StokerError and
leaves existing files intact.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stoker import locks, whole_files
from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError, StokerError
from stoker.whole_files import append_or_truncate, draft_file

__all__ = ["Record", "RecordLog", "RunFolder", "is_finished", "open_run", "read_options", "write_whole"]

Record = dict[str, Any]


class RecordLog(contextlib.AbstractContextManager["RecordLog"]):
    """A log of JSON records. Each key is written once.

    Args:
        path: The file, created if missing.
        key: Names of the fields that identify a record.

    Raises:
        ConfigError: A line before the last line is damaged; the error has the line.
    """

    def __init__(self, path: Path, *, key: tuple[str, ...]) -> None:
        self.path = path
        self._fields = key
        self._places: dict[tuple[Any, ...], int] = {}
        """Byte offset of each record, by key."""
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
                    what = "is not a result of this run; remove the line, and its result is computed again"
                    raise ConfigError.in_file(self.path, what, line=number) from None
                at += len(line)

    def key_of(self, record: Record) -> tuple[Any, ...]:
        """Return the key of a record.

        Args:
            record: Fields by name.

        Raises:
            KeyError: A field of the key is missing.
        """
        return tuple(record[field] for field in self._fields)

    def append(self, records: Iterable[Record]) -> int:
        """Write the records with new keys in one write.

        Args:
            records: Records; those with known keys are skipped.

        Returns:
            Number of written records.

        Raises:
            StokerError: The write failed. No record is added.
        """
        fresh: dict[tuple[Any, ...], bytes] = {}
        for record in records:
            key = self.key_of(record)
            if key not in self._places and key not in fresh:
                fresh[key] = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        before = os.fstat(self._file).st_size
        try:
            append_or_truncate(self._file, b"".join(fresh.values()), at=before)
        except OSError as error:
            what = f"cannot be written: {error.strerror}; the {len(self._places)} earlier results are kept"
            raise StokerError.in_file(self.path, what) from error
        for key, line in fresh.items():
            self._places[key] = before
            before += len(line)
        return len(fresh)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Record]:
        """Yield the records, oldest first."""
        return (self._read_record_at_offset(place) for place in list(self._places.values()))

    def get(self, key: tuple[Any, ...]) -> Record | None:
        """Return the record of a key, or None.

        Args:
            key: Values of the key fields.
        """
        place = self._places.get(key)
        return None if place is None else self._read_record_at_offset(place)

    def _read_record_at_offset(self, place: int) -> Record:
        self._reader = self._reader or self.path.open("rb")
        self._reader.seek(place)
        record: Record = json.loads(self._reader.readline())
        return record

    def close(self) -> None:
        """Close the file. A second call has no effect."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __exit__(self, *_error: object) -> None:
        self.close()


def write_whole(folder: Path, data: bytes, *, name: str) -> None:
    """Write a file atomically, and sync it to disk.

    Args:
        folder: Created if missing.
        data: The content.
        name: Name of the file.

    Raises:
        ConfigError: The folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        whole_files.write_whole(folder / name, data, mode=0o666, sync=True)
    except OSError as error:
        raise ConfigError.in_file(folder / name, f"cannot be written: {error.strerror}") from None


PART = "results.jsonl.part"
ATTEMPT = "attempt.jsonl.part"
_RUN_FILE = "run.json"
_LOCK_FILE = ".lock"
_FILES_BEFORE_RUN_JSON = {_LOCK_FILE, f"{_LOCK_FILE}.holder", f".{_RUN_FILE}.tmp"}
"""Names of files that may remain if a process is killed before it has written run.json."""
FINALS = ("results.parquet", "results.jsonl", "results.npy", "responses.jsonl")


class RunFolder:
    """A run folder that is open and locked. Made by `open_run`. `close` releases the lock."""

    def __init__(self, path: Path, *, lock: int, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        self._lock = lock

    def log(self, *, key: tuple[str, ...]) -> RecordLog:
        """Return the log of the run's results so far.

        Args:
            key: Names of the fields that identify a result.
        """
        return RecordLog(self.path / PART, key=key)

    @contextlib.contextmanager
    def attempt_log(self, *, key: tuple[str, ...]) -> Iterator[RecordLog]:
        """Yield a log of this attempt only, and remove it after the block.

        Args:
            key: Names of the fields that identify a result.
        """
        path = self.path / ATTEMPT
        path.unlink(missing_ok=True)  # a killed attempt may have left this file
        try:
            with RecordLog(path, key=key) as log:
                yield log
        finally:
            path.unlink(missing_ok=True)

    def finish(self, *, name: str, write: Callable[[Path], object], complete: bool = True) -> Path:
        """Write the final file atomically, and remove the log of results.

        Args:
            name: One of FINALS.
            write: Function that writes the file.
            complete: False to keep the log for a later attempt.

        Returns:
            Path of the final file.

        Raises:
            StokerError: As in `write`.
        """
        final = self.write(name, write)
        for other in set(FINALS) - {name}:  # an earlier attempt may have left another final file
            (self.path / other).unlink(missing_ok=True)
        if complete:
            (self.path / PART).unlink(missing_ok=True)
        return final

    def write(self, name: str, write: Callable[[Path], object]) -> Path:
        """Write a file atomically.

        Args:
            name: Name of the file.
            write: Function that writes the file.

        Returns:
            Path of the file.

        Raises:
            StokerError: The write failed. An earlier file stays unchanged.
        """
        path = self.path / name
        try:
            with draft_file(path, draft=_draft_path(path)) as partial:
                write(partial)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            what = f"cannot be written: {why}; free disk space or make the file writable, and run again"
            raise StokerError.in_file(path, what) from error
        return path

    def write_json(self, name: str, value: Any) -> Path:
        """Write a JSON file atomically.

        Args:
            name: Name of the file.
            value: A JSON value.

        Returns:
            Path of the file.

        Raises:
            StokerError: As in `write`.
        """
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        return self.write(name, lambda partial: partial.write_text(text, encoding="utf-8"))

    def close(self) -> None:
        """Release the lock. A second call has no effect."""
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
    """Return a locked run folder. Without `folder`, use the newest unfinished run of `app` with the same parameters, or
    else make a folder `<prefix>-<date>-<time>`.

    Args:
        root: Folder that contains the runs.
        app: Name of the application.
        prefix: Start of a new folder's name.
        parameters: JSON values that determine the results.
        options: JSON values for `read_options`.
        folder: Created if missing.
        fresh: True to make a new folder even if an unfinished run exists.

    Raises:
        ConfigError: `folder` has a run with other parameters (listed in the message), a finished run or other files, or
            another process uses it.
    """
    # Stored parameters come from a JSON file. Convert the new parameters to JSON types for the comparison.
    parameters = json.loads(json.dumps(parameters))
    if folder is None:
        for path in [] if fresh else _find_unfinished_runs(root, app=app, parameters=parameters):
            if (lock := _try_lock(path)) is not None:
                return RunFolder(path, lock=lock, resumed=True)
        folder = _make_run_folder(root, prefix=prefix)
    existed = (folder / _RUN_FILE).exists()
    if existed:
        _check_same_parameters(folder, app=app, parameters=parameters)
    elif folder.exists() and not (
        folder.is_dir() and {path.name for path in folder.iterdir()} <= _FILES_BEFORE_RUN_JSON
    ):
        raise ConfigError.in_file(folder, "is not a run folder and not empty; choose another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError.in_file(folder, f"cannot be made: {error.strerror}") from None
    lock = _try_lock(folder)
    if lock is None:
        raise ConfigError.in_file(folder, "another process uses this run folder; wait until it ends, or stop it")
    run = RunFolder(folder, lock=lock, resumed=existed)
    if not existed:
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        try:
            run.write_json(_RUN_FILE, {"app": app, "made": now, "options": options, "parameters": parameters})
        except BaseException:
            run.close()
            raise
    return run


def read_options(folder: Path, *, app: str) -> dict[str, Any]:
    """Return the options of a run.

    Args:
        folder: The run's folder.
        app: Name of the application.

    Raises:
        ConfigError: `folder` contains no run of `app`.
    """
    options: dict[str, Any] = _read_run(folder, app=app)["options"]
    return options


def is_finished(folder: Path) -> bool:
    """True if the run's final file is complete.

    Args:
        folder: The run's folder.
    """
    return _final_file(folder) is not None


def _final_file(folder: Path) -> Path | None:
    finals = (folder / name for name in FINALS)
    return None if (folder / PART).exists() else next((path for path in finals if path.exists()), None)


def _check_same_parameters(folder: Path, *, app: str, parameters: dict[str, Any]) -> None:
    there = _read_run(folder, app=app)["parameters"]
    differ = [
        f"  {name}: {_format_value(there.get(name))} there, {_format_value(parameters.get(name))} now"
        for name in sorted({*there, *parameters})
        if there.get(name) != parameters.get(name)
    ]
    if differ:
        lines = ["contains a run with other parameters:", *differ, "start a new one with --fresh or --out DIR"]
        raise ConfigError.in_file(folder, "\n".join(lines))
    if results := _final_file(folder):
        what = f"this run is finished, its results are in {results}; start a new one with --fresh"
        raise ConfigError.in_file(folder, what)


def _read_run(folder: Path, *, app: str) -> dict[str, Any]:
    try:
        run = json.loads((folder / _RUN_FILE).read_bytes())
        if not isinstance(run["parameters"], dict) or not isinstance(run["options"], dict):
            raise TypeError
    except FileNotFoundError:
        raise ConfigError.in_file(folder, f"is not a run folder (it has no {_RUN_FILE})") from None
    except (OSError, KeyError, TypeError, *UNREADABLE):
        raise ConfigError.in_file(folder / _RUN_FILE, "cannot be read as a run") from None
    if run.get("app") != app:
        raise ConfigError.in_file(folder, f"is a run of {run.get('app')}, not of {app}")
    return dict(run)


def _find_unfinished_runs(root: Path, *, app: str, parameters: dict[str, Any]) -> list[Path]:
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(ConfigError, OSError):
            if _read_run(path, app=app)["parameters"] == parameters and not is_finished(path):
                found.append(((path / _RUN_FILE).stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _make_run_folder(root: Path, *, prefix: str) -> Path:
    stem = f"{prefix}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for name in itertools.chain([stem], (f"{stem}-{count}" for count in itertools.count(2))):
        try:
            (root / name).mkdir(parents=True)
            break
        except FileExistsError:
            if not root.is_dir():
                raise ConfigError.in_file(root, "is not a folder") from None
        except OSError as error:
            raise ConfigError.in_file(root / name, f"cannot be made: {error.strerror}") from None
    return root / name


def _draft_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def is_locked(folder: Path) -> bool:
    """Return True if a process has this run open, or if unknown."""
    return locks.is_locked(folder / _LOCK_FILE) is not False


def _try_lock(folder: Path) -> int | None:
    try:
        lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError.in_file(folder, f"cannot be written: {error.strerror}") from None
    if locks.try_lock(lock):
        return lock
    os.close(lock)
    return None


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_value(part)}" for name, part in value.items())
    return "nothing" if value is None else str(value)
