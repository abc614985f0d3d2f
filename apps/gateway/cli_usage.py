"""`stoker serve usage`: requests and tokens per key, model and day."""

from __future__ import annotations

import csv
import io
import sqlite3
from collections.abc import Iterator, Sequence

import click

from stoker.apps.gateway.usage import (
    COLUMNS,
    COUNTS,
    DEFAULT_BY,
    DEFAULT_SINCE,
    UsageFile,
    UsageQuery,
    UsageRow,
    first_day,
)
from stoker.console import json as print_json
from stoker.console import line, lines
from stoker.errors import StokerError

_COLUMNS = ("requests", "tokens read", "written", "refused", "failed")


class Since(click.ParamType[str]):
    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return first_day(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command("usage", short_help="Requests and tokens per key.")
@click.option("--key", metavar="NAME", default="", help="Only this key; - is for clients without a key.")
@click.option("--model", metavar="NAME", default="", help="Only this model.")
@click.option(
    "--since", metavar="TIME", type=Since(), default=DEFAULT_SINCE, show_default=True,
    help="The first day: 30d, or a date.",
)  # fmt: skip
@click.option(
    "--by", multiple=True, type=click.Choice(COLUMNS), default=DEFAULT_BY, show_default=True,
    help="A column of the table; may be given several times.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values.")
def usage(*, key: str, model: str, since: str, by: tuple[str, ...], as_json: bool, as_csv: bool) -> None:
    """Show the requests of your gateways and their tokens, of the last 400 days. No gateway needs to run.

    Refused: by a limit of the key, or because the model would answer too late. Failed: answered with another error.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other; give one")
    file, by = UsageFile.usual(), tuple(dict.fromkeys(by))
    try:
        rows = file.read(UsageQuery(since, key, model, by))
    except (OSError, sqlite3.Error) as error:
        raise StokerError(f"{file.path}: cannot be read: {error}; try again, or move the file away") from error
    if as_json:
        print_json({"file": str(file.path), "since": since, "usage": rows})
    elif as_csv:
        lines(_csv(rows, by))
    elif rows:
        lines(_table(rows, by))
    else:
        line(f"no requests since {since}")


def _csv(rows: Sequence[UsageRow], by: Sequence[str]) -> list[str]:
    written = io.StringIO()
    table = csv.DictWriter(written, [*by, *COUNTS], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return written.getvalue().splitlines()


def _table(rows: Sequence[UsageRow], by: Sequence[str]) -> Iterator[str]:
    sums = [sum(row[name] for row in rows) for name in COUNTS]
    blanks = [""] * (len(by) - 1)
    cells = [[*by, *_COLUMNS], *([*row.values()] for row in rows), ["all", *blanks, *sums]]
    texts = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in cells]
    wide = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        padded = (f"{cell:{'<' if place < len(by) else '>'}{wide[place]}}" for place, cell in enumerate(row))
        yield "  " + "  ".join(padded)
