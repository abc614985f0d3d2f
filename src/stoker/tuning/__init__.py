"""Soft prompts tuned beside a hot model, on one device or on a gang of them, begun from a bank's best text.

    job = read_job("facts.toml")                 what a user asks for (PromptTuner, Table 3)
    samples = read_samples(job.data)             pairs of input and target
    tuned = run_job(model, Order(job, samples))  inside a call: `model` is a causal LM context; every rank calls it
    write_tuned(tuned, folder)                   what `peft.PeftModel.from_pretrained` reads

Each name is resolved on first use: jobs, samples and results need no PyTorch, so a login node reads them. `run_job` and
`fill_bank` need it, and run inside libraries: write `tuning.run_job(...)` there, not `from stoker.tuning import`.

job.py, samples.py    a job and its data
encoding.py           samples and prompts as tokens; what is too long for the model
batches.py            which samples an iteration is of, and which a rank computes
softprompt.py         PEFT's soft prompt on a context's model, and off it again
passes.py             gradients and measures
metrics.py            accuracy, ROUGE-L, BLEU and loss, as sums that ranks add up
exchange.py, store.py how ranks meet and add up
checkpoint.py         a job's state as bytes and as a file
pace.py               where the time goes, and how much is left
tune.py               the loop
bank/, prompts.py     candidates for initial prompts, and the search among them by score; those that ship
budget.py             what a lookup in the bank may take
initial.py            the text that a soft prompt begins as, from the bank if it has none
order.py, call.py     what a call is given, and all of the above as a call on a library
result.py             what comes back
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.tuning.bank.candidate import Candidate, read_candidates
    from stoker.tuning.budget import is_over, read_paces
    from stoker.tuning.call import fill_bank, run_job
    from stoker.tuning.job import Job, Metric, digest_job, read_job
    from stoker.tuning.metrics import refuse_unreachable
    from stoker.tuning.order import BankPlace, Order, Saved, pack, unpack
    from stoker.tuning.prompts import SHIPPED_PROMPTS
    from stoker.tuning.result import RESULT, Tuned, write_tuned
    from stoker.tuning.samples import Sample, digest_samples, read_samples, split

__all__ = [
    "RESULT",
    "SHIPPED_PROMPTS",
    "BankPlace",
    "Candidate",
    "Job",
    "Metric",
    "Order",
    "Sample",
    "Saved",
    "Tuned",
    "digest_job",
    "digest_samples",
    "fill_bank",
    "is_over",
    "pack",
    "read_candidates",
    "read_job",
    "read_paces",
    "read_samples",
    "refuse_unreachable",
    "run_job",
    "split",
    "unpack",
    "write_tuned",
]

_HOME = {
    "BankPlace": "order",
    "Candidate": "bank.candidate",
    "Job": "job",
    "Metric": "job",
    "Order": "order",
    "RESULT": "result",
    "SHIPPED_PROMPTS": "prompts",
    "Sample": "samples",
    "Saved": "order",
    "Tuned": "result",
    "digest_job": "job",
    "digest_samples": "samples",
    "fill_bank": "call",
    "is_over": "budget",
    "pack": "order",
    "read_candidates": "bank.candidate",
    "read_job": "job",
    "read_paces": "budget",
    "read_samples": "samples",
    "refuse_unreachable": "metrics",
    "run_job": "call",
    "split": "samples",
    "unpack": "order",
    "write_tuned": "result",
}
"""The module of this package in which each name is."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stoker.tuning' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"stoker.tuning.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
