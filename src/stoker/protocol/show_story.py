"""A story as lines for people: what `stoker explain` prints, and `print(session.explain("c-12"))`. Pure."""

from __future__ import annotations

import datetime
from typing import TypeVar

import msgspec

from stoker.contexts import payload_layout
from stoker.protocol.status import StoryFacts

S = TypeVar("S", bound=StoryFacts)


def with_arguments(story: S) -> S:
    """The same story, with the arguments of its call in short in place of the bytes that carried them."""
    if not story.payload:
        return story
    return msgspec.structs.replace(story, payload=b"", arguments=payload_layout.of_payload(story.payload))


def render(story: StoryFacts, *, today: datetime.date | None = None) -> list[str]:
    """The lines of `stoker explain`. Times are of the day; the date stands where it changes, and first unless it is
    that of `today`."""
    story = with_arguments(story)
    kind = "call " if story.subject.startswith("c-") else "library " if story.subject.startswith("lib-") else ""
    function, gap, rest_of_it = story.headline.partition("  ")
    headline = f"{function}{story.arguments}{gap}{rest_of_it}" if story.arguments else story.headline
    out, day = [f"{kind}{story.subject}  {headline}"], today
    for line in story.lines:
        when = datetime.datetime.fromtimestamp(line.at)
        if when.date() != day:
            out.append(f"  {when:%Y-%m-%d}")
        day = when.date()
        first, *rest = line.text.split("\n")
        out.append(f"  {when:%H:%M:%S}  {first}")
        out += [f"            {more}" for more in rest]
    return out
