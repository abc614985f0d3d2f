"""What a tuning call is given, and what it keeps on its way from one library to the next."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from stoker.contexts.folders import state_folder
from stoker.decoding import UNREADABLE
from stoker.tuning.job import Job
from stoker.tuning.samples import Sample


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
    """The text that a soft prompt begins as, where it is from, and what else there is to say of that (`note`)."""

    text: str
    source: str = "the job"
    note: str = ""

    def __str__(self) -> str:
        """Where it came from, in words."""
        return f"{self.source} ({self.note})" if self.note else self.source


class Saved(msgspec.Struct, frozen=True):
    """What a job goes on from: its initial prompt, which need not be looked up again, and its tuning's checkpoint.

    `metric` is the last evaluation's, for people.
    """

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
