"""The keeper of a detached run starts the program and writes its exit status.

    python -m stoker.manager.cli.run_keeper RUN_FOLDER COMMAND...

The keeper leads its own process session (setsid), so that Ctrl-C and closed terminals do not end it. The keeper
forwards SIGTERM and SIGINT. If the keeper is killed, the program continues, and its exit status stays unknown.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from stoker import locks
from stoker.manager.cli.runs import DetachedRun, RunEnd, RunFile
from stoker.manager.executor.detached import RUN_FOLDER_VARIABLE
from stoker.whole_files import write_whole


def main(arguments: list[str]) -> int:
    run, command = DetachedRun(Path(arguments[0])), arguments[1:]
    lock = os.open(run.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    locks.try_lock(lock)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    blocked = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    began_at = time.time()
    program = subprocess.Popen(
        [sys.executable, "-P", "-m", "stoker.manager.cli.entry", *command],  # -P, as in the `stoker` script
        env={**os.environ, RUN_FOLDER_VARIABLE: str(run.path), "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked),
    )

    def forward(number: int, frame: object) -> None:
        del frame
        program.send_signal(number)

    for number in blocked:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    facts = RunFile(
        name=run.name,
        command=("stoker", *command),
        folder=os.getcwd(),
        host=socket.gethostname(),
        machine=locks.machine_id(),
        pid=program.pid,
        pid_started=locks.process_start_ticks(program.pid),
        began_at=began_at,
    )
    try:
        write_whole(run.file, msgspec.json.encode(facts), sync=True)
    except OSError as error:  # stop the program, because no command can find it without this file
        program.kill()
        program.wait()
        sys.exit(f"{run.file}: cannot be written: {error.strerror}; the program was stopped")
    code = program.wait()
    status = code if code >= 0 else 128 - code
    write_whole(run.end_file, msgspec.json.encode(RunEnd(status, time.time())), sync=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
