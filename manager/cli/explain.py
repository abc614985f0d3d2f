"""`stoker explain`: why a call, pilot, library, context or block is where it is."""

from __future__ import annotations

import datetime
import difflib
import re

import click

from stoker.errors import SessionError
from stoker.manager.cli import choosing, console, logged_progress, verdicts
from stoker.manager.cli.sessions import is_several, names_in, status_of, story_of, takes_session
from stoker.protocol import show_story
from stoker.protocol.to_client import Story


@click.command(short_help="Tell why a call, pilot, context or block is where it is.")
@click.argument("subject", default="")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@takes_session(default=choosing.SHOWN_BY_DEFAULT)
def explain(*, subject: str, session: str, as_json: bool) -> None:
    """Tell why SUBJECT is where it is: a call (c-12), a pilot, a library (lib-3), a context (llm-7f3a) or a block (b3).

    Of what has failed it says whose fault that is, by its log: of the program, of what is installed, or of the
    infrastructure, with the lines that show it. Of a call that runs it says how far it is, where its program prints
    that.

    The beginning of a pilot's or a context's name is enough, if no other name begins so. Libraries, pilots and blocks
    that are gone are remembered for a while.
    """
    if not subject:
        raise click.UsageError("name a call, pilot, library, context or block; `stoker calls` lists calls")
    folder, story, over = story_of(session, subject)
    fault = verdicts.verdict_of(folder, story) if story.found else None
    progress = logged_progress.progress_of(folder, story) if story.found and not over else None
    if as_json:
        told = show_story.with_arguments(story)
        console.json({"over": over, "story": told, "verdict": fault, "progress": progress})
    elif story.found:
        if over:
            console.note(f"{over}; what its journal says:")
        console.lines(render(story))
        console.lines(verdicts.show(fault) if fault is not None else ())
        console.lines([logged_progress.show(progress)] if progress is not None else ())
    if not story.found:
        hint = "" if as_json or is_several(story) else _nearest(session, subject)
        message = f"{story.subject}: {story.headline}{hint}"
        raise SessionError(message)


def render(story: Story) -> list[str]:
    """The lines of `stoker explain`."""
    return show_story.render(story, today=datetime.date.today())


def _nearest(session: str, subject: str) -> str:
    try:
        names = names_in(status_of(session)[1].status)
    except SessionError:
        return ""
    close = difflib.get_close_matches(subject, names, n=1, cutoff=0.5)
    if number := re.fullmatch(r"[cC][-_. ]?(\d[\d.]*)", subject):
        close = [f"c-{number[1]}"] if f"c-{number[1]}" != subject else []
    if close:
        return f"; did you mean {close[0]}?"
    return f"\nthere are {', '.join(names[:12])}; calls are written c-0, c-1, …" if names else ""
