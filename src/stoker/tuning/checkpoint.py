"""A job's state at the end of an iteration, as bytes: to a file, or to another pilot as the call's checkpoint.

The form is safetensors (nothing in it runs when it is read) with a JSON header. It has no word of ranks: which samples
come next is told by the iteration alone, so a job goes on with another number of devices than it had.

A file is replaced whole and reaches the disk before its name does, so what lies there is the last checkpoint or the one
before. One that can't be read is no reason to fail a job that can begin again: it is said, and the job begins again.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import torch

from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError
from stoker.run_folder.whole_file import write_whole
from stoker.tuning.result import Point

log = logging.getLogger(__name__)

FILE = "checkpoint.safetensors"
_HEADER = "stoker"
_PROMPT, _BEST, _OPTIMIZER = "prompt", "best", "optimizer."


class Header(msgspec.Struct, frozen=True):
    """What a checkpoint says beside its tensors. `job` is the digest of what decides the numbers."""

    job: str
    iteration: int
    points: tuple[Point, ...] = ()
    best: Point | None = None
    reached: int | None = None
    spent_s: dict[str, float] = {}


class TuningState(msgspec.Struct, frozen=True):
    """A checkpoint: the soft prompt `[tokens, width]`, the best one so far, and the optimizer's own tensors."""

    header: Header
    prompt: torch.Tensor
    best: torch.Tensor
    optimizer: dict[str, torch.Tensor]


def pack(state: TuningState) -> bytes:
    """The state as bytes."""
    tensors = {_PROMPT: state.prompt, _BEST: state.best}
    tensors |= {_OPTIMIZER + name: value for name, value in state.optimizer.items()}
    held = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    header = msgspec.json.encode(state.header).decode()
    return bytes(safetensors.torch.save(held, metadata={_HEADER: header}))


def unpack(data: bytes, *, job: str) -> TuningState | None:
    """The state in these bytes; None for no bytes, and (with a warning) for bytes that are no checkpoint.

    Raises ConfigError for the checkpoint of another job.
    """
    if not data:
        return None
    try:
        tensors = safetensors.torch.load(data)
        size = int.from_bytes(data[:8], "little")
        said = msgspec.json.decode(data[8 : 8 + size])["__metadata__"][_HEADER]
        header = msgspec.json.decode(said, type=Header)
        optimizer = {
            name.removeprefix(_OPTIMIZER): value for name, value in tensors.items() if name.startswith(_OPTIMIZER)
        }
        state = TuningState(header, tensors[_PROMPT], tensors[_BEST], optimizer)
    except (safetensors.SafetensorError, KeyError, TypeError, *UNREADABLE) as error:
        log.warning("a checkpoint of %d bytes can't be read (%s); the job begins again", len(data), error)
        return None
    if header.job != job:
        raise ConfigError(
            f"the checkpoint is of another job or other data ({header.job}, and this is {job}); give the job a"
            " folder of its own, or remove the checkpoint there"
        )
    return state


def read_file(folder: Path) -> bytes:
    """The checkpoint that lies in the folder; no bytes if there is none. Raises ConfigError if it can't be read."""
    try:
        return (folder / FILE).read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigError(f"{folder / FILE}: cannot be read: {error.strerror}", file=str(folder / FILE)) from None


def write_file(folder: Path, data: bytes) -> None:
    """Put a checkpoint there, whole or not at all. Raises ConfigError if the folder can't be written."""
    write_whole(folder, data, name=FILE)


def tensors_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state of its one parameter."""
    held: dict[str, Any] = optimizer.state_dict()["state"].get(0, {})
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def put_back(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Give the optimizer its state again."""
    if tensors:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: dict(tensors)}})
