"""Which text a job's soft prompt begins as: the one it names, else the bank's best, else one made from its targets.

The bank is worth its time only while the time is there (`budget.py`). What a lookup takes is known before it begins, as
it scores a fixed number of candidates (`lookup.default_limit`): that number times the seconds a score, which are
remembered with the bank for each kind of device and number of virtual tokens. Where they are not, a few scores are made
to measure them.

A gang scores together: rank 0 searches, and every rank computes its part of the prompts that are to be scored (the
paper's lookup runs on all of a job's devices too, §5.2, and does not say how). What is remembered, and what the budget
is compared with, are the seconds of one device: the scheduler decides about a job before it knows its gang, and divides
them by its size (`Features.shared_s`).

The samples that score are of the part that is trained on; those that decide and measure later are not touched.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from stoker.errors import StokerError
from stoker.tuning.bank import scoring
from stoker.tuning.bank.build import ensure_bank
from stoker.tuning.bank.candidate import read_candidates
from stoker.tuning.bank.lookup import Score, default_limit, look_up
from stoker.tuning.bank.store import BankStore
from stoker.tuning.budget import BUDGET, ScoringPace, is_over, read_paces, remember
from stoker.tuning.encoding import encode_samples
from stoker.tuning.exchange import Exchange
from stoker.tuning.job import PLACE
from stoker.tuning.order import BankPlace, Initial, Order
from stoker.tuning.prompts import SHIPPED_PROMPTS, instruction
from stoker.tuning.samples import split
from stoker.units import show_seconds

if TYPE_CHECKING:
    from stoker.contexts.language_model import CausalLM

log = logging.getLogger(__name__)

_LOOKUP_LIMIT_S = 6 * 3600.0
"""So long other ranks wait for rank 0 to go on with its search: it may have to build the bank first."""


def choose(model: CausalLM, order: Order, exchange: Exchange, *, known: Initial | None) -> Initial:
    """The initial prompt; every rank calls it, and gets the same. `known`: what an earlier attempt began from.

    A bank that cannot be used is no reason to fail: `note` says what is wrong with it.
    """
    virtual_tokens = order.job.prompt.virtual_tokens
    samples = _scoring_samples(model, order, tokens=virtual_tokens or scoring.TOKENS)
    score = None
    if samples:
        scorer = scoring.scorer(model, samples, virtual_tokens=virtual_tokens)
        score = _Together(scorer, exchange, device=_device(model))
    if exchange.rank:
        if score is not None:
            score.serve()
        return msgspec.msgpack.decode(exchange.share(b"", limit_s=_LOOKUP_LIMIT_S), type=Initial)
    try:
        found = known or _given(order) or _search(model, order, score, ranks=exchange.size)
    finally:
        if score is not None:
            score.end()
    exchange.share(msgspec.msgpack.encode(found))
    return found


def _given(order: Order) -> Initial | None:
    text = order.job.prompt.initial
    return Initial(text) if text.strip() else None


def _search(model: CausalLM, order: Order, score: Score | None, *, ranks: int) -> Initial:
    """The bank's best prompt for this job, or why it is not asked."""
    made = Initial(instruction([sample.target for sample in order.samples]), "the targets")
    if order.bank is None:
        return msgspec.structs.replace(made, note="no bank was to be used")
    if score is None:
        return msgspec.structs.replace(made, note="the samples are too long to be scored with a prompt before them")
    try:
        return _look_up(model, order, order.bank, score, otherwise=made, ranks=ranks)
    except (StokerError, OSError, ValueError) as error:
        log.warning("the prompt bank in %s cannot be used: %s", order.bank.folder, error)
        return msgspec.structs.replace(made, note=f"the bank cannot be used: {error}")


def _look_up(
    model: CausalLM, order: Order, place: BankPlace, score: Score, *, otherwise: Initial, ranks: int
) -> Initial:
    folder, kind = Path(place.folder), _kind(model)
    slo_s, virtual_tokens = order.slo_s, order.job.prompt.virtual_tokens
    pace = read_paces(folder, virtual_tokens=virtual_tokens).get(kind)
    if pace is not None and is_over(pace.lookup_s, slo_s=slo_s):
        return _over(otherwise, pace.lookup_s, slo_s)
    score_s = pace.score_s if pace is not None else ranks * _measure(score, count=4 * ranks) if slo_s else 0.0
    bank = _open(model, place)
    limit = default_limit(bank.layers)
    if is_over(limit * score_s, slo_s=slo_s):
        remember(folder, kind, ScoringPace(score_s, limit * score_s, virtual_tokens))
        return _over(otherwise, limit * score_s, slo_s)
    began = time.monotonic()
    found = look_up(bank.layers, score, limit=limit)
    took_s = time.monotonic() - began
    remember(folder, kind, ScoringPace(ranks * took_s / found.scores, ranks * took_s, virtual_tokens))
    note = f"loss {found.loss:.3g}, {found.scores} of {len(bank.layers)} scored in {show_seconds(took_s)}"
    return Initial(found.candidate.text, "the bank", note)


def _over(made: Initial, lookup_s: float, slo_s: float) -> Initial:
    note = f"a lookup takes {show_seconds(lookup_s)}, over {BUDGET:.0%} of the {show_seconds(slo_s)} that there are"
    return msgspec.structs.replace(made, note=note)


def _open(model: CausalLM, place: BankPlace) -> BankStore:
    return ensure_bank(
        Path(place.folder), read_candidates(SHIPPED_PROMPTS), model=place.model, reading=scoring.reading_of(),
        read=scoring.reader(model),
    )  # fmt: skip


def _measure(score: Score, *, count: int) -> float:
    """Seconds a score, from `count`; the first warms up what the others find warm."""
    texts = [one.text for one in read_candidates(SHIPPED_PROMPTS)[:count]]
    score(texts[:1])
    began = time.monotonic()
    score(texts)
    return (time.monotonic() - began) / len(texts)


def _scoring_samples(model: CausalLM, order: Order, *, tokens: int) -> list[tuple[str, str]]:
    """Those that prompts are scored by, as far as the model can read them with a prompt of so many `tokens` before
    them."""
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
    return scoring.evaluation_samples(fit, seed=job.training.seed)


def _device(model: CausalLM) -> torch.device:
    device: torch.device = model.model.get_input_embeddings().weight.device
    return device


def _kind(model: CausalLM) -> str:
    device = _device(model)
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


class _Together:
    """Scores of a gang. Rank 0 calls it; the others `serve` until it has ended."""

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
        """Compute this rank's part of whatever rank 0 asks for."""
        while texts := json.loads(self._exchange.share(b"", limit_s=_LOOKUP_LIMIT_S)):
            self._part(texts)

    def end(self) -> None:
        """Let the other ranks go on."""
        self._exchange.share(b"[]")

    def _part(self, texts: Sequence[str]) -> list[float]:
        rank, size = self._exchange.rank, self._exchange.size
        losses = torch.zeros(len(texts), dtype=torch.float64, device=self._device)
        if mine := texts[rank::size]:
            losses[rank::size] = torch.tensor(self._score(mine), dtype=torch.float64, device=self._device)
        return [float(loss) for loss in self._exchange.sum(losses).tolist()]
