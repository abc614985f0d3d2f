"""`python -P -m stoker.pilot.library SOCKET`: a library in a fresh interpreter, started by a zygote."""

from __future__ import annotations

import os
import sys

from stoker.pilot.library.main import serve

if __name__ == "__main__":
    number = int(sys.argv.pop())  # removed: a user's function that reads the program's arguments must not find it
    serve(number)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
