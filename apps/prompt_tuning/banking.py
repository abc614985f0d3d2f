"""`stoker tune bank`: prompts of a file for a model's bank, read from the model where it is hot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import stoker
from stoker.apps.common.calls import session_line
from stoker.apps.prompt_tuning.functions import build_bank
from stoker.apps.prompt_tuning.options import SubmissionOptions
from stoker.apps.prompt_tuning.run import site_of
from stoker.apps.prompt_tuning.submit import recipe_of
from stoker.console import Screen
from stoker.sessions import facts_of, sent_call
from stoker.tuning import SHIPPED_PROMPTS, BankPlace, Candidate, read_candidates

_CHECK_EVERY_S = 0.2


def fill(file: Path | None, options: SubmissionOptions, *, model: str, screen: Screen, json: bool) -> int:
    """Put the prompts of this file into the bank, beside those that ship and those that are there; 0.

    Raises ConfigError for a file that cannot be read, naming its line, RecipeError for a model that is not there,
    SessionError, and StokerError for a folder with the bank of another model.
    """
    every: dict[str, Candidate] = {one.key: one for one in read_candidates(SHIPPED_PROMPTS)}
    if file is not None:
        every |= {one.key: one for one in read_candidates(file)}
    recipe, identity = recipe_of(model)
    place = BankPlace.of(identity, folder=options.bank or "")
    site = None if options.session else site_of(options.site)
    with stoker.load(site, session=options.session or None, progress=False) as session:
        screen.line(session_line(session))
        future = build_bank.with_options(context=recipe)(place, tuple(every.values()))
        ask = facts_of(session, {recipe.key})
        with screen.progress(total=len(every), done=0, noun="prompts", facts=ask) as progress:
            while not _over(future):
                call = sent_call(future)
                if call is not None and call.progress is not None:
                    progress.total = int(call.progress.total)
                    progress.advance(int(call.progress.done) - progress.done)
        held: int = future.result()
    if json:
        screen.json({"bank": place.folder, "model": identity, "prompts": held})
    else:
        screen.line(f"{held:,} prompts in {place.folder}")
    return 0


def _over(future: Any) -> bool:
    try:
        future.exception(_CHECK_EVERY_S)
    except TimeoutError:
        return False
    return True
