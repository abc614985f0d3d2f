"""`python -P -m stoker.pilot.library SOCKET`: runs a library in a new interpreter that a zygote has started."""

from __future__ import annotations

import os
import sys

from stoker.pilot.library.main import serve

if __name__ == "__main__":
    number = int(sys.argv.pop())  # hidden from user functions that read sys.argv
    serve(number)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
