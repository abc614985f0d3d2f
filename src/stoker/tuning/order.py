"""The argument, the saved state and the result of a tuning call."""

from __future__ import annotations

import enum
import os
from pathlib import Path

import msgspec

from stoker.contexts.adapter_files import CONFIG, WEIGHTS
from stoker.contexts.folders import state_folder
from stoker.decoding import UNREADABLE
from stoker.run_folder import write_whole
from stoker.tuning.job import Job, Metric, Sample


class BankPlace(msgspec.Struct, frozen=True):
    """The place of a model's prompt bank: its folder, which may be invisible to a library, and the model's identity."""

    folder: str
    model: str

    @staticmethod
    def of(model: str, *, folder: str | os.PathLike[str] = "") -> BankPlace:
        """Return the bank of a model.

        Args:
            model: Identity of the model.
            folder: Folder of the bank. The default is in the user's state folder.
        """
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in model)[:80]
        path = Path(folder).absolute() if folder else state_folder() / "prompt-banks" / name
        return BankPlace(str(path), model)


class InitialPrompt(msgspec.Struct, frozen=True):
    """The initial text of a soft prompt, its origin, and a remark (`note`)."""

    text: str
    source: str = "the job"
    note: str = ""

    def __str__(self) -> str:
        return f"{self.source} ({self.note})" if self.note else self.source


class Saved(msgspec.Struct, frozen=True):
    """The state from which a job resumes. `metric`: value of the metric at the last evaluation, for display."""

    initial: InitialPrompt
    checkpoint: bytes
    metric: float | None = None


class Order(msgspec.Struct, frozen=True):
    """The argument of one tuning call. `slo_s`: seconds from submission to deadline (0: no deadline). `start`: packed
    `Saved` of an earlier attempt."""

    job: Job
    samples: tuple[Sample, ...]
    bank: BankPlace | None = None
    slo_s: float = 0.0
    start: bytes = b""


def pack(saved: Saved) -> bytes:
    """Encode a saved state without pickle.

    Args:
        saved: The state.

    Returns:
        Bytes for `unpack`.
    """
    return msgspec.msgpack.encode(saved)


def unpack(data: bytes) -> Saved | None:
    """Decode a saved state.

    Args:
        data: Bytes from `pack`.

    Returns:
        The state, or None for empty or invalid bytes. The job then starts from the beginning.
    """
    try:
        return msgspec.msgpack.decode(data, type=Saved) if data else None
    except UNREADABLE:
        return None


RESULT = "tuned.json"


class TuningEnd(enum.Enum):
    REACHED = "reached"
    ITERATIONS = "iterations"
    DIVERGED = "diverged"
    """The loss is not finite. The result is the best earlier prompt. A smaller learning rate can help."""


class EvaluationPoint(msgspec.Struct, frozen=True, array_like=True):
    """An evaluation: iteration, metric, and loss per target token."""

    iteration: int
    metric: float
    loss: float


class Tuned(msgspec.Struct, frozen=True):
    """The result of a job (the last attribute in PromptTuner's Table 3) and its cost.

    `text`: tokens nearest to the soft prompt, for display only. `initial_from`: origin of the initial prompt.
    `held_out`: evaluation on samples used neither to train nor to choose the prompt. `best`: first evaluation that
    reached the target, or else the best evaluation. `spent_s`: seconds by `pace.Part` over all runs of the job.
    `devices`: number of devices in the last run. `adapter`, `adapter_config`: files for PEFT. `first_step_at`: time of
    the last run's first step, in seconds since the epoch (0: no step).
    """

    name: str
    metric: Metric
    reach: float | None
    end: TuningEnd
    iterations: int
    iterations_to_accuracy: int | None
    initial: str
    text: str
    best: EvaluationPoint
    held_out: EvaluationPoint
    points: tuple[EvaluationPoint, ...]
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
        Path of `tuned.json`, which is written last.

    Raises:
        ConfigError: The folder is not writable.
    """
    write_whole(folder, tuned.adapter, name=WEIGHTS)
    write_whole(folder, tuned.adapter_config, name=CONFIG)
    said = {name: value for name, value in msgspec.structs.asdict(tuned).items() if not isinstance(value, bytes)}
    for name in ("best", "held_out"):
        said[name] = msgspec.structs.asdict(said[name])
    write_whole(folder, msgspec.json.format(msgspec.json.encode(said), indent=1), name=RESULT)
    return folder / RESULT
