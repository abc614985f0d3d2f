"""Soft-prompt tuning of a context's model, on one device or a gang, with checkpoints.

A soft prompt is a small number of vectors before the embeddings of the input. Gradient descent trains only these
vectors (Lester et al., arXiv:2104.08691; PromptTuner §2, §5.1).

Ranks are synchronous, and each rank has the whole model. The ranks add the summed losses, gradients and token counts of
their parts of a batch. Every rank then divides by the number of tokens and makes the same optimizer step. Therefore the
number of ranks affects only rounding. If the progress report of a rank raises `Evicted`, the rank announces this in the
next exchange. All ranks then stop after the same iteration with the same checkpoint.

A checkpoint is in the safetensors format with a JSON header, so reading it runs no code. A job can resume on any number
of devices.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import safetensors
import safetensors.torch
import torch

from stoker.contexts import payloads
from stoker.contexts.ambient import Evicted
from stoker.contexts.prompts import max_positions
from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError
from stoker.tuning.encoding import (
    EncodedSample,
    Ids,
    batch_indices,
    encode_prompt,
    encode_samples,
    refuse_too_long_samples,
    rows_of_rank,
)
from stoker.tuning.exchange import Exchange
from stoker.tuning.job import Job, Metric, Optimizer, Sample, digest_job, digest_samples, split
from stoker.tuning.metrics import MetricSums, refuse_unreachable
from stoker.tuning.order import EvaluationPoint, Tuned, TuningEnd
from stoker.tuning.pace import IterationPace, Part, PartClock, communication_share
from stoker.tuning.passes import (
    SoftPrompt,
    attach_soft_prompt,
    compute_gradient,
    embed_tokens,
    measure_prompt,
    nearest_tokens,
)

log = logging.getLogger(__name__)

_HEADER = "stoker"
_PROMPT, _BEST, _OPTIMIZER = "prompt", "best", "optimizer."


class CheckpointHeader(msgspec.Struct, frozen=True):
    """A checkpoint's header. `job`: digest of the settings that affect results. `reached`: iteration that reached the
    target."""

    job: str
    iteration: int
    points: tuple[EvaluationPoint, ...] = ()
    best: EvaluationPoint | None = None
    reached: int | None = None
    spent_s: dict[str, float] = {}


class TuningState(msgspec.Struct, frozen=True):
    """The content of a checkpoint: the last and the best soft prompt `[tokens, width]`, and the optimizer's tensors."""

    header: CheckpointHeader
    prompt: torch.Tensor
    best: torch.Tensor
    optimizer: dict[str, torch.Tensor]


def pack_state(state: TuningState) -> bytes:
    tensors = {_PROMPT: state.prompt, _BEST: state.best}
    tensors |= {_OPTIMIZER + name: value for name, value in state.optimizer.items()}
    held = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    header = msgspec.json.encode(state.header).decode()
    return bytes(safetensors.torch.save(held, metadata={_HEADER: header}))


def unpack_state(data: bytes, *, job: str) -> TuningState | None:
    """Decode a checkpoint. If `data` is empty, return None. If it is invalid, log a warning and return None. Raises
    ConfigError for the checkpoint of another job.
    """
    if not data:
        return None
    try:
        tensors = safetensors.torch.load(data)
        size = int.from_bytes(data[:8], "little")
        said = msgspec.json.decode(data[8 : 8 + size])["__metadata__"][_HEADER]
        header = msgspec.json.decode(said, type=CheckpointHeader)
        optimizer = {
            name.removeprefix(_OPTIMIZER): value for name, value in tensors.items() if name.startswith(_OPTIMIZER)
        }
        state = TuningState(header, tensors[_PROMPT], tensors[_BEST], optimizer)
    except (safetensors.SafetensorError, KeyError, TypeError, *UNREADABLE) as error:
        log.warning("a checkpoint of %d bytes cannot be read (%s); the job starts from the beginning", len(data), error)
        return None
    if header.job != job:
        raise ConfigError(
            f"the checkpoint is from another job or other data ({header.job}; this job is {job}); give the job its"
            " own folder, or remove the checkpoint there"
        )
    return state


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    held: dict[str, Any] = optimizer.state_dict()["state"].get(0, {})
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    if tensors:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: dict(tensors)}})


