"""What the context paper says of its runs (Pervasive Context Management §4), as numbers.

150,000 inferences, 20 GPUs of two kinds (§4.1). Times are read from the text, which rounds them to 100 s.
"""

from __future__ import annotations

import msgspec

from stoker.contexts.recipe import Awareness

INFERENCES = 150_000
A10, TITAN = "NVIDIA A10", "NVIDIA TITAN X (Pascal)"
EACH = 10
"""GPUs of each kind (§4.1)."""
MODEL_BYTES, ENVIRONMENT_BYTES, LOADED_BYTES = 3_700_000_000, 10_500_000_000, 7_400_000_000
"""Of the model on disk, the software environment, and the model when it is loaded (§4.1)."""
SHARED_BYTES_PER_S = 84e9 / 8
"""Read bandwidth of the shared file system (§4.1: 84 Gb/s)."""


class Run(msgspec.Struct, frozen=True):
    """One run: how much of a context outlived a call, inferences a call, and how long all of them took."""

    figure: str
    awareness: Awareness
    batch: int
    seconds: float


RUNS = (
    Run("6", Awareness.NONE, 100, 10_400.0),
    Run("6, 7", Awareness.DISK, 100, 5_300.0),
    Run("6, 7", Awareness.FULL, 100, 2_900.0),
    Run("7", Awareness.DISK, 1, 141_100.0),
    Run("7", Awareness.DISK, 1000, 3_200.0),
    Run("7", Awareness.FULL, 1, 3_300.0),
)
"""§4.2 and §4.3. Full awareness with calls of 1000 has no number of its own: it lies between the best and the worst."""

PREEMPTED_FROM_S, PREEMPTED_EVERY_S = 900.0, 60.0
"""§4.4: one GPU a minute from the 900-second mark, A10s first, until none is left."""
FIGURE_8 = {Awareness.DISK: 46_000, Awareness.FULL: 62_900}
"""Inferences that were completed; with full awareness three GPUs dropped out early."""
LOST_EARLY = 3

FIGURE_9A_S, FIGURE_9A_GPUS = 5_000.0, (4, 20)
FIGURE_9B_S, FIGURE_9B_GPUS = 783.0, 186
"""§4.5: when all were completed, and between how many GPUs, or with up to how many."""

TABLE_1 = {
    "NVIDIA Quadro RTX 6000": 106,
    A10: 78,
    TITAN: 69,
    "NVIDIA GeForce GTX 1080 Ti": 63,
    "NVIDIA RTX 6000 Ada Generation": 36,
    "NVIDIA GeForce GTX TITAN X": 34,
    "NVIDIA A40": 26,
    "NVIDIA H100 80GB HBM3": 15,
}
"""GPUs of each kind in the paper's cluster."""

TERAFLOPS = {
    "NVIDIA Quadro RTX 6000": 130.5,
    A10: 125.0,
    TITAN: 11.0,
    "NVIDIA GeForce GTX 1080 Ti": 11.3,
    "NVIDIA RTX 6000 Ada Generation": 364.0,
    "NVIDIA GeForce GTX TITAN X": 6.7,
    "NVIDIA A40": 149.7,
    "NVIDIA H100 80GB HBM3": 989.0,
}
"""Peak rates by the makers' data sheets: dense FP16 on tensor cores where there are any, else FP32. Not the paper's."""
