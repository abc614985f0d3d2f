"""`python -m benchmarks.gpu.parts PART ANSWER`: one part of `make gpu`; what it measured goes into the file ANSWER.

Numbers are written as they come, so that a part that is cut off leaves those that it had.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.gpu.device_parts import device, probe
from benchmarks.gpu.memory_parts import faults, memory
from benchmarks.gpu.model_parts import load, model, tokens, zygote
from benchmarks.gpu.place import Answer, Place
from benchmarks.gpu.tuning_parts import gang, tune

PARTS = {
    each.__name__: each for each in (device, probe, model, load, tokens, zygote, memory, faults, gang, tune)
}  # fmt: skip


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("answer", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--size", type=int, required=True)
    asked = parser.parse_args()
    PARTS[asked.part](Answer(asked.answer), Place(asked.work, asked.size))


if __name__ == "__main__":
    main()