class TunableModel(Protocol):
    """A causal LM context (`stoker.contexts.language_model.CausalLM`)."""

    model: Any
    tokenizer: Any


class TuningProgress(msgspec.Struct, frozen=True):
    """The progress after an iteration. `loss`: mean loss per target token of the batch. `metric`: value at the last
    evaluation. `left_s`: upper bound of the seconds left. `checkpoint`: new checkpoint of rank 0, if any."""

    iteration: int
    iterations: int
    loss: float
    metric: float
    left_s: float | None
    checkpoint: bytes = b""


Report = Callable[[TuningProgress], None]
"""Callback for the progress, which may raise `Evicted`."""


def tune(
    context: TunableModel,
    job: Job,
    samples: Sequence[Sample],
    *,
    exchange: Exchange | None = None,
    clock: PartClock | None = None,
    start: bytes = b"",
    report: Report | None = None,
    begun: Callable[[int], None] | None = None,
) -> Tuned:
    """Run a job as one rank. Afterwards, the model is as before. `exchange`: connection to the other ranks (None: this
    is the only rank). `clock`: measures the parts of the job. `start`: checkpoint to resume from. `begun`: called
    before the first iteration, with the number of earlier iterations. Raises ConfigError for a job without a prompt,
    too few or too long samples, an unreachable target, or the checkpoint of another job. Raises Evicted with a
    checkpoint if `report` raises Evicted.
    """
    exchange, clock = exchange or Exchange(rank=0, size=1), clock or PartClock()
    with clock.time(Part.DATA):
        rows = _EncodedJob(context, job, samples)
        digest = digest_run(context, job, samples, rows.prompt)
    with contextlib.ExitStack() as stack:
        with clock.time(Part.START):
            state = _share_start_state(context, rows.prompt, exchange, digest=digest, start=start)
            soft = stack.enter_context(attach_soft_prompt(context.model, state.prompt))
            run = _RankRun(job, context.tokenizer, rows, soft, exchange, state, clock, report=report)
        run.train(begun)
        return run.make_result()


def digest_run(context: TunableModel, job: Job, samples: Sequence[Sample], *more: Any) -> str:
    """Return a digest of job settings, samples and model shape, equal on all ranks."""
    shape = type(context.model).__name__, sum(parameter.numel() for parameter in context.model.parameters())
    return digest_job(job, digest_samples(samples), shape, *more)


def model_device(context: TunableModel) -> torch.device:
    device: torch.device = context.model.get_input_embeddings().weight.device
    return device


class _EncodedJob:
    def __init__(self, context: TunableModel, job: Job, samples: Sequence[Sample]) -> None:
        parts = split(samples, data=job.data, seed=job.training.seed)
        longest = max_positions(context.model.config)
        self.prompt = encode_prompt(context.tokenizer, job.prompt, longest=longest)
        encoded: list[list[EncodedSample]] = []
        for some in (parts.training, parts.evaluation, parts.held_out):
            rows = encode_samples(context.tokenizer, some, template=job.data.template)
            refuse_too_long_samples(self.prompt, rows, some, data=job.data, longest=longest)
            encoded.append(rows)
        self.training, self.evaluation, self.held_out = encoded
        refuse_unreachable(job, [sample.target for sample in parts.evaluation])


