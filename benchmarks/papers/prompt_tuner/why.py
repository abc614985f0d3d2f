"""Where the usual value of each parameter comes from, and why it is what it is."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Why(msgspec.Struct, frozen=True):
    """Where a value comes from, and why it is what it is."""

    source: str
    reason: str


_OURS = "ours"
WHY: Mapping[str, Why] = {
    "peak": Why("§2.2", "the fullest minute has five times the jobs of the mean one, rounded to whole jobs"),
    "mixed": Why("§6.1", '"three 20-minute LPT traces" for three loads: the models of a load come in one trace'),
    "duration_median_s": Why(_OURS, "durations \"from a few seconds to several minutes\" (§6.1): the grid has four"),
    "duration_spread": Why("Philly", "standard deviation of the logarithm, of its 30,610 jobs of 5 s to 10 min"),
    "duration_least_s": Why("§6.1", '"from a few seconds": what is drawn below is this long'),
    "duration_most_s": Why("§6.1", '"to several minutes": what is drawn above is this long'),
    "replicas": Why(_OURS, "GPUs (of a large model: replicas) that a job had in the trace, with their shares"),
    "widest": Why(_OURS, 'most GPUs of a job, half a server or two ("at most tens", §7): the grid has both'),
    "bound": Why(_OURS, "iterations at most, over those that a job needs from an induced prompt"),
    "speedup": Why("Figure 9b", "factor on the speedups by model; log-uniform between least and most, drawn by job"),
    "prepare_s": Why("§2.2", 'before a model is read: "tens of seconds" (§3.2), 37-41 % of a job; the grid has three'),
    "read_bytes_per_s": Why(_OURS, "weights into one GPU; each GPU of a replica reads its part of them"),
    "overhead": Why("§6.1", '"resource allocation overhead" in an SLO: so many cold starts of the model'),
    "meet_s": Why("§5.1", "members of a gang meet: at most 2 s, and so long here"),
    "gang_efficiency": Why("§2.2", "communication takes 0.4-0.5 %: kept with each doubling"),
    "budget": Why("§4.4.3", "the bank is skipped when its lookup takes more of the SLO"),
    "bank_size": Why("§4.3.3", "candidates; a lookup scores 50 and a fiftieth of these, shared by the GPUs of a job"),
    "prompt_spread": Why("Figure 2c", "of the iterations' logarithm: the worst of 20 prompts takes 4.5 times the best"),
    "price_per_hour": Why("AWS", "p4de.24xlarge (8 GPUs) on demand, US East, 2024; ratios do not depend on it"),
}  # fmt: skip
MODELS_WHY = (
    "`bank_s`: §6.3 for the first three; the two large ones by these over the weights that a GPU reads. "
    "`speedup`: the least are those of Figure 9b (§6.3), GPT2-B's most too; the others' most are ours, under GPT2-B's, "
    "which §6.3 calls the highest. The 4.7 of §4.4.3 are not used. `weights_bytes`: parameters of 16 bits (GPT-2: 32)."
)
