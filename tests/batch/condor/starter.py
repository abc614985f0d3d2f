"""Run one job in its slot, and kill all processes that the job leaves."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

_SUBREAPER = 36


def main(folder: Path) -> None:
    sys.stdin.read()  # the schedd closes stdin when the job's files are in place
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    start = json.loads((folder / "start.json").read_text())
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, lambda number, _frame: asked.append(number))
    try:
        with open(start["stdin"], "rb") as given, open(start["out"], "wb") as out, open(start["err"], "wb") as err:
            job = subprocess.Popen(
                start["command"], cwd=start["cwd"], env=start["environment"], stdin=given, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        _write(
            folder,
            {
                "failure": f"Failed to execute '{start['command'][0]}': (errno={error.errno}: '{error.strerror}')",
                "errno": error.errno,
            },
        )
        return
    told_at = 0.0
    while job.poll() is None:
        if asked and not told_at:
            told_at = time.monotonic()
            job.send_signal(signal.SIGTERM)
        if signal.SIGQUIT in asked or (told_at and time.monotonic() - told_at > start["kill_s"]):
            job.kill()
        time.sleep(0.02)
    _kill_rest()
    code = job.returncode
    _write(folder, {"signal": -code} if code < 0 else {"code": code})


def _kill_rest() -> None:
    while left := psutil.Process().children(recursive=True):
        for process in left:
            try:
                process.kill()
                process.wait(1)
            except psutil.Error:
                continue


def _write(folder: Path, ending: dict[str, object]) -> None:
    draft = folder / "exit.draft"
    draft.write_text(json.dumps(ending))
    os.replace(draft, folder / "exit.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
