from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from stoker.errors import StokerError
from stoker.manager.cli.main import cli


def write_commands(folder: Path, **texts: str) -> None:
    """Write shell scripts into a folder."""
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


class Stoker:
    """Runs the command line in this process: `stoker("status", "--json")`. `exception` is None, a StokerError or a
    SystemExit.
    """

    def __call__(self, *arguments: str) -> Result:
        result = CliRunner().invoke(cli, list(arguments))
        if result.exception and not isinstance(result.exception, StokerError | SystemExit):
            raise result.exception
        return result

    def ok(self, *arguments: str) -> Result:
        result = self(*arguments)
        assert result.exit_code == 0, result.exception or result.output
        return result
