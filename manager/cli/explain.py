"""`stoker explain`: why a call, pilot, library or context is where it is."""

from __future__ import annotations

import datetime
import difflib

import click

from stoker.errors import SessionError
from stoker.manager.cli import console
from stoker.manager.cli.sessions import names_in, status_of, story_of
from stoker.manager.protocol.to_client import Story


@click.command()
@click.argument("subject")
@click.option("--session", default="", help="Id of the session, or its folder; the newest by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def explain(subject: str, session: str, as_json: bool) -> None:
    """Why SUBJECT is where it is: a call (c-12), a pilot, a library (lib-3) or a context (llm-7f3a)."""
    _, story, over = story_of(session, subject)
    if as_json:
        console.json({"over": over, "story": story})
    elif story.found:
        if over:
            console.note(f"{over}; this is from its journal")
        console.lines(render(story))
    if not story.found:
        message = f"{story.subject}: {story.headline}" + ("" if as_json else _nearest(session, subject))
        raise SessionError(message)


def render(story: Story) -> list[str]:
    """The lines of `stoker explain`. Times are of the day; the date stands where it changes."""
    kind = "call " if story.subject.startswith("c-") else "library " if story.subject.startswith("lib-") else ""
    out, day = [f"{kind}{story.subject}  {story.headline}"], None
    today = datetime.date.today()
    for line in story.lines:
        when = datetime.datetime.fromtimestamp(line.at)
        if when.date() != (day or today):
            out.append(f"  {when:%Y-%m-%d}")
        day = when.date()
        first, *rest = line.text.split("\n")
        out.append(f"  {when:%H:%M:%S}  {first}")
        out += [f"            {more}" for more in rest]
    return out


def _nearest(session: str, subject: str) -> str:
    try:
        names = names_in(status_of(session)[1].status)
    except SessionError:
        return ""
    close = difflib.get_close_matches(subject, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"\nthere are {', '.join(names[:12])}; calls are written c-0, c-1, …" if names else ""
