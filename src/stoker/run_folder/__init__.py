"""Runs that can be stopped at any moment and gone on with: a folder, a log of results, and files replaced whole.

    with contextlib.closing(open_run(Path("runs"), app="mine", prefix="mine", parameters=..., options=...)) as folder:
        with folder.log(key=("id",)) as log:            results so far; a key that is there is not written again
            log.append([{"id": 7, "answer": "yes"}])
        folder.finish(name="results.jsonl", write=...)  the final file, moved into place whole

Two runs with equal `parameters` are the same run: the second goes on where the first was stopped. A folder that cannot
be used raises ConfigError, which names it; a disk that takes no more raises StokerError, and what is there stays whole.
"""

from __future__ import annotations

from stoker.run_folder.folder import RunFolder, is_finished, open_run, read_options
from stoker.run_folder.record_log import Record, RecordLog
from stoker.run_folder.whole_file import write_whole

__all__ = ["Record", "RecordLog", "RunFolder", "is_finished", "open_run", "read_options", "write_whole"]
