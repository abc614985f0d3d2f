"""Run one job as a call on a library. The ranks of a gang connect, choose the initial prompt, tune it, and store the
result in the bank.

**Initial prompt.** It comes from the job, from the bank, or from the targets of the job. A lookup in the bank scores a
fixed number of prompts (`lookup.default_score_limit`), and must fit into its budget (`pace.BUDGET`). The bank stores
the seconds per score by kind of device and number of virtual tokens. If these seconds are unknown, the call first
measures a few scores.

Rank 0 searches, and every rank scores its share of the prompts. The stored seconds are for one device, because the
scheduler decides before it knows the size of the gang (`Features.shared_s`). Samples for scores are training data.

**Resuming.** After an eviction or the loss of a rank, a call resumes from the last state that rank 0 reported.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from stoker.contexts import ambient, payloads
from stoker.contexts.ambient import Evicted
from stoker.errors import StokerError
from stoker.tuning.bank import build
from stoker.tuning.bank.build import ensure_bank, insert_or_store_prompt
from stoker.tuning.bank.candidates import SHIPPED_PROMPTS, Candidate, instruction, read_candidates
from stoker.tuning.bank.lookup import Score, default_score_limit, look_up
from stoker.tuning.encoding import MOST_TOKENS, encode_samples
from stoker.tuning.exchange import Exchange, meet
from stoker.tuning.job import PLACE, split
from stoker.tuning.order import BankPlace, Initial, Order, Saved, Tuned, pack, unpack
from stoker.tuning.pace import BUDGET, Part, PartClock, ScoringPace, is_over, read_paces, remember
from stoker.tuning.tune import TuningProgress, model_device, purpose, tune
from stoker.units import show_seconds

if TYPE_CHECKING:
    from stoker.contexts.language_model import CausalLM

log = logging.getLogger(__name__)

_LOOKUP_LIMIT_S = 6 * 3600.0
"""Maximum seconds that other ranks wait for the search of rank 0, which may build the bank."""


def choose_initial_prompt(model: CausalLM, order: Order, exchange: Exchange, *, known: Initial | None) -> Initial:
    """Choose the initial prompt, and return it on all ranks. `known`: initial prompt of an earlier attempt. The `note`
    of the result describes the lookup, or says why the bank was not used.
    """
    virtual_tokens = order.job.prompt.virtual_tokens
    samples = _scoring_samples(model, order, tokens=virtual_tokens or MOST_TOKENS)
    score = None
    if samples:
        scorer = build.scorer(model, samples, virtual_tokens=virtual_tokens)
        score = _GangScorer(scorer, exchange, device=model_device(model))
    if exchange.rank:
        if score is not None:
            score.serve()
        return msgspec.msgpack.decode(exchange.share(b"", limit_s=_LOOKUP_LIMIT_S), type=Initial)
    given = order.job.prompt.initial
    try:
        found = known or (Initial(given) if given.strip() else _search(model, order, score, ranks=exchange.size))
    finally:
        if score is not None:
            score.end()
    exchange.share(msgspec.msgpack.encode(found))
    return found


def _search(model: CausalLM, order: Order, score: Score | None, *, ranks: int) -> Initial:
    if order.bank is None:
        note = "the job uses no bank"
    elif score is None:
        note = "the samples are too long to be scored with a prompt before them"
    else:
        try:
            found = _look_up_initial_prompt(model, order, order.bank, score, ranks=ranks)
            if isinstance(found, Initial):
                return found
            note = found
        except (StokerError, OSError, ValueError) as error:
            log.warning("the prompt bank in %s cannot be used: %s", order.bank.folder, error)
            note = f"the bank cannot be used: {error}"
    return Initial(instruction([sample.target for sample in order.samples]), "the targets", note)


def _look_up_initial_prompt(
    model: CausalLM, order: Order, place: BankPlace, score: Score, *, ranks: int
) -> Initial | str:
    """Return the best prompt of the bank, or the reason if a lookup would take too long."""
    folder, kind = Path(place.folder), _kind(model)
    slo_s, virtual_tokens = order.slo_s, order.job.prompt.virtual_tokens
    pace = read_paces(folder, virtual_tokens=virtual_tokens).get(kind)
    if pace is not None and is_over(pace.lookup_s, slo_s=slo_s):
        return _describe_excess(pace.lookup_s, slo_s)
    score_s = pace.score_s if pace is not None else ranks * _measure(score, count=4 * ranks) if slo_s else 0.0
    bank = ensure_bank(folder, read_candidates(SHIPPED_PROMPTS), model=place.model, read=build.reader(model))
    limit = default_score_limit(bank.layers)
    if is_over(limit * score_s, slo_s=slo_s):
        remember(folder, kind, ScoringPace(score_s, limit * score_s, virtual_tokens))
        return _describe_excess(limit * score_s, slo_s)
    began = time.monotonic()
    found = look_up(bank.layers, score, limit=limit)
    took_s = time.monotonic() - began
    remember(folder, kind, ScoringPace(ranks * took_s / found.scores, ranks * took_s, virtual_tokens))
    note = f"loss {found.loss:.3g}, {found.scores} of {len(bank.layers)} scored in {show_seconds(took_s)}"
    return Initial(found.candidate.text, "the bank", note)


def _describe_excess(lookup_s: float, slo_s: float) -> str:
    return f"a lookup takes {show_seconds(lookup_s)}, over {BUDGET:.0%} of the {show_seconds(slo_s)} until the deadline"


def _measure(score: Score, *, count: int) -> float:
    texts = [one.text for one in read_candidates(SHIPPED_PROMPTS)[:count]]
    score(texts[:1])
    began = time.monotonic()
    score(texts)
    return (time.monotonic() - began) / len(texts)


def _scoring_samples(model: CausalLM, order: Order, *, tokens: int) -> list[tuple[str, str]]:
    job = order.job
    training = split(order.samples, data=job.data, seed=job.training.seed).training
    longest = int(getattr(model.model.config, "max_position_embeddings", 0) or 0)
    template = job.data.template
    rows = encode_samples(model.tokenizer, training, template=template)
    fit = [
        (template.replace(PLACE, sample.input), sample.target)
        for sample, row in zip(training, rows, strict=True)
        if not longest or len(row) + tokens <= longest
    ]
    return build.evaluation_samples(fit, seed=job.training.seed)


def _kind(model: CausalLM) -> str:
    device = model_device(model)
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


class _GangScorer:
    """Scores prompts on all ranks together. Rank 0 calls the scorer, the others call `serve`."""

    def __init__(self, score: Score, exchange: Exchange, *, device: torch.device) -> None:
        self._score = score
        self._exchange = exchange
        self._device = device

    def __call__(self, texts: Sequence[str]) -> list[float]:
        if self._exchange.size == 1:
            return list(self._score(texts))
        self._exchange.share(json.dumps(list(texts)).encode())
        return self._part(texts)

    def serve(self) -> None:
        while texts := json.loads(self._exchange.share(b"", limit_s=_LOOKUP_LIMIT_S)):
            self._part(texts)

    def end(self) -> None:
        self._exchange.share(b"[]")

    def _part(self, texts: Sequence[str]) -> list[float]:
        rank, size = self._exchange.rank, self._exchange.size
        losses = torch.zeros(len(texts), dtype=torch.float64, device=self._device)
        if mine := texts[rank::size]:
            losses[rank::size] = torch.tensor(self._score(mine), dtype=torch.float64, device=self._device)
        return [float(loss) for loss in self._exchange.sum(losses).tolist()]


_REPORT_EVERY_S = 0.2
_SILENCE_S = 300.0
"""Maximum seconds to wait for other ranks on a busy machine."""


def run_job(model: CausalLM, order: Order) -> Tuned:
    """Run a job as one rank of its gang.

    Args:
        model: The loaded model.
        order: The job and its samples.

    Returns:
        The tuned prompt.

    Raises:
        Exception: As in `tune.tune`.
    """
    place, job, clock = ambient.gang(), order.job, PartClock()
    saved = unpack(ambient.saved_state(b"")) or unpack(order.start)
    with contextlib.ExitStack() as stack:
        with clock.time(Part.START):
            exchange = stack.enter_context(
                meet(
                    rank=place.rank, size=place.size, rendezvous=place.rendezvous, listener=place.listener,
                    key=place.key, job=purpose(model, job, order.samples), device=str(model_device(model)),
                    limit_s=_SILENCE_S,
                )
            )  # fmt: skip
        with clock.time(Part.BANK):
            initial = choose_initial_prompt(model, order, exchange, known=saved.initial if saved is not None else None)
        job = msgspec.structs.replace(job, prompt=msgspec.structs.replace(job.prompt, initial=initial.text))
        reporter = Reporter(initial, iterations=job.until.iterations, saved=saved)
        try:
            tuned = tune(
                model, job, order.samples, exchange=exchange, clock=clock, report=reporter,
                start=saved.checkpoint if saved is not None else b"", begun=reporter.begun,
            )  # fmt: skip
        except Evicted as evicted:
            raise reporter.leaving(evicted) from None
    tuned = msgspec.structs.replace(tuned, initial_from=str(initial))
    if place.rank == 0 and order.bank is not None:
        with clock.time(Part.BANK):
            add_tuned_prompt_to_bank(model, order.bank, tuned)
    return msgspec.structs.replace(tuned, spent_s={**tuned.spent_s, Part.BANK.value: clock.spent_s()[Part.BANK.value]})


def fill_bank(model: CausalLM, place: BankPlace, candidates: Sequence[Candidate]) -> int:
    """Build the bank of a model.

    Args:
        model: The loaded model.
        place: The bank's folder and model.
        candidates: Prompts to add.

    Returns:
        Number of prompts in the bank.

    Raises:
        StokerError: The bank is for another model, or the folder is not writable.
    """
    bank = ensure_bank(
        Path(place.folder), candidates, model=place.model, read=build.reader(model),
        again=True, progress=ambient.progress,
    )  # fmt: skip
    return len(bank.layers)


class Reporter:
    """Reports progress and loss, and sometimes a state from which the job can resume."""

    def __init__(self, initial: Initial, *, iterations: int, saved: Saved | None) -> None:
        self._initial = initial
        self._iterations = iterations
        self._saved = saved
        self._leaves = False
        self._checkpoint = b""
        self._metric: float | None = None
        self._told_at = 0.0

    def begun(self, iteration: int) -> None:
        """Report that the preparation is done. Schedulers measure the time per iteration from this report."""
        try:
            state = None if self._saved is None else pack(self._saved)
            ambient.progress(iteration, self._iterations, 0.0, state)
        except Evicted:  # all ranks leave together after the first iteration
            self._leaves = True

    def __call__(self, progress: TuningProgress) -> None:
        if self._leaves:
            raise Evicted
        self._checkpoint = progress.checkpoint or self._checkpoint
        self._metric = progress.metric
        now = time.monotonic()
        if now - self._told_at < _REPORT_EVERY_S and progress.left_s != 0:
            return
        state = self._state(self._checkpoint) if self._checkpoint else None
        self._told_at, self._checkpoint = now, b""
        ambient.progress(progress.iteration, progress.iterations, progress.loss, state)

    def leaving(self, evicted: Evicted) -> Evicted:
        """Return the exception that ends the call, with a state for resuming."""
        checkpoint = payloads.loads(evicted.state)
        return Evicted(payloads.dumps(self._state(checkpoint), what="checkpoint"))

    def _state(self, checkpoint: bytes) -> bytes:
        return pack(Saved(self._initial, checkpoint, self._metric))


def add_tuned_prompt_to_bank(model: CausalLM, place: BankPlace, tuned: Tuned) -> None:
    """Add the text of a tuned prompt to the bank if tuning has improved the prompt. Errors are only logged."""
    if tuned.best.iteration == 0 or not tuned.text.strip():
        return
    candidate = Candidate(
        text=tuned.text.strip(), source="tuned", name=tuned.name, task=tuned.name, metric=tuned.metric.value,
        value=tuned.held_out.metric, tuned_at=time.time(),
    )  # fmt: skip
    try:
        insert_or_store_prompt(Path(place.folder), candidate, model=place.model, read=build.reader(model))
    except (StokerError, OSError, ValueError) as error:
        log.warning("the tuned prompt of %s could not be added to the bank %s: %s", tuned.name, place.folder, error)
