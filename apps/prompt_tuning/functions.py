"""The context and the functions of this application that run on a pilot.

    recipe = model_recipe(language_model, "models/small", preload=PRELOAD)      a value: nothing is loaded yet
    tuned = tune_prompt.with_options(context=recipe, gang=(1, 4), deadline="15 min")(order)      a future

The loader under `@context` runs once in a library. The first argument of a function under `@app` is the result of the
loader. A gang calls the function on several devices simultaneously, with one rank per device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stoker import app, context, tuning
from stoker.contexts import load_causal_lm
from stoker.tuning import BankPlace, Candidate, Order, Tuned

if TYPE_CHECKING:
    from stoker.contexts import CausalLM

PRELOAD = ("peft", "stoker.tuning.call")
"""Modules that a pilot imports early, in addition to the model's modules, because the import of PEFT takes seconds."""


@context  # its code and docstring equal those of `stoker.causal_lm`, so that both have one key
def language_model(
    path: str, *, dtype: str = "auto", snapshot: bool = True, threads: int = 0, engine: str = "auto"
) -> CausalLM:
    """Load the model once; the process then serves call after call."""
    return load_causal_lm(path, dtype=dtype, snapshot=snapshot, threads=threads, engine=engine)


@app
def tune_prompt(model: CausalLM, order: Order) -> Tuned:
    """Tune a soft prompt for this job. Every rank of a gang calls this function; the result of rank 0 counts.

    Raises the errors of `stoker.tuning.run_job`.
    """
    return tuning.run_job(model, order)


@app
def build_bank(model: CausalLM, place: BankPlace, candidates: Sequence[Candidate]) -> int:
    """Add candidate prompts to the bank of the model, created if missing. Return the number of prompts in the bank.

    Raises StokerError for the bank of another model, or a folder that cannot be written.
    """
    return tuning.fill_bank(model, place, candidates)
