"""What a tuned job gives back, and the folder that keeps it."""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

from stoker.run_folder.whole_file import write_whole
from stoker.tuning.job import Metric

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
