"""A tuning call: its argument, the state that it keeps between libraries, its result and the result's folder."""

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
    """The place of a model's bank: a folder that the library may or may not see, and the model's identity."""

    folder: str
    model: str

    @staticmethod
    def of(model: str, *, folder: str | os.PathLike[str] = "") -> BankPlace:
        """Return the place of a model's bank.

        Args:
            model: The model's identity.
            folder: Folder of the bank; by default one in the user's state folder.
        """
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in model)[:80]
        path = Path(folder).absolute() if folder else state_folder() / "prompt-banks" / name
        return BankPlace(str(path), model)


class Initial(msgspec.Struct, frozen=True):
    """The initial text of a soft prompt, its origin, and a remark (`note`)."""

    text: str
    source: str = "the job"
    note: str = ""

    def __str__(self) -> str:
        return f"{self.source} ({self.note})" if self.note else self.source


class Saved(msgspec.Struct, frozen=True):
    """The state for resuming a job: its initial prompt, which is not looked up again, and its checkpoint. `metric`: of
    the last evaluation, for people.
    """

    initial: Initial
    checkpoint: bytes
    metric: float | None = None


class Order(msgspec.Struct, frozen=True):
    """The work of one call. `slo_s`: seconds from submission to deadline (0: none); `start`: a packed `Saved` of an
    earlier attempt; `bank`: None to use no bank.
    """

    job: Job
    samples: tuple[Sample, ...]
    bank: BankPlace | None = None
    slo_s: float = 0.0
    start: bytes = b""


def pack(saved: Saved) -> bytes:
    """Encode a state without code.

    Args:
        saved: The state.

    Returns:
        Bytes for `unpack`.
    """
    return msgspec.msgpack.encode(saved)


def unpack(data: bytes) -> Saved | None:
    """Decode a state.

    Args:
        data: Bytes of `pack`.

    Returns:
        The state; None for no or invalid bytes, because a job can start again.
    """
    try:
        return msgspec.msgpack.decode(data, type=Saved) if data else None
    except UNREADABLE:
        return None


RESULT = "tuned.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


class TuningEnd(enum.Enum):
    REACHED = "reached"
    """The target metric is reached."""
    ITERATIONS = "iterations"
    """All iterations have run."""
    DIVERGED = "diverged"
    """The loss is not finite; the result is the best prompt before. A smaller learning rate helps."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """An evaluation: its iteration, the metric, and the loss per target token."""

    iteration: int
    metric: float
    loss: float


class Tuned(msgspec.Struct, frozen=True):
    """The result of a job (Table 3's last attribute) and its cost.

    `text`: the tokens nearest to the soft prompt, for people and not for use. `initial_from`: the origin of the
    initial prompt. `held_out`: measured on samples that neither trained nor chose the prompt. `best`: the evaluation
    that chose it, the first that reached the target, else the best; `points`: all evaluations, starting with the
    initial prompt's. `spent_s`: seconds by `pace.Part` over all runs of the job; `devices`: of the last run. `adapter`
    and `adapter_config`: the contents of PEFT's files. `first_step_at`: the first step of the last run on its device's
    clock (seconds since the epoch; 0 without a step).
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
    """Write a result into a folder that `peft.PeftModel.from_pretrained` reads.

    Args:
        tuned: The result.
        folder: Created if missing.

    Returns:
        Path of `tuned.json`, which is written last, so that the folder is complete if it exists.

    Raises:
        ConfigError: The folder cannot be written.
    """
    write_whole(folder, tuned.adapter, name=ADAPTER)
    write_whole(folder, tuned.adapter_config, name=ADAPTER_CONFIG)
    said = {name: value for name, value in msgspec.structs.asdict(tuned).items() if not isinstance(value, bytes)}
    for name in ("best", "held_out"):
        said[name] = msgspec.structs.asdict(said[name])
    write_whole(folder, msgspec.json.format(msgspec.json.encode(said), indent=1), name=RESULT)
    return folder / RESULT
