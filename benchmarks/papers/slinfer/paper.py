"""What the text of SLINFER's evaluation says in numbers (arXiv:2507.00507); bars of its figures are not in it."""

from __future__ import annotations

from benchmarks.papers.slinfer.cases import SLINFER, SLLM, SLLM_C, SLLM_CS

SIZES = ("llama-3.2-3b", "llama-2-7b", "llama-2-13b")
SHORT = {"llama-3.2-3b": "3B", "llama-2-7b": "7B", "llama-2-13b": "13B", "llama-3.1-8b": "8B"}
LOADS = (32, 64, 128)

NODES_USED: dict[tuple[str, int, str, str], float] = {
    ("llama-3.2-3b", 32, SLINFER, "gpu"): 0.0,
    ("llama-3.2-3b", 32, SLINFER, "cpu"): 3.0,
    ("llama-3.2-3b", 32, SLLM, "gpu"): 3.2,
    ("llama-2-7b", 32, SLLM_C, "gpu"): 1.5,
    ("llama-2-7b", 32, SLLM_CS, "gpu"): 2.0,
    ("llama-2-7b", 64, SLLM_CS, "gpu"): 3.6,
    ("llama-2-7b", 128, SLLM_CS, "gpu"): 4.0,
    ("llama-2-7b", 32, SLINFER, "gpu"): 0.9,
    ("llama-2-7b", 64, SLINFER, "gpu"): 2.5,
    ("llama-2-7b", 128, SLINFER, "gpu"): 4.0,
    ("llama-2-13b", 128, SLLM, "gpu"): 4.0,
    ("llama-2-13b", 128, SLLM_C, "gpu"): 4.0,
    ("llama-2-13b", 128, SLLM_CS, "gpu"): 4.0,
    ("llama-2-13b", 128, SLINFER, "gpu"): 4.0,
}
"""Figure 22 and Table III: nodes used, by size, models, system and kind."""

MET: dict[tuple[str, int, str], float] = {
    ("llama-2-7b", 32, SLLM_CS): 99.0,
    ("llama-2-7b", 64, SLLM_CS): 93.0,
    ("llama-2-7b", 128, SLLM_CS): 65.0,
    ("llama-2-7b", 32, SLINFER): 99.0,
    ("llama-2-7b", 64, SLINFER): 99.0,
    ("llama-2-7b", 128, SLINFER): 86.0,
}
"""Table III: per cent of the requests that met their objectives, prefill and decode in one instance."""

MORE_MET = {SLLM: (86.0, 154.0), SLLM_C: (47.0, 62.0), SLLM_CS: (18.0, 70.0)}
"""§IX-B: by how many per cent SLINFER meets more objectives at 128 models, over the three sizes."""

TABLE_II = {
    ("cpu", "llama-2-7b", 2048): 27,
    ("cpu", "llama-2-7b", 4096): 15,
    ("gpu", "llama-2-7b", 2048): 66,
    ("gpu", "llama-2-7b", 4096): 32,
    ("gpu", "llama-2-13b", 2048): 33,
    ("gpu", "llama-2-13b", 4096): 16,
}
"""Table II: requests that an instance with a whole node serves at once."""

RESIZING = {0.0: 11.3, 0.25: 1.4}
"""§IX-I5: per cent of its life that an instance spends on resizing its cache, by the watermark."""

BAR_POINTS, BAR_GPUS, BAR_FACTOR = 4.0, 0.4, 2.0
"""How far a number may be from the paper's."""
