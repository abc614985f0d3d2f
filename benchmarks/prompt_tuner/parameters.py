"""What an evaluation depends on: what the paper says, and what it leaves open, each with the reason for its value.

All of it was written down before any two policies were compared, and nothing was changed for what came of it. Three
unknowns need a word.

*How much work the jobs are.* The trace is not public. Durations run "from a few seconds to several minutes"; their
shape is that of the jobs in Microsoft's Philly trace that took 5 s to 10 min (a spread of 0.93 in the logarithm). The
median, and the GPUs a job had in the trace, are chosen so that the medium load would keep 56 % of 32 GPUs allocated
under a system that loads everything anew (Figure 3a): 213 jobs of 78 GPU-seconds on the mean, of which the bank
leaves about a half, its lookup, and a cold start on every GPU of the job.

*How long a cold start takes.* Allocation is 37-41 % of a job's execution (§2.2): with durations of 46 s on the mean,
29 s. What differs by model is its weights.

*What a better prompt is worth.* A job's iterations are bounded by what its trace's GPU time stands for. From the prompt
that induction gives it needs all of these; from the bank's, fewer by the speedups of Figure 9b. No scheduler knows a
job's before it is done.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from benchmarks.prompt_tuner import paper


class Model(msgspec.Struct, frozen=True):
    """A language model. `item_s`: an iteration on one replica of `devices` GPUs; only the product with a job's
    iterations matters. `bank_s`: a lookup among 3,000 candidates. `speedup`: iterations from the induced prompt over
    those from the bank's, least and most."""

    name: str
    item_s: float
    weights_bytes: float
    bank_s: float
    speedup: tuple[float, float]
    devices: int = 1


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("gpt2-base", 0.05, 0.5e9, 5.3, (1.81, 2.8)),
        Model("gpt2-large", 0.1, 3.1e9, 6.1, (1.38, 2.4)),
        Model("vicuna-7b", 0.2, 13.5e9, 9.2, (1.28, 2.2)),
        Model("llama-30b", 0.2, 65e9, 10.0, (1.28, 2.2), devices=4),
        Model("qwen-7b-r1", 0.2, 15.2e9, 9.2, (1.28, 2.2), devices=4),
    )
}


class Parameters(msgspec.Struct, frozen=True):
    """Seconds, bytes a second, shares. `WHY` says where each comes from."""

    peak: float = 5.0
    mixed: bool = True
    duration_median_s: float = 30.0
    duration_spread: float = 0.93
    duration_least_s: float = 5.0
    duration_most_s: float = 300.0
    replicas: tuple[tuple[int, float], ...] = ((1, 0.6), (2, 0.25), (4, 0.15))
    widest: int = 8
    bound: float = 1.0
    speedup: float = 1.0
    prepare_s: float = 23.5
    read_bytes_per_s: float = 1.1e9
    overhead: float = 1.0
    meet_s: float = 2.0
    gang_efficiency: float = 0.995
    budget: float = 0.2
    bank_size: int = 3000
    prompt_spread: float = 0.4
    price_per_hour: float = 40.97

    def cold_s(self, model: Model) -> float:
        """From the order to warm a replica until it is: what a cold start takes."""
        return self.prepare_s + model.weights_bytes / model.devices / self.read_bytes_per_s

    @property
    def device_price_s(self) -> float:
        """Dollars for a GPU and second."""
        return self.price_per_hour / paper.SERVER_GPUS / 3600.0


class Why(msgspec.Struct, frozen=True):
    """Where a value comes from, and why it is what it is."""

    source: str
    reason: str


_OURS = "ours"
WHY: Mapping[str, Why] = {
    "peak": Why("§2.2", "the fullest minute has five times the jobs of the mean one, rounded to whole jobs"),
    "mixed": Why("§6.1", '"three 20-minute LPT traces" for three loads: the models of a load come in one trace'),
    "duration_median_s": Why(_OURS, "with `replicas`: 78 GPU-seconds a job, see above (Figure 3a's 56 %)"),
    "duration_spread": Why("Philly", "standard deviation of the logarithm, of its 30,610 jobs of 5 s to 10 min"),
    "duration_least_s": Why("§6.1", '"from a few seconds": what is drawn below is this long'),
    "duration_most_s": Why("§6.1", '"to several minutes": what is drawn above is this long'),
    "replicas": Why(_OURS, "GPUs (of a large model: replicas) that a job had in the trace, with their shares"),
    "widest": Why(_OURS, "no job gets more replicas than a server has GPUs"),
    "bound": Why(_OURS, "iterations at most, over those that a job needs from an induced prompt"),
    "speedup": Why("Figure 9b", "factor on the speedups by model; log-uniform between least and most, drawn by job"),
    "prepare_s": Why("§2.2", "container, framework, GPU runtime: with the weights 37-41 % of a mean job"),
    "read_bytes_per_s": Why(_OURS, "weights into one GPU; each GPU of a replica reads its part of them"),
    "overhead": Why("§6.1", '"resource allocation overhead" in an SLO: so many cold starts of the model'),
    "meet_s": Why("§5.1", "members of a gang meet: at most 2 s, and so long here"),
    "gang_efficiency": Why("§2.2", "communication takes 0.4-0.5 %: kept with each doubling"),
    "budget": Why("§4.4.3", "the bank is skipped when its lookup takes more of the SLO"),
    "bank_size": Why("§4.3.3", "candidates; a lookup scores 50 and a fiftieth of these"),
    "prompt_spread": Why("Figure 2c", "of the iterations' logarithm: the worst of 20 prompts takes 4.5 times the best"),
    "price_per_hour": Why("AWS", "p4de.24xlarge (8 GPUs) on demand, US East, 2024; ratios do not depend on it"),
}  # fmt: skip
MODELS_WHY = (
    "`bank_s`: §6.3 for the first three; the two large ones by these over the weights that a GPU reads. "
    "`speedup`: the least are those of Figure 9b (§6.3), GPT2-B's most too; the others' most are ours, under GPT2-B's, "
    "which §6.3 calls the highest. The 4.7 of §4.4.3 are not used. `weights_bytes`: parameters of 16 bits (GPT-2: 32)."
)
