"""One call that measures a loaded model, with its progress line."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

from stoker.console import Screen
from stoker.contexts import Recipe
from stoker.sessions import AppCallFuture, Session, StokerApp, facts_of, sent_call

_PARTS = 100
_LOOK_S = 0.5


def measure(session: Session, app: StokerApp, recipe: Recipe, request: Any, *, screen: Screen) -> Any:
    """What the app gives for a request, on the context of a recipe. Shows how far it is, as it says itself; raises what
    it raises."""
    ask = facts_of(session, {recipe.key})
    with screen.progress(total=_PARTS, done=0, noun="profile", facts=ask) as progress:
        future = app.with_options(context=recipe)(request)
        for done in _parts_done(future):
            progress.advance(done - progress.done)
    return future.result()


def _parts_done(future: AppCallFuture) -> Iterator[int]:
    """How many hundredths the call has done, until it ends."""
    while True:
        try:
            future.exception(timeout=_LOOK_S)
            return
        except concurrent.futures.TimeoutError:
            call = sent_call(future)
            said = call.progress if call is not None else None
            if said is not None and said.total:
                yield int(_PARTS * said.done / said.total)
