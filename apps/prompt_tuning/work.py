"""What runs beside a model: one job, as one rank of its gang.

A login node imports this module, to name the function; what the function needs is imported in the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stoker.apps.prompt_tuning.bank.candidate import Candidate
from stoker.apps.prompt_tuning.order import BankPlace, Order

if TYPE_CHECKING:
    from stoker.apps.prompt_tuning.tuning.result import Tuned
    from stoker.contexts.engine import CausalLM

PRELOAD = ("peft", "stoker.apps.prompt_tuning.tuning.call")
"""What a pilot imports ahead, beside what the model itself wants: PEFT alone takes seconds."""


def tune_prompt(model: CausalLM, order: Order) -> Tuned:
    """Tunes a soft prompt for this job; every rank of a gang calls it, and rank 0's result counts.

    Raises as `tuning.tune`.
    """
    from stoker.apps.prompt_tuning.tuning.call import run

    return run(model, order)


def build_bank(model: CausalLM, place: BankPlace, candidates: Sequence[Candidate]) -> int:
    """Makes the bank of this model from these prompts and those that are in it; how many it has then.

    Raises StokerError for a bank of another model, and where the folder cannot be written.
    """
    from pathlib import Path

    from stoker.apps.prompt_tuning.bank.build import ensure_bank
    from stoker.apps.prompt_tuning.bank.scoring import reader, reading_of
    from stoker.contexts.ambient import progress

    bank = ensure_bank(
        Path(place.folder), candidates, model=place.model, reading=reading_of(), read=reader(model), again=True,
        progress=progress,
    )  # fmt: skip
    return len(bank.layers)
