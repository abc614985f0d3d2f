"""A story as lines for people: what `stoker explain` prints, and `print(session.explain("c-12"))`. Pure."""

from __future__ import annotations

import datetime

from stoker.manager.protocol.to_client import Story


def render(story: Story, *, today: datetime.date | None = None) -> list[str]:
    """The lines of `stoker explain`. Times are of the day; the date stands where it changes, and first unless it is
    that of `today`."""
    kind = "call " if story.subject.startswith("c-") else "library " if story.subject.startswith("lib-") else ""
    out, day = [f"{kind}{story.subject}  {story.headline}"], today
    for line in story.lines:
        when = datetime.datetime.fromtimestamp(line.at)
        if when.date() != day:
            out.append(f"  {when:%Y-%m-%d}")
        day = when.date()
        first, *rest = line.text.split("\n")
        out.append(f"  {when:%H:%M:%S}  {first}")
        out += [f"            {more}" for more in rest]
    return out
