"""Keep the results of a `stoker.map` in a file.

A thread writes all results that have arrived, then passes these results to the stream. The file is synced every 5
seconds. Results of failed calls are not kept.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stoker.contexts.recipe import ObjectRef
from stoker.errors import ConfigError, StokerError
from stoker.manager.executor.kept_file import KeptFile, KeptHeader, encode_result_line, invalid_keep_error
from stoker.manager.executor.map_calls import MapCalls
from stoker.manager.executor.map_window import MapResultInbox, payload_size
from stoker.manager.executor.prepared import logger
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CallId

_SYNC_S = 5.0
_WRITE_BYTES = 8_000_000
_JOIN_S = 5.0


class KeptItem(NamedTuple):
    """An item, or a batch of items, whose result an earlier run has stored."""

    file: KeptFile
    at: int
    items: int


class ResultStoringInbox(MapResultInbox):
    def __init__(self, file: KeptFile) -> None:
        super().__init__()
        self.file = file
        self.error: StokerError | None = None
        """Error after which no more results are stored; the map raises this error."""
        self.sending = threading.Lock()
        """Lock that is held while calls are sent and their keys are stored."""
        self._keys: dict[CallId, tuple[str, int]] = {}
        self._arrived_ends: queue.SimpleQueue[CallEnd | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stoker-map-keep", daemon=True)
        self._thread.start()

    def find_result(self, key: str, *, items: int) -> KeptItem | None:
        at = self.file.take_result_offset(key)
        return None if at is None else KeptItem(self.file, at, items)

    def settle(self, end: CallEnd) -> bool:
        self._arrived_ends.put(end)
        return False

    def record_sent_calls(self, calls: Sequence[CallId], keys: Sequence[tuple[str, int]]) -> None:
        self._keys.update(zip(calls, keys, strict=True))

    def close(self) -> None:
        self._arrived_ends.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        synced_at, added, ended = time.monotonic(), 0, False
        while not ended:
            wait_s = max(0.0, synced_at + _SYNC_S - time.monotonic()) if added < self.file.added else None
            try:
                ends = [self._arrived_ends.get(timeout=wait_s)]
            except queue.Empty:
                self._sync_file()
                synced_at, added = time.monotonic(), self.file.added
                continue
            size = 0
            while (end := ends[-1]) is not None and not self._arrived_ends.empty():
                size += payload_size(end.payload)
                if size >= _WRITE_BYTES:
                    break
                ends.append(self._arrived_ends.get())
            ended = ends[-1] is None
            self._store_results([end for end in ends if end is not None])
        self._sync_file()
        self.file.close()

    def _sync_file(self) -> None:
        """Sync the file, because a network file system reports a full disk only at fsync."""
        try:
            self.file.sync()
        except StokerError as error:
            self.error = self.error or error
            self.flush()

    def _store_results(self, ends: list[CallEnd]) -> None:
        with self.sending:
            keys = [self._keys.pop(end.call, None) for end in ends]
        try:
            if self.error is None:
                pairs = zip(keys, ends, strict=True)
                # Keep the file of a large result, because the program reads this file later.
                self.file.append_results(
                    encode_result_line(*key, _read_result_bytes(end))
                    for key, end in pairs
                    if key is not None and end.ok
                )
        except OSError as error:  # the file of a large result cannot be read
            self.error = StokerError(f"keep: a result of {error.filename} cannot be read: {error.strerror}")
        except StokerError as error:
            self.error = error
        except Exception as error:  # report every error; the map would otherwise wait forever
            self.error = StokerError(f"{self.file.path}: a result cannot be kept: {error!r}")
        self.arrived.extend(ends)
        self._ended += len(ends)
        self.flush()


def open_result_file(path: Path, calls: MapCalls, *, reuse: bool) -> ResultStoringInbox:
    header, file = calls.create_kept_header(), KeptFile(path)
    try:
        there = file.header
        if there is None or refuse_or_describe_change(there, header, path=path, reuse=reuse):
            file.write_header(header)
    except BaseException:
        file.close()
        raise
    if len(file):
        damaged = f" ({file.damaged:,} damaged lines are skipped)" if file.damaged else ""
        text = "%s has %s results of earlier runs%s; their items do not run again"
        logger.warning(text, path, f"{len(file):,}", damaged)
    return ResultStoringInbox(file)


def refuse_or_describe_change(there: KeptHeader, now: KeptHeader, *, path: Path, reuse: bool) -> str:
    """Return what has changed since the results were computed. Without `reuse`, raises ConfigError if something has
    changed."""
    name, since, why = there.function, f" since {there.since}" if there.since else "", ""
    if there.function != now.function:
        what = f"the file contains results of {name}, and this map calls {now.function}; name another file"
        raise invalid_keep_error(path, what)
    if there.batch_size != now.batch_size:
        size, own_size = _describe_batch_size(there.batch_size), _describe_batch_size(now.batch_size)
        what = f"the file contains results of {size}, and this map has {own_size}"
        raise invalid_keep_error(path, f"{what}; name another file, or write batch_size={there.batch_size}")
    if there.context_key != now.context_key:
        why = f"the file contains results of context {there.context}, but {name} now has context {now.context}"
    elif there.arguments != now.arguments:
        why = f"the arguments that functools.partial binds to {name} have changed{since}"
    elif there.code != now.code:
        python = f" (from Python {there.python} to Python {now.python})" if there.python != now.python else ""
        why = f"{name}, or code or data that it uses, has changed{since}{python}"
    if why and not reuse:
        advice = "name a new file to compute all results again, or write reuse=True to keep the old results"
        raise invalid_keep_error(path, f"{why}; {advice}")
    return why


def _describe_batch_size(size: int | None) -> str:
    return "single items" if size is None else f"batches of {size:,}"


def _read_result_bytes(end: CallEnd) -> bytes:
    payload = end.payload
    return Path(payload.source).read_bytes() if isinstance(payload, ObjectRef) else payload


def check_keep_path(keep: str | os.PathLike[str]) -> Path:
    if not isinstance(keep, str | os.PathLike) or not os.fspath(keep):
        raise ConfigError(f'keep: {keep!r:.80} is not the path of a file; write keep="run.jsonl"', key="keep")
    path = Path(os.fspath(keep))
    if path.is_dir():
        raise ConfigError(f"keep: {path} is a folder; name a file in it", key="keep", file=str(path))
    if not path.parent.is_dir():
        raise invalid_keep_error(path, f"the folder {path.parent} does not exist; create it first")
    return path
