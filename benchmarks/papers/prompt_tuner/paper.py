"""Numbers of the PromptTuner paper's evaluation."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

LOADS: Mapping[str, Mapping[str, int]] = {
    "low": {"gpt2-base": 41, "gpt2-large": 55, "vicuna-7b": 42},
    "medium": {"gpt2-base": 77, "gpt2-large": 71, "vicuna-7b": 65},
    "high": {"gpt2-base": 99, "gpt2-large": 85, "vicuna-7b": 76},
    "llama-30b": {"llama-30b": 59},
    "qwen-7b-r1": {"qwen-7b-r1": 70},
    "vicuna-7b": {"vicuna-7b": 65},
}
"""Jobs per model in 20 minutes (§6.1). We added the last load: jobs of Figure 3's model at medium load."""
GPUS = 32
SERVER_GPUS = 8
MINUTES = 20


class Row(msgspec.Struct, frozen=True):
    violations: float
    cost: float


TABLE_7: Mapping[str, Mapping[str, Row]] = {
    "llama-30b": {"prompt-tuner": Row(28.4, 38.8), "infless": Row(38.9, 46.4), "elastic-flow": Row(82.3, 69.4)},
    "qwen-7b-r1": {"prompt-tuner": Row(23.1, 30.7), "infless": Row(36.2, 42.8), "elastic-flow": Row(74.9, 70.1)},
    "96 GPUs": {"prompt-tuner": Row(25.4, 57.2), "infless": Row(57.1, 65.9), "elastic-flow": Row(78.2, 99.1)},
}
TABLE_8: Mapping[str, Row] = {
    "whole": Row(12.4, 22.9),
    "no-warm-allocator": Row(27.8, 20.9),
    "no-delay": Row(15.6, 26.6),
    "no-budget": Row(16.3, 23.2),
}
"""Violations and cost of PromptTuner, complete and without single parts, at medium load and S = 1.0."""

FEWER_POINTS: Mapping[str, tuple[float, float]] = {"infless": (15.0, 25.0), "elastic-flow": (48.0, 51.0)}
"""Percentage points by which PromptTuner has fewer violations than a baseline (Figure 7a, §6.2)."""
SAVED = 23.0
"""Percent of the cost of INFless that PromptTuner saves at medium load, S = 1 (Figure 7d)."""
SAVED_AT: Mapping[str, float] = {"medium, S = 0.5": 38.0, "medium, S = 1.5": 17.0}
"""Percent of INFless' cost that is saved at other S."""
MOST_SAVED = 70.0
"""Percent of the cost of ElasticFlow that PromptTuner saves at medium load, S = 1.5 (§6.2)."""
LEAST_POINTS = 10.0
"""Smallest difference in violation points to a baseline at any S (§6.2)."""
BANK_FEWER_POINTS, BANK_SAVED = (13.0, 23.0), (30.0, 40.0)
"""Effect of reused prompts in Figures 8a and 8b: fewer violations in points, lower cost in percent."""
INITIALISATION = (0.11, 0.50)
"""Share of initialization in the job latency of INFless: mean and maximum (Figure 3b)."""
