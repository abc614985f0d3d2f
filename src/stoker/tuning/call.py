"""Run one job as a call on a library. The ranks of a gang connect, choose the initial prompt, tune it, and store the
result in the bank.

**Initial prompt.** It comes from the job, from the bank, or from the targets of the job. A lookup in the bank scores a
fixed number of prompts (`lookup.default_score_limit`), and must fit into its budget (`pace.LOOKUP_BUDGET_SHARE`). The
bank stores the seconds per score by kind of device and number of virtual tokens. If these seconds are unknown, the call
first measures a few scores.

Rank 0 searches, and every rank scores its share of the prompts. The stored seconds per score are for one device,
because the scheduler does not know the size of the gang yet (`Features.shared_s`). Scores use training samples only.

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
from stoker.contexts.prompts import max_positions
from stoker.errors import StokerError
from stoker.tuning.bank import build
from stoker.tuning.bank.build import ensure_bank, insert_or_store_prompt
from stoker.tuning.bank.candidates import SHIPPED_PROMPTS, Candidate, make_instruction, read_candidates
from stoker.tuning.bank.lookup import Score, default_score_limit, look_up
from stoker.tuning.encoding import MOST_TOKENS, encode_samples
from stoker.tuning.exchange import Exchange, connect_ranks
from stoker.tuning.job import PLACE, split
from stoker.tuning.order import BankPlace, InitialPrompt, Order, Saved, Tuned, pack, unpack
from stoker.tuning.pace import LOOKUP_BUDGET_SHARE, Part, PartClock, ScoringPace, is_over, read_paces, store_pace
from stoker.tuning.tune import TuningProgress, digest_run, model_device, tune
from stoker.units import show_seconds

if TYPE_CHECKING:
    from stoker.contexts.language_model import CausalLM

log = logging.getLogger(__name__)

_LONGEST_LOOKUP_S = 6 * 3600.0
"""Maximum seconds that other ranks wait while rank 0 finds the initial prompt, and perhaps first builds the bank."""


def choose_initial_prompt(
    model: CausalLM, order: Order, exchange: Exchange, *, known: InitialPrompt | None
) -> InitialPrompt:
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
            score.score_for_rank_0()
        return msgspec.msgpack.decode(exchange.broadcast(b"", limit_s=_LONGEST_LOOKUP_S), type=InitialPrompt)
    given = order.job.prompt.initial
    try:
        found = known or (
            InitialPrompt(given) if given.strip() else _find_initial_prompt(model, order, score, ranks=exchange.size)
        )
    finally:
        if score is not None:
            score.end_service()
    exchange.broadcast(msgspec.msgpack.encode(found))
    return found


def _find_initial_prompt(model: CausalLM, order: Order, score: Score | None, *, ranks: int) -> InitialPrompt:
    if order.bank is None:
        note = "the job uses no bank"
    elif score is None:
        note = "the samples are too long to be scored with a prompt before them"
    else:
        try:
            found = _look_up_initial_prompt(model, order, order.bank, score, ranks=ranks)
            if isinstance(found, InitialPrompt):
                return found
            note = found
        except (StokerError, OSError, ValueError) as error:
            log.warning("the prompt bank in %s cannot be used: %s", order.bank.folder, error)
            note = f"the bank cannot be used: {error}"
    return InitialPrompt(make_instruction([sample.target for sample in order.samples]), "the targets", note)


def _look_up_initial_prompt(
    model: CausalLM, order: Order, place: BankPlace, score: Score, *, ranks: int
) -> InitialPrompt | str:
    """Return the best prompt of the bank, or the reason if a lookup would take too long."""
    folder, kind = Path(place.folder), _device_kind(model)
    slo_s, virtual_tokens = order.slo_s, order.job.prompt.virtual_tokens
    pace = read_paces(folder, virtual_tokens=virtual_tokens).get(kind)
    if pace is not None and is_over(pace.lookup_s, slo_s=slo_s):
        return _describe_excess(pace.lookup_s, slo_s)
    score_s = pace.score_s if pace is not None else ranks * _measure_score_s(score, count=4 * ranks) if slo_s else 0.0
    bank = ensure_bank(folder, read_candidates(SHIPPED_PROMPTS), model=place.model, read=build.reader(model))
    limit = default_score_limit(bank.layers)
    if is_over(limit * score_s, slo_s=slo_s):
        store_pace(folder, kind, ScoringPace(score_s, limit * score_s, virtual_tokens))
        return _describe_excess(limit * score_s, slo_s)
    began = time.monotonic()
    found = look_up(bank.layers, score, limit=limit)
    took_s = time.monotonic() - began
    store_pace(folder, kind, ScoringPace(ranks * took_s / found.scores, ranks * took_s, virtual_tokens))
    note = f"loss {found.loss:.3g}, {found.scores} of {len(bank.layers)} scored in {show_seconds(took_s)}"
    return InitialPrompt(found.candidate.text, "the bank", note)


def _describe_excess(lookup_s: float, slo_s: float) -> str:
    limit = f"{LOOKUP_BUDGET_SHARE:.0%} of the {show_seconds(slo_s)} until the deadline"
    return f"a lookup takes {show_seconds(lookup_s)}, over {limit}"


def _measure_score_s(score: Score, *, count: int) -> float:
    texts = [one.text for one in read_candidates(SHIPPED_PROMPTS)[:count]]
    score(texts[:1])
    began = time.monotonic()
    score(texts)
    return (time.monotonic() - began) / len(texts)


def _scoring_samples(model: CausalLM, order: Order, *, tokens: int) -> list[tuple[str, str]]:
    job = order.job
    training = split(order.samples, data=job.data, seed=job.training.seed).training
    longest = max_positions(model.model.config)
    template = job.data.template
    rows = encode_samples(model.tokenizer, training, template=template)
    fit = [
        (template.replace(PLACE, sample.input), sample.target)
        for sample, row in zip(training, rows, strict=True)
        if not longest or len(row) + tokens <= longest
    ]
    return build.evaluation_samples(fit, seed=job.training.seed)


def _device_kind(model: CausalLM) -> str:
    device = model_device(model)
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


class _GangScorer:
    """Scores prompts on all ranks together. Rank 0 calls this object; the other ranks call `score_for_rank_0`."""

    def __init__(self, score: Score, exchange: Exchange, *, device: torch.device) -> None:
        self._score = score
        self._exchange = exchange
        self._device = device

    def __call__(self, texts: Sequence[str]) -> list[float]:
        if self._exchange.size == 1:
            return list(self._score(texts))
        self._exchange.broadcast(json.dumps(list(texts)).encode())
        return self._score_own_share(texts)

    def score_for_rank_0(self) -> None:
        while texts := json.loads(self._exchange.broadcast(b"", limit_s=_LONGEST_LOOKUP_S)):
            self._score_own_share(texts)

    def end_service(self) -> None:
        self._exchange.broadcast(b"[]")

    def _score_own_share(self, texts: Sequence[str]) -> list[float]:
        rank, size = self._exchange.rank, self._exchange.size
        losses = torch.zeros(len(texts), dtype=torch.float64, device=self._device)
        if mine := texts[rank::size]:
            losses[rank::size] = torch.tensor(self._score(mine), dtype=torch.float64, device=self._device)
        return [float(loss) for loss in self._exchange.sum_over_ranks(losses).tolist()]


_REPORT_EVERY_S = 0.2
_RANK_WAIT_LIMIT_S = 300.0
"""Maximum seconds to wait for other ranks, which may start late on a busy machine."""


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
                connect_ranks(
                    rank=place.rank, size=place.size, rendezvous=place.rendezvous, listener=place.listener,
                    key=place.key, job=digest_run(model, job, order.samples), device=str(model_device(model)),
                    limit_s=_RANK_WAIT_LIMIT_S,
                )
            )  # fmt: skip
        with clock.time(Part.BANK):
            initial = choose_initial_prompt(model, order, exchange, known=saved.initial if saved is not None else None)
        job = msgspec.structs.replace(job, prompt=msgspec.structs.replace(job.prompt, initial=initial.text))
        reporter = TuningReporter(initial, iterations=job.until.iterations, saved=saved)
        try:
            tuned = tune(
                model, job, order.samples, exchange=exchange, clock=clock, report=reporter,
                start=saved.checkpoint if saved is not None else b"", begun=reporter.report_start,
            )  # fmt: skip
        except Evicted as evicted:
            raise reporter.make_eviction(evicted) from None
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


class TuningReporter:
    """Reports progress and loss, and sometimes a state from which the job can resume."""

    def __init__(self, initial: InitialPrompt, *, iterations: int, saved: Saved | None) -> None:
        self._initial = initial
        self._iterations = iterations
        self._saved = saved
        self._must_leave = False
        self._checkpoint = b""
        self._metric: float | None = None
        self._reported_at = 0.0

    def report_start(self, iteration: int) -> None:
        """Report that the preparation is done. Schedulers measure the time per iteration from this report."""
        try:
            state = None if self._saved is None else pack(self._saved)
            ambient.progress(iteration, self._iterations, 0.0, state)
        except Evicted:  # leave after the first iteration, because all ranks must leave at the same iteration
            self._must_leave = True

    def __call__(self, progress: TuningProgress) -> None:
        if self._must_leave:
            raise Evicted
        self._checkpoint = progress.checkpoint or self._checkpoint
        self._metric = progress.metric
        now = time.monotonic()
        if now - self._reported_at < _REPORT_EVERY_S and progress.left_s != 0:
            return
        state = self._pack_state(self._checkpoint) if self._checkpoint else None
        self._reported_at, self._checkpoint = now, b""
        ambient.progress(progress.iteration, progress.iterations, progress.loss, state)

    def make_eviction(self, evicted: Evicted) -> Evicted:
        """Return the exception that ends the call, with a state for resuming."""
        checkpoint = payloads.loads(evicted.state)
        return Evicted(payloads.dumps(self._pack_state(checkpoint), what="checkpoint"))

    def _pack_state(self, checkpoint: bytes) -> bytes:
        return pack(Saved(self._initial, checkpoint, self._metric))


def add_tuned_prompt_to_bank(model: CausalLM, place: BankPlace, tuned: Tuned) -> None:
    """Add the text of a tuned prompt to the bank if tuning has improved the prompt. Log errors instead of raising."""
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
