"""`python -m benchmarks.gpu.parts PART ANSWER`: run one part; write each number to ANSWER at once."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType

from benchmarks.gpu import budget
from benchmarks.gpu.place import REHEARSAL, Answer, Place

PARTS = {
    "device": "device_parts", "model": "device_parts", "turns": "device_parts",
    "awareness": "load_parts", "load": "load_parts",
    "decode": "decode_parts", "slinfer": "slinfer_parts", "encoder": "device_parts",
    "tune": "device_parts", "gang": "device_parts",
}  # fmt: skip
"""Module of each part, with a function named like the part."""


def function_of(part: str) -> Callable[[Answer, Place], None]:
    found: Callable[[Answer, Place], None] = getattr(import_module(f"benchmarks.gpu.{PARTS[part]}"), part)
    return found


def _stop(_number: int, _frame: FrameType | None) -> None:
    sys.exit("stopped")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("answer", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="time limit of the part, in seconds")
    asked = parser.parse_args()
    if not REHEARSAL and asked.part != "gang":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # Measure one GPU.
    signal.signal(signal.SIGTERM, _stop)
    answer, place = Answer(asked.answer), Place(asked.work, asked.seconds)
    if "model" in budget.PARTS[asked.part].needs and not any(place.model.glob("*.safetensors")):
        answer.skip("there is no model: the part `model` did not write it")
    else:
        function_of(asked.part)(answer, place)


if __name__ == "__main__":
    main()
