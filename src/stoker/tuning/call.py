"""One job as a call on a library: meeting the gang, the initial prompt, the tuning, and the tuned prompt's way back.

A call that was evicted, or whose gang was broken, goes on from what rank 0 left: its checkpoint, with the prompt that
it began from. Reports are held back a little, so that none of them is overtaken before it has left the library.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.contexts import ambient, payloads
from stoker.contexts.ambient import Evicted
from stoker.errors import StokerError
from stoker.tuning.bank import scoring
from stoker.tuning.bank.build import contribute, ensure_bank
from stoker.tuning.bank.candidate import Candidate
from stoker.tuning.exchange import meet
from stoker.tuning.initial import choose
from stoker.tuning.order import BankPlace, Initial, Order, Saved, pack, unpack
from stoker.tuning.pace import Part, PartClock
from stoker.tuning.result import Tuned
from stoker.tuning.tune import TuningProgress, device_of, purpose, tune_with

if TYPE_CHECKING:
    from stoker.contexts.language_model import CausalLM

log = logging.getLogger(__name__)

_REPORT_EVERY_S = 0.2
_SILENCE_S = 300.0
"""How long a rank waits for the others: a lost one is noticed at once, a busy machine may take its time."""


def run_job(model: CausalLM, order: Order) -> Tuned:
    """The job, as one rank of its gang. Raises as `tune.tune`."""
    place, job, clock = ambient.gang(), order.job, PartClock()
    saved = unpack(ambient.saved_state(b"")) or unpack(order.start)
    with contextlib.ExitStack() as stack:
        with clock.time(Part.START):
            exchange = stack.enter_context(
                meet(
                    rank=place.rank, size=place.size, rendezvous=place.rendezvous, listener=place.listener,
                    key=place.key, job=purpose(model, job, order.samples), device=device_of(model), limit_s=_SILENCE_S,
                )
            )  # fmt: skip
        with clock.time(Part.BANK):
            initial = choose(model, order, exchange, known=saved.initial if saved is not None else None)
        job = msgspec.structs.replace(job, prompt=msgspec.structs.replace(job.prompt, initial=initial.text))
        reporter = Reporter(initial, iterations=job.until.iterations, saved=saved)
        try:
            tuned = tune_with(
                exchange, model, job, order.samples, clock=clock, report=reporter,
                start=saved.checkpoint if saved is not None else b"", begun=reporter.begun,
            )  # fmt: skip
        except Evicted as evicted:
            raise reporter.leaving(evicted) from None
    tuned = msgspec.structs.replace(tuned, initial_from=str(initial))
    if place.rank == 0 and order.bank is not None:
        with clock.time(Part.BANK):
            give_back(model, order.bank, tuned)
    return msgspec.structs.replace(tuned, spent_s={**tuned.spent_s, Part.BANK.value: clock.spent_s()[Part.BANK.value]})


def fill_bank(model: CausalLM, place: BankPlace, candidates: Sequence[Candidate]) -> int:
    """Make the bank of this model from these prompts and those that are in it; how many it has then.

    Raises StokerError for a bank of another model, and where the folder cannot be written.
    """
    bank = ensure_bank(
        Path(place.folder), candidates, model=place.model, reading=scoring.reading_of(), read=scoring.reader(model),
        again=True, progress=ambient.progress,
    )  # fmt: skip
    return len(bank.layers)


class Reporter:
    """Passes on how far the tuning is: the loss, and now and then what it can go on from."""

    def __init__(self, initial: Initial, *, iterations: int, saved: Saved | None) -> None:
        self._initial = initial
        self._iterations = iterations
        self._saved = saved
        self._leaves = False
        self._checkpoint = b""
        self._metric: float | None = None
        self._told_at = 0.0

    def begun(self, iteration: int) -> None:
        """Everything before the next iteration is done: a scheduler times iterations from here."""
        try:
            state = None if self._saved is None else pack(self._saved)
            ambient.progress(iteration, self._iterations, 0.0, state)
        except Evicted:  # it leaves with the other ranks, after the first iteration
            self._leaves = True

    def __call__(self, progress: TuningProgress) -> None:
        """Raises Evicted when the call is to make room."""
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
        """What ends the call, with the initial prompt beside the tuning's checkpoint."""
        checkpoint = payloads.loads(evicted.state)
        return Evicted(payloads.dumps(self._state(checkpoint), what="checkpoint"))

    def _state(self, checkpoint: bytes) -> bytes:
        return pack(Saved(self._initial, checkpoint, self._metric))


def give_back(model: CausalLM, place: BankPlace, tuned: Tuned) -> None:
    """Put a tuned prompt, as text, into the bank: for the next task that is like this one. A prompt that tuning has not
    made better is none. What goes wrong here is said and harms nothing: the job is done."""
    if tuned.best.iteration == 0 or not tuned.text.strip():
        return
    candidate = Candidate(
        text=tuned.text.strip(), source="tuned", name=tuned.name, task=tuned.name, metric=tuned.metric.value,
        value=tuned.held_out.metric, tuned_at=time.time(),
    )  # fmt: skip
    try:
        contribute(
            Path(place.folder), candidate, model=place.model, reading=scoring.reading_of(), read=scoring.reader(model)
        )
    except (StokerError, OSError, ValueError) as error:
        log.warning("the tuned prompt of %s did not get into the bank %s: %s", tuned.name, place.folder, error)
