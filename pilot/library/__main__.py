"""`python -P -m stoker.pilot.library SOCKET`: a library in a fresh interpreter, started by a zygote."""

from __future__ import annotations

import os
import sys

from stoker.pilot.library.main import serve

if __name__ == "__main__":
    serve(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
