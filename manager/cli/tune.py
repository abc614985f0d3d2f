"""`stoker tune`: prompt-tuning jobs with deadlines. What it does is an application's, and is looked up when it is
wanted: applications stand above this package."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

_CLI = "stoker.apps.prompt_tuning.cli"


class Tune(click.Group):
    """The commands of the application."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        """In the order in which they are used."""
        return list(self._commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The application's own command."""
        return self._commands().get(cmd_name)

    def _commands(self) -> Mapping[str, click.Command]:
        found: Mapping[str, click.Command] = importlib.import_module(_CLI).commands
        return found


@click.group(cls=Tune, short_help="Tune soft prompts by their deadlines.")
def tune() -> None:
    """Tune soft prompts by their deadlines: submit jobs, see how they stand, report what came of them."""
