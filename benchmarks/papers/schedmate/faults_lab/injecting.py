"""Have the kernel answer system calls of this process on one file with an error: by ptrace, with strace's injection.

The library under test is not touched: its own system call returns the error, as it does when a file server has lost the
file. Needs strace, and the right to trace the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

CALLS = {"open": "openat,open", "read": "read,pread64,readv,preadv,mmap", "write": "write,pwrite64,writev"}
_LIMIT_S = 20.0


@contextmanager
def failing(path: str, error: str, *, when: str) -> Iterator[None]:
    """While this lasts, `open` or `read` (and mmap) of a file fail with an error such as ESTALE."""
    calls = CALLS[when]
    command = ["strace", "-f", "-p", str(os.getpid()), "-P", path, "-e", f"trace={calls}"]
    command += ["-e", f"inject={calls}:error={error}", "-o", "/dev/null"]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert tracer.stderr is not None
    said = tracer.stderr.readline()  # `strace: Process 4711 attached ...`
    if b"attached" not in said:
        tracer.kill()
        tracer.wait()
        raise SystemExit(f"strace cannot attach: {said!r}")
    try:
        yield
    finally:
        tracer.send_signal(signal.SIGTERM)
        tracer.wait(_LIMIT_S)
        tracer.stderr.close()
