"""Run Stoker's TaskVine library in a process like TaskVine's library program: `load` once, then `serve`.

Reads pickled orders from standard input and writes their results. Every order has its own folder, which contains the
function.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from stoker.pilot.taskvine import library, messages


def main() -> None:
    setup, here = pickle.load(sys.stdin.buffer)
    out = os.fdopen(os.dup(1), "wb")  # a copy, because the working library redirects descriptors 1 and 2
    os.chdir(here)
    library.load(setup)
    while True:
        try:
            order, function = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        folder = Path(here) / f"call-{messages.decode_order(order).ticket}"
        folder.mkdir()
        (folder / messages.FUNCTION_FILE).write_bytes(function)
        os.chdir(folder)
        answer = library.serve(order)
        pickle.dump((answer, _stands_in(folder)), out)
        out.flush()
        os.chdir(here)


def _stands_in(folder: Path) -> bool:
    try:
        return os.getcwd() == str(folder)
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main()
