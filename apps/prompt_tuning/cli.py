"""The options of `stoker tune`. `stoker run prompt_tuning` is an alias of `stoker tune submit`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from stoker import console
from stoker.apps.common.command_line import WIDE, add_site_and_session_options
from stoker.apps.prompt_tuning import board, report
from stoker.apps.prompt_tuning.board import DEVICES, RUNS, SubmissionOptions, read_board
from stoker.console import Screen
from stoker.errors import ConfigError

_FOLDER = click.Path(path_type=Path)
_WATCH_EVERY_S = 1.0
_RECENT = 20
"""Number of finished jobs to show."""


def parse_gang_range(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    """Parse the smallest and the largest number of devices, as in `4` or `1-4`."""
    least, dash, most = value.partition("-")
    if not least.isdigit() or (dash and not most.isdigit()):
        raise click.BadParameter(f"{value} is not a number of devices or a range; write 4 or 1-4", context, parameter)
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise click.BadParameter(f"{value}: a range starts at 1 or more and rises, as in 1-4", context, parameter)
    return found


@click.command("submit", context_settings=WIDE)
@click.argument("jobs", nargs=-1, required=True, type=_FOLDER, metavar="JOB.toml...")
@add_site_and_session_options
@click.option(
    "--gang", metavar="N-M", callback=parse_gang_range, default=f"1-{DEVICES}", show_default=True,
    help="Replicas per job.",
)  # fmt: skip
@click.option(
    "--late", type=click.Choice(["run", "drop"]), default="run", show_default=True,
    help="A job that cannot meet its deadline: run it when no other job needs its devices, or drop it.",
)  # fmt: skip
@click.option(
    "--wait/--detach", default=True, help="Wait for the jobs, or leave them to a process in the background. [wait]"
)
@click.option("--bank", metavar="DIR", default="", help="The prompt bank. [the model's own, in the state folder]")
@click.option("--no-bank", is_flag=True, help="Look up no initial prompts, and keep no tuned prompts.")
@click.option("--out", metavar="DIR", type=_FOLDER, default=RUNS, help="The folder for the run folders. [runs]")
@click.option("--fresh", is_flag=True, help="Start a new run, even if an unfinished run of the same job exists.")
@click.option("--serve", metavar="NAME", default="", help="Add the tuned prompt to the models file, under this name.")
@click.option(
    "--models", metavar="MODELS", type=_FOLDER, help="The models file of --serve (docs/serve.md). [models.toml]"
)
@click.option("--json", "json_", is_flag=True, help="The report as JSON on stdout; everything else goes to stderr.")
@click.pass_context
def submit_jobs(
    context: click.Context, /, *, jobs: tuple[Path, ...], wait: bool, bank: str, no_bank: bool, serve: str,
    models: Path | None, json_: bool, **given: Any,
) -> None:  # fmt: skip
    """Tune a soft prompt for each JOB.toml, by its deadline.

    Each job has a run folder with the tuned prompt (for PEFT), the text nearest to the prompt, and the job's cost. A
    job that was stopped resumes from its last checkpoint when it is submitted again.
    """
    from stoker.apps.prompt_tuning.run import submit_and_wait, submit_detached  # Parsl slows down --help

    if bank and no_bank:
        raise click.UsageError("--bank and --no-bank exclude each other; give one")
    if serve and len(jobs) > 1:
        raise click.UsageError(f"--serve {serve} names one tuned prompt; submit one job instead of {len(jobs)} jobs")
    if models and not serve:
        raise click.UsageError("--models is the file of --serve; give --serve NAME too")
    models = models or SubmissionOptions().models
    options = SubmissionOptions(bank=None if no_bank else bank, serve=serve, models=models, **given)
    if wait:
        context.exit(submit_and_wait(jobs, options, screen=Screen(json_only=json_), json=json_))
    context.exit(submit_detached(jobs, options, json=json_))


@click.command("status", short_help="Show tuning jobs: how far each is, and when it ends.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@click.option("--watch", is_flag=True, help="Keep showing the jobs until Ctrl-C, or until all jobs have ended.")
@click.option("--all", "all_", is_flag=True, help=f"Show all ended jobs. [the latest {_RECENT}]")
@click.argument("runs", type=_FOLDER, default=RUNS)
def show_status(*, runs: Path, as_json: bool, watch: bool, all_: bool) -> None:
    """Show the tuning jobs of RUNS [runs]: progress, expected end, and why jobs wait."""
    if watch and as_json:
        raise click.UsageError("--watch and --json exclude each other; repeat the command with --json instead")
    most = None if all_ else _RECENT
    if as_json:
        console.json({"jobs": read_board(runs)})
        return
    if not watch:
        console.lines(board.format_job_board(read_board(runs), now=time.time(), most_over=most))
        return
    with console.redrawn() as place:
        said: list[str] = []
        while True:
            seen = read_board(runs)
            lines = board.format_job_board(seen, now=time.time(), most_over=most)
            if console.is_terminal() or lines != said:
                place.show(lines)
            said = lines
            if all(one.entry.phase.is_over or one.abandoned for one in seen):
                return
            time.sleep(_WATCH_EVERY_S)


@click.command("report", short_help="Show which deadlines were met, and why others were missed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@click.argument("folders", nargs=-1, type=_FOLDER, metavar="[FOLDER]...")
def report_jobs(*, folders: tuple[Path, ...], as_json: bool) -> None:
    """Show met and missed deadlines with reasons, and the result of each job in the run folders [all in runs/]."""
    wanted = folders or (RUNS,)
    found = [report.read_outcome(Path(one.folder)) for folder in wanted for one in read_board(folder)]
    outcomes = [one for one in found if one is not None]
    if not outcomes:
        where = ", ".join(map(str, wanted))
        raise ConfigError(f"{where}: no tuning job is known there; `stoker tune submit job.toml` submits one")
    if as_json:
        console.json({"jobs": [report.job_outcome_to_json(one, now=time.time()) for one in outcomes]})
    else:
        console.lines(report.format_report(outcomes, now=time.time()))


@click.command("bank", short_help="Add prompts to the bank of a model.", context_settings=WIDE)
@click.argument("file", type=_FOLDER, metavar="[PROMPTS]", required=False)
@click.option("--model", metavar="PATH", default="", help="A folder, a .gguf file or a hub name. [the default model]")
@click.option("--bank", metavar="DIR", default="", help="The bank's folder. [the model's own, in the state folder]")
@add_site_and_session_options
@click.option("--json", "json_", is_flag=True, help="One JSON document on stdout; everything else goes to stderr.")
@click.pass_context
def add_to_bank(context: click.Context, /, *, file: Path | None, model: str, json_: bool, **given: Any) -> None:
    """Add the prompts of the file PROMPTS (.jsonl, .csv, .parquet, with a field `text`) and the shipped prompts to the
    bank of a model. The model reads each prompt once, and all prompts are grouped again.
    """
    from stoker.apps.prompt_tuning.run import add_prompts_to_bank  # here, because Parsl would slow down --help

    options = SubmissionOptions(**given)
    context.exit(add_prompts_to_bank(file, options, model=model, screen=Screen(json_only=json_), json=json_))


command = submit_jobs
"""The command `stoker run prompt_tuning`."""


class CommandsInOrder(click.Group):
    """A command group that lists its commands in order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        return list(self.commands)


@click.group(cls=CommandsInOrder, short_help="Tune soft prompts by their deadlines.")
def tune() -> None:
    """Tune soft prompts by their deadlines: submit jobs, show their state, report their results."""


for name, each in {"submit": submit_jobs, "status": show_status, "report": report_jobs, "bank": add_to_bank}.items():
    tune.add_command(each, name)