def _share_start_state(
    context: TunableModel, prompt: Ids, exchange: Exchange, *, digest: str, start: bytes
) -> TuningState:
    """Return the same state on all ranks: the checkpoint `start` of rank 0, or else a new state."""
    data = b""
    if exchange.rank == 0:
        found = unpack_state(start, job=digest)
        if found is None:
            vectors = embed_tokens(context.model, prompt)
            found = TuningState(CheckpointHeader(job=digest, iteration=0), vectors, vectors, {})
        data = pack_state(found)
    state = unpack_state(exchange.broadcast(data), job=digest)
    if state is None:
        raise ConfigError("rank 0 did not share a checkpoint: do all ranks run the same version of Stoker?")
    return state


class _RankRun:
    def __init__(
        self, job: Job, tokenizer: Any, rows: _EncodedJob, soft: SoftPrompt, exchange: Exchange, state: TuningState,
        clock: PartClock, *, report: Report | None,
    ) -> None:  # fmt: skip
        self._job, self._tokenizer, self._rows = job, tokenizer, rows
        self._soft, self._exchange, self._clock = soft, exchange, clock
        self._report = report
        self._optimizer = _make_optimizer(job, soft)
        restore_optimizer(self._optimizer, state.optimizer)
        clock.add_earlier_seconds(state.header.spent_s)
        self._header = state.header
        self._best = state.best
        self._pace = IterationPace(evaluate_every=job.until.evaluate_every)
        self._checkpoint_at = time.monotonic()
        self._first_step_at = 0.0
        self._is_evicted = False
        self._diverged = False

    @property
    def _is_finished(self) -> bool:
        return self._header.reached is not None or self._header.iteration >= self._job.until.iterations

    def train(self, begun: Callable[[int], None] | None) -> None:
        if not self._header.points:
            self._evaluate()
        if begun is not None:
            begun(self._header.iteration)
        warm = False
        while not self._is_finished:
            began = time.perf_counter()
            loss, asked = self._step()
            if not math.isfinite(loss):
                self._diverged = True
                return
            if warm:
                self._pace.iterations_s.append(time.perf_counter() - began)
            warm = True
            iteration = self._header.iteration
            if iteration % self._job.until.evaluate_every == 0 or iteration == self._job.until.iterations:
                self._evaluate()
            if asked and not self._is_finished:
                raise Evicted(payloads.dumps(self._checkpoint(), what="checkpoint"))
            self._report_progress(loss, self._checkpoint() if self._is_checkpoint_due() else b"")

    def make_result(self) -> Tuned:
        self._soft.set_vectors(self._best)
        with self._clock.time(Part.EVALUATION):
            held_out = self._measure(self._rows.held_out)
        header, until = self._header, self._job.until
        adapter, config = self._soft.adapter_files()
        spent_s = self._clock.spent_s()
        best = header.best or header.points[-1]
        reached = TuningEnd.ITERATIONS if header.reached is None else TuningEnd.REACHED
        return Tuned(
            name=self._job.name, metric=until.metric, reach=until.reach,
            end=TuningEnd.DIVERGED if self._diverged else reached, iterations=header.iteration,
            iterations_to_accuracy=header.reached, initial=self._job.prompt.initial,
            text=str(self._tokenizer.decode(nearest_tokens(self._soft.base, self._best))), best=best,
            held_out=EvaluationPoint(best.iteration, held_out.value(until.metric), held_out.value(Metric.LOSS)),
            points=header.points, devices=self._exchange.size, communication_share=communication_share(spent_s),
            spent_s=spent_s, adapter=adapter, adapter_config=config, first_step_at=self._first_step_at,
        )  # fmt: skip

    def _step(self) -> tuple[float, bool]:
        training, exchange, soft = self._job.training, self._exchange, self._soft
        with self._clock.time(Part.DATA):
            chosen = batch_indices(
                self._header.iteration, batch=training.batch, count=len(self._rows.training), seed=training.seed
            )
            rows = rows_of_rank(
                [self._rows.training[index] for index in chosen], rank=exchange.rank, size=exchange.size
            )
        with self._clock.time(Part.COMPUTE):
            found, loss, tokens = compute_gradient(soft, rows, micro_batch=training.micro_batch)
            counted = torch.tensor([loss, tokens, self._is_evicted], dtype=torch.float64, device=found.device)
            sums = torch.cat([found.flatten().double(), counted])
        with self._clock.time(Part.COMMUNICATION):
            exchange.sum_over_ranks(sums)
        with self._clock.time(Part.COMPUTE):
            loss, tokens, leaving = sums[-3:].tolist()
            soft.vectors.grad = (sums[:-3] / tokens).view_as(soft.vectors).to(soft.vectors.dtype)
            self._optimizer.step()
            soft.vectors.grad = None
        self._first_step_at = self._first_step_at or time.time()
        self._header = msgspec.structs.replace(self._header, iteration=self._header.iteration + 1)
        return loss / tokens, leaving > 0

    def _evaluate(self) -> None:
        began, until = time.perf_counter(), self._job.until
        with self._clock.time(Part.EVALUATION):
            tally = self._measure(self._rows.evaluation)
        self._pace.evaluations_s.append(time.perf_counter() - began)
        point = EvaluationPoint(self._header.iteration, tally.value(until.metric), tally.value(Metric.LOSS))
        reached = until.metric.reached(point.metric, until.reach)
        best = self._header.best
        if best is None or reached or _is_better_point(point, best, metric=until.metric):
            best, self._best = point, self._soft.vectors.detach().cpu().clone()
        self._header = msgspec.structs.replace(
            self._header, points=(*self._header.points, point), best=best,
            reached=self._header.iteration if reached else None,
        )  # fmt: skip

    def _measure(self, rows: Sequence[EncodedSample]) -> MetricSums:
        exchange, job = self._exchange, self._job
        mine = rows_of_rank(rows, rank=exchange.rank, size=exchange.size)
        batch = job.training.micro_batch or job.training.batch
        tally = measure_prompt(self._soft, mine, metric=job.until.metric, tokenizer=self._tokenizer, batch=batch)
        sums = torch.tensor(tally.to_numbers(), dtype=torch.float64, device=self._soft.device)
        return MetricSums.from_numbers(exchange.sum_over_ranks(sums).tolist())

    def _is_checkpoint_due(self) -> bool:
        every_s = self._job.training.checkpoint_every_s
        has_reader = self._exchange.rank == 0 and self._report is not None
        return has_reader and time.monotonic() - self._checkpoint_at >= every_s

    def _checkpoint(self) -> bytes:
        with self._clock.time(Part.CHECKPOINTS):
            header = msgspec.structs.replace(self._header, spent_s=self._clock.spent_s())
            data = pack_state(TuningState(header, self._soft.vectors, self._best, optimizer_tensors(self._optimizer)))
        self._checkpoint_at = time.monotonic()
        return data

    def _report_progress(self, loss: float, checkpoint: bytes) -> None:
        if self._report is None:
            return
        done, most = self._header.iteration, self._job.until.iterations
        left_s = 0.0 if self._is_finished else self._pace.left_s(most - done)
        metric = self._header.points[-1].metric
        try:
            self._report(TuningProgress(done, most, loss, metric, left_s, checkpoint))
        except Evicted:
            # Do not stop yet: all ranks stop together after the next exchange, which announces the eviction.
            self._is_evicted = True


def _make_optimizer(job: Job, soft: SoftPrompt) -> torch.optim.Optimizer:
    rate = job.training.learning_rate
    if job.training.optimizer is Optimizer.ADAMW:
        return torch.optim.AdamW([soft.vectors], lr=rate, weight_decay=0.0)
    return torch.optim.SGD([soft.vectors], lr=rate, momentum=0.9)


def _is_better_point(point: EvaluationPoint, best: EvaluationPoint, *, metric: Metric) -> bool:
    return point.loss < best.loss if point.metric == best.metric else metric.better(point.metric, best.metric)
