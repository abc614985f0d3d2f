"""What the executables in the pool's `bin` run: `python -m batch.condor.commands FOLDER NAME ARGUMENTS...`"""

from __future__ import annotations

import sys
from pathlib import Path

from batch.condor import act, query


def main(folder: Path, command: str, arguments: list[str]) -> int:
    """Be one of HTCondor's commands; its exit code."""
    if command == "condor_q":
        return query.condor_q(folder, arguments)
    if command == "condor_history":
        return query.condor_history(folder, arguments)
    if command == "condor_submit":
        from batch.condor import submit  # the bindings take a moment to load, and nobody else needs them

        return submit.main(folder, arguments)
    return act.main(folder, command, arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
