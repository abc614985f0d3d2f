"""What an evaluation depends on: what the paper says, and the usual values of what it leaves open. `why` has their
reasons, and `grid.toml` the other values of six of them that are tried.

*What a better prompt is worth.* A job's iterations are bounded by what its trace's GPU time stands for. From the prompt
that induction gives it needs all of these; from the bank's, fewer by the speedups of Figure 9b. No scheduler knows a
job's before it is done.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from benchmarks.papers.prompt_tuner import paper


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
