"""Soft-prompt tuning of a loaded model, on one device or a gang. The initial prompt is the best text in a prompt bank.

    job = read_job("facts.toml")                 the job of a user (PromptTuner, Table 3)
    samples = read_samples(job.data)             pairs of input and target
    tuned = run_job(model, Order(job, samples))  in a call, on every rank; `model` is a causal LM context
    write_tuned(tuned, folder)                   a folder for `peft.PeftModel.from_pretrained`

Python imports each name on first use. `run_job` and `fill_bank` need PyTorch, which only libraries have: in a call,
write `tuning.run_job(...)`, not `from stoker.tuning import run_job`.

`call.py` runs a job on a library, `tune.py` contains the training loop, and `bank/` finds initial prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.startup import import_on_first_use

if TYPE_CHECKING:
    from stoker.tuning.bank.candidates import SHIPPED_PROMPTS, Candidate, read_candidates
    from stoker.tuning.call import fill_bank, run_job
    from stoker.tuning.job import Job, Metric, Sample, digest_job, digest_samples, read_job, read_samples, split
    from stoker.tuning.metrics import refuse_unreachable
    from stoker.tuning.order import RESULT, BankPlace, Order, Saved, Tuned, pack, unpack, write_tuned
    from stoker.tuning.pace import is_over, read_paces

__all__ = [
    "RESULT", "SHIPPED_PROMPTS", "BankPlace", "Candidate", "Job", "Metric", "Order", "Sample", "Saved", "Tuned",
    "digest_job", "digest_samples", "fill_bank", "is_over", "pack", "read_candidates", "read_job", "read_paces",
    "read_samples", "refuse_unreachable", "run_job", "split", "unpack", "write_tuned",
]  # fmt: skip

_NAMES = {
    "bank.candidates": "SHIPPED_PROMPTS Candidate read_candidates",
    "call": "fill_bank run_job",
    "job": "Job Metric Sample digest_job digest_samples read_job read_samples split",
    "metrics": "refuse_unreachable",
    "order": "RESULT BankPlace Order Saved Tuned pack unpack write_tuned",
    "pace": "is_over read_paces",
}
__getattr__ = import_on_first_use("stoker.tuning", _NAMES)


def __dir__() -> list[str]:
    return __all__
