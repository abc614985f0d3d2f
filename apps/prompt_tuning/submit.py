"""`tune(job)`: run a job as one call on its loaded model, with enough devices for its deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.apps.common.models_file import model_digest_or_name
from stoker.apps.prompt_tuning.board import DEVICES
from stoker.apps.prompt_tuning.functions import PRELOAD, language_model, tune_prompt
from stoker.contexts import Recipe, model_recipe
from stoker.errors import ConfigError
from stoker.sessions import Features
from stoker.tuning import (
    BankPlace,
    Job,
    Order,
    Sample,
    digest_job,
    digest_samples,
    is_over,
    read_job,
    read_paces,
    read_samples,
    refuse_unreachable,
    split,
)

if TYPE_CHECKING:
    from stoker.sessions import AppCallFuture, StokerApp

_LETTERS_PER_TOKEN = 4.0
_PROMPT_TOKENS = 32


class CheckedJob(msgspec.Struct, frozen=True):
    """A job that passed every check that is possible without loading the model."""

    job: Job
    samples: tuple[Sample, ...]
    recipe: Recipe
    model: str
    """The identity of the model: the digest of its content, or its name on the hub."""

    @property
    def digest(self) -> str:
        """The digest of all inputs that determine the result."""
        return digest_job(self.job, digest_samples(self.samples), self.model)


def tune(
    job: Job | str | os.PathLike[str],
    *,
    samples: Sequence[Sample] | None = None,
    gang: int | tuple[int, int] = (1, DEVICES),
    late: str = "run",
    bank: str | os.PathLike[str] | None = "",
) -> AppCallFuture:
    """Submit a job to the loaded session (`stoker.load`).

    Args:
        job: a `Job`, or the path of a `job.toml`.
        samples: the data of the job, if it is not in the file that the job names.
        gang: the number of replicas, or the range `(smallest, largest)` for the scheduler.
        late: what happens to a job that cannot meet its deadline: `"run"` runs it on idle devices; `"drop"` drops it,
            and the future raises CallDroppedError.
        bank: the folder of the prompt bank; empty: the model's own, in the state folder; None: no bank.

    Returns:
        The future of the `Tuned` result.

    Raises:
        ConfigError: for an invalid job or invalid data.
        RecipeError: for a missing model.
        SessionError: without a loaded site.
    """
    ready = check_job(job if isinstance(job, Job) else read_job(job), samples=samples)
    app, order = make_tuning_call(ready, gang=gang, late=late, bank=bank)
    return app(order)


def check_job(job: Job, *, samples: Sequence[Sample] | None = None) -> CheckedJob:
    """Check a job, and return it with its data and model. Raises the errors of `tune`."""
    job.refuse_past_deadline(now_s=time.time())
    given = read_samples(job.data) if samples is None else tuple(samples)
    parts = split(given, data=job.data, seed=job.training.seed)
    refuse_unreachable(job, [sample.target for sample in parts.evaluation])
    recipe, identity = make_tuning_recipe(job.model, devices=job.devices)
    return CheckedJob(job, given, recipe, identity)


def make_tuning_call(
    ready: CheckedJob,
    *,
    gang: int | tuple[int, int] = (1, DEVICES),
    late: str = "run",
    bank: str | os.PathLike[str] | None = "",
    start: bytes = b"",
) -> tuple[StokerApp, Order]:
    """Return the decorated function that runs a job, and its argument. `start`: the state of an earlier attempt."""
    job, now = ready.job, time.time()
    deadline = job.deadline_s(submitted_s=now)
    slo_s = 0.0 if deadline is None else deadline - now
    if deadline is not None and slo_s <= 0:
        job.refuse_past_deadline(now_s=now)
    place = None if bank is None else BankPlace.of(ready.model, folder=bank)
    order = Order(job=job, samples=ready.samples, bank=place, slo_s=slo_s, start=start)
    app = tune_prompt.with_options(
        context=ready.recipe, deadline=slo_s or None, late=late, gang=limit_gang_to_batch(job, gang),
        features=_estimate_features(order),
    )  # fmt: skip
    return app, order


def make_tuning_recipe(model: str, *, devices: int = 1) -> tuple[Recipe, str]:
    # Models cannot be tuned in vLLM, so use the transformers engine.
    recipe = model_recipe(language_model, model, engine="transformers", preload=PRELOAD, devices=devices)
    return recipe, model_digest_or_name(recipe, model)


def limit_gang_to_batch(job: Job, gang: int | tuple[int, int]) -> tuple[int, int]:
    """Limit the gang sizes to the number of samples in a batch. Raises ConfigError if no size remains."""
    least, largest = gang if isinstance(gang, tuple) else (gang, gang)
    most = job.training.batch
    if least > most:
        raise ConfigError(
            f"gang: {least} devices for a [training] batch of {most} samples; give fewer devices", key="gang"
        )
    return least, max(least, min(largest, most))


def _estimate_features(order: Order) -> Features:
    job = order.job
    letters = sum(len(sample.input) + len(sample.target) for sample in order.samples) / len(order.samples)
    prompt = job.prompt.virtual_tokens or len(job.prompt.initial) / _LETTERS_PER_TOKEN or _PROMPT_TOKENS
    tokens = round(job.training.batch * (letters / _LETTERS_PER_TOKEN + prompt))
    bank = None if job.prompt.initial.strip() else order.bank
    # A job with a looked-up prompt needs fewer iterations to its target than a job with a given prompt.
    kind = "all iterations" if job.until.reach is None else "bank" if bank is not None else "prompt"
    shared_s = _estimated_bank_lookup_s(bank, order)
    return Features(items=job.until.iterations, input_length=max(1, tokens), kind=kind, shared_s=shared_s)


def _estimated_bank_lookup_s(bank: BankPlace | None, order: Order) -> float:
    """Return the estimated device seconds of the bank lookup, from earlier lookups; 0 if unknown or unneeded."""
    if bank is None:
        return 0.0
    known = read_paces(Path(bank.folder), virtual_tokens=order.job.prompt.virtual_tokens).values()
    lookup_s = max((pace.lookup_s for pace in known), default=0.0)
    return 0.0 if is_over(lookup_s, slo_s=order.slo_s) else lookup_s
