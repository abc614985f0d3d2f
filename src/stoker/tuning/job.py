"""A prompt-tuning job from Python or a TOML file, with the attributes of PromptTuner's Table 3.

    name = "facts"
    model = "models/SmolLM2-135M"       a folder, a .gguf file or a name on the Hugging Face hub; empty: a small model

    devices = 1                         devices that share one replica of the model

    [data]
    path = "train.jsonl"                CSV, JSONL or Parquet
    input = "input"                     field names
    target = "target"
    template = "\n{input}\n"            the text between the prompt and the target
    evaluation_samples = 16             samples per evaluation
    held_out = 0.2                      share of the samples for the final measurement

    [prompt]
    initial = "Say whether it is true." empty: the prompt bank finds an initial prompt
    virtual_tokens = 0                  0: length of the initial prompt, at most 64

    [until]
    metric = "accuracy"                 or "rouge-l", "bleu", "loss"
    reach = 0.9                         stop at this value; default: run all iterations
    iterations = 500                    maximum number of iterations
    evaluate_every = 10
    slo = "15 min"                      time from submission; or deadline = 2030-01-31T18:00:00+01:00

    [training]
    batch = 16                          samples per iteration, on all devices together
    micro_batch = 0                     samples per pass on a device; 0: all
    learning_rate = 0.01
    optimizer = "adamw"                 or "sgd"
    seed = 0
    checkpoint_every = "30 s"

Only `[data] path` is required.

A hash of the seed and the input decides the part of a sample: training, evaluation or held out. Therefore samples with
equal inputs are in the same part.
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stoker.config import read_unit
from stoker.config_errors import find_setting_line, parse_toml, read_toml
from stoker.datafile import read_rows, text_field
from stoker.decoding import read_text
from stoker.errors import ConfigError
from stoker.site import Duration
from stoker.units import show_seconds

PLACE = "{input}"
"""The placeholder of the input in a template."""


class Metric(enum.Enum):
    """The metric for the quality of a prompt."""

    ACCURACY = "accuracy"
    """Share of samples for which the model, with greedy decoding, generates the target and its end token."""
    ROUGE = "rouge-l"
    """ROUGE-L: mean over samples of the F1 of the longest common subsequence of words."""
    BLEU = "bleu"
    """Corpus BLEU over n-grams of up to four words, from 0 to 1."""
    LOSS = "loss"
    """Mean negative log-likelihood of a target token, in nats. Smaller is better; for all other metrics, larger is
    better.
    """

    def better(self, one: float, other: float) -> bool:
        """True if `one` is a better value than `other`.

        Args:
            one: A value.
            other: Another value.
        """
        return one < other if self is Metric.LOSS else one > other

    def reached(self, value: float, target: float | None) -> bool:
        """True if a value is at least as good as the target.

        Args:
            value: A measured value.
            target: Target value, or None.
        """
        return target is not None and (value == target or self.better(value, target))


class Optimizer(enum.Enum):
    ADAMW = "adamw"
    """AdamW without weight decay."""
    SGD = "sgd"
    """Stochastic gradient descent with momentum 0.9."""


Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data set, and the conversion of rows to text."""

    path: str
    input: str = "input"
    target: str = "target"
    template: str = f"\n{PLACE}\n"
    evaluation_samples: Count = 16
    held_out: Annotated[float, msgspec.Meta(gt=0.0, lt=0.9)] = 0.2

    def __post_init__(self) -> None:
        places = self.template.count(PLACE)
        if places != 1:
            raise ValueError(f"template must contain {PLACE} once, and contains it {places} times")
        if self.input == self.target:
            raise ValueError(f"target and input are the same field, {self.target!r}")


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The initial prompt, and the number of tokens of the soft prompt (0: as in the initial prompt, at most 64)."""

    initial: str = ""
    virtual_tokens: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0


class Until(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The conditions that end a job, and its deadline. `slo_s`: seconds from submission to the deadline (0: none)."""

    metric: Metric = Metric.ACCURACY
    reach: float | None = None
    iterations: Count = 500
    evaluate_every: Count = 10
    slo_s: Duration = msgspec.field(default=Duration(0.0), name="slo")
    deadline: datetime.datetime | None = None

    def __post_init__(self) -> None:
        if self.reach is not None:
            metric = self.metric.value
            if self.metric is Metric.LOSS and not 0 < self.reach < float("inf"):
                raise ValueError(f"reach = {self.reach:g} can never be reached: a loss is above 0")
            if self.metric is not Metric.LOSS and not 0 < self.reach <= 1:
                hint = f"; write {self.reach / 100:g} for {self.reach:g} %" if 1 < self.reach <= 100 else ""
                why = "can never be reached" if not self.reach <= 0 else "is not a target"
                raise ValueError(f"reach = {self.reach:g} {why}: {metric} goes from 0 to 1{hint}")
        if self.slo_s and self.deadline is not None:
            raise ValueError("deadline and slo both set the deadline; leave one out")
        if not self.slo_s >= 0:
            raise ValueError("slo must be longer than 0 s")


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    batch: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 16
    micro_batch: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    learning_rate: Annotated[float, msgspec.Meta(gt=0.0, le=100.0)] = 0.01
    optimizer: Optimizer = Optimizer.ADAMW
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    checkpoint_every_s: Duration = msgspec.field(default=Duration(30.0), name="checkpoint_every")


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt-tuning job. The result of a job is an `order.Tuned`."""

    data: Data
    name: str = ""
    model: str = ""
    devices: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    prompt: Prompt = Prompt()
    until: Until = Until()
    training: Training = Training()

    def deadline_s(self, *, submitted_s: float) -> float | None:
        """Return the deadline in seconds since the epoch, or None. A time without a time zone is local time.

        Args:
            submitted_s: Submission, in seconds since the epoch.
        """
        if self.until.deadline is not None:
            return self.until.deadline.timestamp()
        return submitted_s + self.until.slo_s if self.until.slo_s else None

    def refuse_past_deadline(self, *, now_s: float, file: str = "", line: int = 0) -> None:
        """Raise ConfigError if the deadline has passed.

        Args:
            now_s: Seconds since the epoch.
            file: The job's file, for the error.
            line: Line of the deadline.
        """
        deadline = self.until.deadline
        if deadline is not None and deadline.timestamp() <= now_s:
            ago = show_seconds(now_s - deadline.timestamp())
            where = f"{file}: line {line}: " if file else ""
            raise ConfigError(
                f"{where}[until] deadline = {deadline.isoformat()} was {ago} ago; give a later one,"
                ' or a time from now on: slo = "15 min"',
                file=file, line=line, key="deadline",
            )  # fmt: skip


def read_job(path: str | os.PathLike[str], *, now_s: float | None = None) -> Job:
    """Return the job in a TOML file.

    Args:
        path: The file. Paths in the file are relative to its folder.
        now_s: Current time in seconds since the epoch; None: time of the clock.

    Raises:
        ConfigError: The job is wrong. The error has `file`, `line` and `key`, if known.
    """
    path = Path(path).expanduser()
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}", file=str(path)) from None
    return parse_job(text, file=str(path), folder=path.absolute().parent, now_s=now_s)


def parse_job(text: str, *, file: str, folder: Path, now_s: float | None = None) -> Job:
    """Parse a job. `file`: name for error messages. `folder`: folder for relative paths. Raises ConfigError."""
    said = parse_toml(text, file=file)
    job = read_toml(text, Job, file=file, shapes={}, read=read_unit, data=said)
    line = find_setting_line(("until", "deadline"), text)
    job.refuse_past_deadline(now_s=time.time() if now_s is None else now_s, file=file, line=line)
    # If the model is not an existing path, it is a name on the model hub.
    model = str(folder / job.model) if job.model and (folder / job.model).exists() else job.model
    data = msgspec.structs.replace(job.data, path=str(folder / Path(job.data.path).expanduser()))
    return msgspec.structs.replace(job, model=model, data=data)


def digest_job(job: Job, *more: Any) -> str:
    """Return a digest (16 hex digits) of the settings that affect the results of a run.

    Args:
        job: The job.
        *more: Other JSON values for the digest.
    """
    until = (job.until.metric, job.until.evaluate_every)
    training = msgspec.structs.replace(job.training, checkpoint_every_s=Duration(0.0), micro_batch=0)
    data = msgspec.structs.replace(job.data, path="")
    said = msgspec.json.encode((data, job.prompt, until, training, more), enc_hook=float)
    return hashlib.sha256(said).hexdigest()[:16]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A pair of input and target. `place`: line or index of the sample in the file."""

    input: str
    target: str
    place: str = ""


