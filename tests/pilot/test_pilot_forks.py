"""Child processes of a library end at SIGTERM, and the library does not."""

from __future__ import annotations

import subprocess
import sys

from polling import PATIENCE_S

PROGRAM = """
import os, signal, time
from stoker.pilot.library.process import ignore_sigterm_except_in_children

# The child sleeps before the function below can reset its action for SIGTERM. The signal arrives in this time.
os.register_at_fork(after_in_child=lambda: (os.write(ready, b"."), time.sleep(0.3)))
ignore_sigterm_except_in_children()
begun, ready = os.pipe()
before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
child = os.fork()
if not child:
    time.sleep(3600)
os.read(begun, 1)
os.kill(child, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
os.kill(os.getpid(), signal.SIGTERM)
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
print("alive")
"""


def test_child_ends_at_a_sigterm_that_arrives_during_its_fork():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")
