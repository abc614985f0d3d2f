"""What runs beside a model: one job, as one rank of its gang; and the reading of prompts for a bank.

A login node imports this module, to name the functions; `stoker.tuning` imports what they need in the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stoker import tuning
from stoker.tuning import BankPlace, Candidate, Order, Tuned

if TYPE_CHECKING:
    from stoker.contexts import CausalLM

PRELOAD = ("peft", "stoker.tuning.call")
"""What a pilot imports ahead, beside what the model itself wants: PEFT alone takes seconds."""


def tune_prompt(model: CausalLM, order: Order) -> Tuned:
    """Tunes a soft prompt for this job; every rank of a gang calls it, and rank 0's result counts.

    Raises as `stoker.tuning.run_job`.
    """
    return tuning.run_job(model, order)


def build_bank(model: CausalLM, place: BankPlace, candidates: Sequence[Candidate]) -> int:
    """Makes the bank of this model from these prompts and those that are in it; how many it has then.

    Raises StokerError for a bank of another model, and where the folder cannot be written.
    """
    return tuning.fill_bank(model, place, candidates)
