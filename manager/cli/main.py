"""The `stoker` command group, which finds the subcommands and prints the errors of subcommands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

from stoker.errors import StokerError
from stoker.folders import FOLDER_REMOVED, is_working_folder_removed
from stoker.manager.cli import apps, console
from stoker.manager.cli.apps import EntryPointGroup
from stoker.startup import RELEASE

COMMAND_MODULES = {
    "run": "apps", "init": "init", "up": "up", "down": "down", "attach": "status", "doctor": "doctor",
    "status": "status", "calls": "calls", "explain": "explain", "logs": "logs", "replay": "replay", "plan": "plan",
    "simulate": "simulate", "sessions": "sessions", "caches": "sessions",
}  # fmt: skip
"""The module that defines each of Stoker's own commands. The module is imported when the command runs."""


class CommandGroup(EntryPointGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMAND_MODULES, *super().list_commands(ctx), *apps.list_entry_point_names(apps.COMMANDS)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click
        if cmd_name in COMMAND_MODULES:
            own: click.Command = getattr(
                importlib.import_module(f"stoker.manager.cli.{COMMAND_MODULES[cmd_name]}"), cmd_name
            )
            return own
        name = apps.find_entry_point_name(apps.COMMANDS, cmd_name)
        return apps.load_command(apps.COMMANDS, name) if name else None


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(RELEASE, prog_name="stoker", message="%(prog)s %(version)s")
def cli() -> None:
    """Stoker keeps models hot on GPUs that you do not own."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. Exit codes: 0, 1 after a failure, 2 after wrong usage, 130 after Ctrl-C."""
    try:
        code = cli.main(arguments, prog_name="stoker", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    except click.Abort as abort:
        # Click converts every EOFError to Abort, as if the user pressed Ctrl-D. Here, EOFError is an error in Stoker.
        if isinstance(abort.__cause__, EOFError):
            raise abort.__cause__ from None
        code = 130
    except KeyboardInterrupt:
        code = 130
    except StokerError as error:
        console.error(str(error))
        code = 1
    except FileNotFoundError:
        if not is_working_folder_removed():
            raise
        console.error(FOLDER_REMOVED)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