class SplitData(msgspec.Struct, frozen=True):
    training: tuple[Sample, ...]
    evaluation: tuple[Sample, ...]
    held_out: tuple[Sample, ...]


def read_samples(data: Data) -> tuple[Sample, ...]:
    """Return all samples of a data set, in the order of the file.

    Args:
        data: The data set.

    Raises:
        ConfigError: The file is empty or a row is invalid. Facts: file, line and field.
    """
    path = Path(data.path)
    found = tuple(
        Sample(text_field(row, data.input, file=path), text_field(row, data.target, file=path), row.place)
        for row in read_rows(path)
    )
    if not found:
        raise ConfigError(f"{path}: is empty; give rows with the fields {data.input} and {data.target}", file=str(path))
    return found


def split(samples: Sequence[Sample], *, data: Data, seed: int) -> SplitData:
    """Return the three parts of samples. Samples with equal inputs are in the same part.

    Args:
        samples: All samples.
        data: Settings `evaluation_samples` (at most a third of the inputs) and `held_out` (a share).
        seed: Seed of the split.

    Raises:
        ConfigError: The samples have fewer than three distinct inputs.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.input, []).append(sample)
    count = len(groups)
    if count < 3:
        raise ConfigError(
            f"{data.path}: has {count} different inputs; tuning needs at least 3: for training, evaluation and"
            " measurement",
            file=data.path,
        )
    ordered = sorted(groups.items(), key=lambda group: _chance(group[0], seed=seed))
    evaluation = min(data.evaluation_samples, count // 3)
    held_out = min(max(1, round(data.held_out * count)), count - evaluation - 1)
    borders = (0, evaluation, evaluation + held_out, count)
    parts = [
        # Sort each group by target, so that the order of the file has no effect.
        tuple(sample for _, group in ordered[start:end] for sample in sorted(group, key=lambda one: one.target))
        for start, end in itertools.pairwise(borders)
    ]
    return SplitData(training=parts[2], evaluation=parts[0], held_out=parts[1])


def digest_samples(samples: Sequence[Sample]) -> str:
    """Return a digest of samples (16 hex digits).

    Args:
        samples: The samples, in order.
    """
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(msgspec.json.encode((sample.input, sample.target)))
    return digest.hexdigest()[:16]


def _chance(text: str, *, seed: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=str(seed).encode()).digest()
