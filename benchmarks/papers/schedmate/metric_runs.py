"""Lines between those with metrics, as the logs of real jobs are full of them. None of them is progress.

Runs that never ran: what a training does over time, for logs whose format is public and whose program is not here.

A run has a seed, steps of uneven length (one in fifty is four times as long), a falling loss with noise, and ends
somewhere in the middle. A format is a function from the state at a step to the lines that the program prints then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import exp

_LINES = (
    "node07:{pid}:{pid} [{gpu}] NCCL INFO Channel {small:02d}/32 : 0[0] -> 1[1] via P2P/CUMEM/read",
    "node07:{pid}:{pid} [{gpu}] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB ib0:10.0.{small}.{gpu}<0>",
    "/opt/conda/lib/python3.11/site-packages/torch/optim/lr_scheduler.py:{pid}: UserWarning: Detected call of "
    "`lr_scheduler.step()` before `optimizer.step()`.",
    "WARNING:root:NaN or Inf found in input tensor.",
    "  \"hidden_size\": {pid},",
    "  \"num_hidden_layers\": {small},",
    "Namespace(batch_size={small}, epochs={small}, lr=0.001, seed={pid}, save_dir='/scratch/u{small}/run_{pid}')",
    "learning_rate: 0.0003  weight_decay: 0.1  warmup_steps: {pid}  max_steps: {pid}000",
    "Loaded /data/shards/{small}/{pid}/part-{pid:05d}.parquet shape=({pid}, 512) in 12 ms",
    "INFO:     10.1.{small}.{gpu}:{pid} - \"GET /healthz HTTP/1.1\" 200 OK",
    "torch 2.{gpu}.0+cu12{gpu}, transformers 4.{small}.{gpu}, driver 550.54.15, 2026/03/{small:02d}",
    "GPU {gpu} of 8: 45C, 312W / 700W, 61000MiB / 81559MiB",
    "Saving model checkpoint to /scratch/u{small}/out/checkpoint-{pid}",
    "[W socket.cpp:{pid}] [c10d] The client socket has failed to connect to [node{small}]:29500 (errno: 97).",
    "wandb: Syncing run dazzling-sun-{pid}",
    "attempt {gpu} of 5: mounting nfs4 10.0.0.{gpu}:/vol/{pid}",
    "model.layers.{small}.mlp.down_proj.weight  torch.Size([4096, 11008])",
    "time to first batch",
    "tokenizer: added {small} special tokens, vocab {pid}",
    "--learning-rate 0.0003 --epochs {small} --batch-size {small} --seed {pid}",
)  # fmt: skip


def noise(chance: random.Random) -> list[str]:
    return [
        chance.choice(_LINES).format(
            pid=chance.randrange(1000, 9999), gpu=chance.randrange(8), small=chance.randrange(1, 31)
        )
        for _ in range(chance.choice((1, 2, 5, 25)))
    ]


START = datetime(2026, 3, 7, 21, 58, 13, 250_000)


@dataclass
class State:
    """A run after a step. `epoch` counts from 0, `i` (the step within it) and `step` (over all) too."""

    chance: random.Random
    epochs: int
    per_epoch: int
    step_s: float
    batch: int
    tokens: int
    every: int
    epoch: int = 0
    i: int = 0
    step: int = 0
    t: float = 0.0
    epoch_t: float = 0.0
    dt: float = 0.0
    mean_dt: float = 0.0
    loss: float = 0.0
    mean_loss: float = 0.0
    lr: float = 0.0
    durations: list[float] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.epochs * self.per_epoch

    @property
    def now(self) -> datetime:
        return START + timedelta(seconds=self.t)

    @property
    def eta_s(self) -> float:
        return (self.per_epoch - self.i - 1) * self.mean_dt

    @property
    def printed(self) -> bool:
        return self.i % self.every == 0


Format = Callable[[State], list[str]]


@dataclass
class Log:
    """Lines with the times at which they were printed, and what is true at their end."""

    lines: list[tuple[float, str]]
    values: dict[str, float]


def run(form: str, seed: int, lines_of: Format, *, header: Callable[[State], list[str]] | None = None) -> Log:
    chance = random.Random(f"{form}-{seed}")
    state = State(
        chance=chance,
        epochs=chance.choice((3, 5, 10, 90)),
        per_epoch=chance.randrange(100, 900),
        step_s=chance.choice((0.03, 0.12, 0.45, 1.7)) * chance.uniform(0.8, 1.2),
        batch=chance.choice((16, 32, 64, 256)),
        tokens=chance.choice((512, 2048)),
        every=chance.choice((5, 10, 20)),
    )
    last = chance.randrange(state.per_epoch // 2, min(state.total, 6 * state.per_epoch) - 1)
    lines = [(0.0, line) for line in (header(state) if header else [])]
    values: dict[str, float] = {}
    for _ in _steps(state, last):
        printed = lines_of(state)
        lines += [(state.t, line) for line in printed]
        if printed and state.printed:
            values = _values(state)
    return Log(lines, values)


def _steps(state: State, last: int) -> Iterator[None]:
    for step in range(last + 1):
        state.step, state.epoch, state.i = step, step // state.per_epoch, step % state.per_epoch
        if state.i == 0:
            state.epoch_t = 0.0
        slow = 4.0 if state.chance.random() < 0.02 else 1.0
        state.dt = state.step_s * slow * state.chance.lognormvariate(0.0, 0.06)
        state.t += state.dt
        state.epoch_t += state.dt
        state.durations.append(state.dt)
        recent = state.durations[-100:]
        state.mean_dt = sum(recent) / len(recent)
        state.loss = 7.0 * exp(-3.0 * step / state.total) * state.chance.uniform(0.95, 1.05)
        state.mean_loss = state.loss if step == 0 else 0.9 * state.mean_loss + 0.1 * state.loss
        state.lr = 3e-4 * (1.0 - step / state.total) + 1e-6
        yield


def _values(state: State) -> dict[str, float]:
    middle = sorted(state.durations[-200:])[len(state.durations[-200:]) // 2]
    return {
        "step": state.i,
        "overall_step": state.step,
        "loss": state.loss,
        "steps_per_s": 1.0 / middle,
        "fraction": (state.step + 1) / state.total,
        "learning_rate": state.lr,
        "samples_per_s": state.batch / middle,
        "tokens_per_s": state.batch * state.tokens / middle,
        "epoch": state.epoch,
        "per_epoch": state.per_epoch,
        "batch": state.batch,
    }
