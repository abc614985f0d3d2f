"""A tuning call: its argument, the state that it keeps between libraries, and its result with its folder."""

from __future__ import annotations

import enum
import os
from pathlib import Path

import msgspec

from stoker.contexts.folders import state_folder
from stoker.decoding import UNREADABLE
from stoker.run_folder import write_whole
from stoker.tuning.job import Job, Metric, Sample


class BankPlace(msgspec.Struct, frozen=True):
    """Where the bank of a model lies: a folder that the library may or may not see, and what identifies the model."""

    folder: str
    model: str

    @staticmethod
    def of(model: str, *, folder: str | os.PathLike[str] = "") -> BankPlace:
        """Where the bank of a model lies: in this folder, else in the user's state folder."""
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in model)[:80]
        path = Path(folder).absolute() if folder else state_folder() / "prompt-banks" / name
        return BankPlace(str(path), model)


class Initial(msgspec.Struct, frozen=True):
    """The initial text of a soft prompt, its origin, and a remark about that (`note`)."""

    text: str
    source: str = "the job"
    note: str = ""

    def __str__(self) -> str:
        """Where it came from, in words."""
        return f"{self.source} ({self.note})" if self.note else self.source


class Saved(msgspec.Struct, frozen=True):
    """The state from which a job resumes: its initial prompt, which is not looked up again, and its tuning's
    checkpoint. `metric` is the last evaluation's, for people."""

    initial: Initial
    checkpoint: bytes
    metric: float | None = None


class Order(msgspec.Struct, frozen=True):
    """One call's work. `slo_s` is the time from submission to deadline (0: none), `start` a packed `Saved` of an
    earlier attempt, `bank` None when the bank is not to be used."""

    job: Job
    samples: tuple[Sample, ...]
    bank: BankPlace | None = None
    slo_s: float = 0.0
    start: bytes = b""


def pack(saved: Saved) -> bytes:
    """As bytes that hold no code."""
    return msgspec.msgpack.encode(saved)


def unpack(data: bytes) -> Saved | None:
    """What was packed; None for nothing, and for bytes that are no such thing: a job can begin again."""
    try:
        return msgspec.msgpack.decode(data, type=Saved) if data else None
    except UNREADABLE:
        return None


RESULT = "tuned.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


class TuningEnd(enum.Enum):
    """Why a job ended."""

    REACHED = "reached"
    """The target metric is there."""
    ITERATIONS = "iterations"
    """It has run all that it was allowed."""
    DIVERGED = "diverged"
    """The loss is no number any more; the best prompt from before is given back. A smaller learning rate helps."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """An evaluation: after how many iterations, the metric, and the loss a target token."""

    iteration: int
    metric: float
    loss: float


class Tuned(msgspec.Struct, frozen=True):
    """The response to a job (Table 3's last attribute), with what it took.

    `text` is the soft prompt as the tokens nearest to it: for people, not for use. `initial_from` says where the
    initial prompt came from. `held_out` is measured on samples that neither trained the prompt nor chose it. `best` is
    the evaluation that chose it: the first that reached the target, else the best of all; `points` are all of them,
    from that of the initial prompt. `spent_s` is seconds by `pace.Part`, over all runs of the job; `devices` is how
    many the last run had. `adapter` and `adapter_config` are the contents of PEFT's files. `first_step_at` is when the
    last run made its first step, on its device's clock (seconds since the epoch; 0 if it made none).
    """

    name: str
    metric: Metric
    reach: float | None
    end: TuningEnd
    iterations: int
    iterations_to_accuracy: int | None
    initial: str
    text: str
    best: Point
    held_out: Point
    points: tuple[Point, ...]
    devices: int
    communication_share: float
    spent_s: dict[str, float]
    adapter: bytes
    adapter_config: bytes
    initial_from: str = "the job"
    first_step_at: float = 0.0


def write_tuned(tuned: Tuned, folder: Path) -> Path:
    """Put a result into a folder that `peft.PeftModel.from_pretrained` reads, with `tuned.json` beside it; gives that
    file's path. It comes last, so where it stands the rest does. Raises ConfigError if the folder can't be written."""
    write_whole(folder, tuned.adapter, name=ADAPTER)
    write_whole(folder, tuned.adapter_config, name=ADAPTER_CONFIG)
    said = {name: value for name, value in msgspec.structs.asdict(tuned).items() if not isinstance(value, bytes)}
    for name in ("best", "held_out"):
        said[name] = msgspec.structs.asdict(said[name])
    write_whole(folder, msgspec.json.format(msgspec.json.encode(said), indent=1), name=RESULT)
    return folder / RESULT
