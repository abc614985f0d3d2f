"""Generate training logs in public formats.

A run has a seed, a decreasing noisy loss and uneven steps: one of fifty steps takes four times as long. The run ends
before its last step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from math import exp
from pathlib import Path

import msgspec


class Prints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lines: list[str]
    when: str = ""
    k: tuple[int, int, int] = (0, 1, 1)


class Printed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    part: str
    metrics: str
    prints: list[Prints]
    header: list[str] = []


class Texts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    noise: list[str]
    formats: list[Printed]


_TEXTS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=Texts)


def noise(chance: random.Random) -> list[str]:
    return [
        chance.choice(_TEXTS.noise).format(
            pid=chance.randrange(1000, 9999), gpu=chance.randrange(8), small=chance.randrange(1, 31)
        )
        for _ in range(chance.choice((1, 2, 5, 25)))
    ]


START = datetime(2026, 3, 7, 21, 58, 13, 250_000)


@dataclass
class State:
    """State of a run after a step. `epoch`, `i` (step in the epoch) and `step` (in the run) count from 0."""

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
    def printed(self) -> bool:
        return self.i % self.every == 0


Format = Callable[[State], list[str]]
_PRINTS_MORE = ("nanogpt", "maxtext")


@dataclass
class Log:
    """Log lines with their times, and the true values after the last line."""

    lines: list[tuple[float, str]]
    values: dict[str, float]


def run(form: str, seed: int, lines_of: Format) -> Log:
    chance = random.Random(f"{form}-{seed}")
    state = State(
        chance=chance, epochs=chance.choice((3, 5, 10, 90)), per_epoch=chance.randrange(100, 900),
        step_s=chance.choice((0.03, 0.12, 0.45, 1.7)) * chance.uniform(0.8, 1.2),
        batch=chance.choice((16, 32, 64, 256)), tokens=chance.choice((512, 2048)), every=chance.choice((5, 10, 20)),
    )  # fmt: skip
    last = chance.randrange(state.per_epoch // 2, min(state.total, 6 * state.per_epoch) - 1)
    lines = [(0.0, line.format(total=state.total)) for line in HEADERS.get(form, ())]
    values: dict[str, float] = {}
    for _ in _steps(state, last):
        if state.printed or form in _PRINTS_MORE:
            lines += [(state.t, line) for line in lines_of(state)]
        if state.printed:
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
        "step": state.i, "overall_step": state.step, "loss": state.loss, "steps_per_s": 1.0 / middle,
        "fraction": (state.step + 1) / state.total, "learning_rate": state.lr, "samples_per_s": state.batch / middle,
        "tokens_per_s": state.batch * state.tokens / middle, "epoch": state.epoch, "per_epoch": state.per_epoch,
        "batch": state.batch,
    }  # fmt: skip


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _shown(s: State) -> dict[str, object]:
    words, rate = s.batch * s.tokens, 1 / s.mean_dt
    full, share = 30 * (s.i + 1) // s.per_epoch, (s.i + 1) / s.per_epoch
    since, rows = sum(s.durations[-s.every :]), s.batch * (s.i + 1)
    all_dt, left = s.t / (s.step + 1), (s.per_epoch - s.i - 1) * s.mean_dt
    return {
        **{name: getattr(s, name) for name in _PLAIN},
        **{f"loss_{name}": s.loss * part for name, part in _PARTS.items()},
        "epoch_1": s.epoch + 1, "i_1": s.i + 1, "step_1": s.step + 1, "wide": len(str(s.per_epoch)),
        "epoch_of": f"{s.epoch + 1}/{s.epochs}", "mm_epoch": f"[{s.epoch + 1}]".rjust(len(str(s.epochs)) + 3),
        "ms": s.now.microsecond // 1000, "iso": s.now.isoformat(), "first": max(1, s.i + 2 - s.every),
        "percent": 100 * s.i / s.per_epoch, "percent_of_last": 100 * s.i / (s.per_epoch - 1), "share": share,
        "dt_3": s.dt / 3, "dt_30": s.dt / 30, "dt_40": s.dt / 40, "dt_50": s.dt / 50, "dt_ms": s.dt * 1000,
        "ten_dt": 10 * s.dt, "dt_rounded": round(s.dt, 5), "mean_dt_4": s.mean_dt * 0.4, "mean_dt_50": s.mean_dt / 50,
        "all_dt": all_dt, "epoch_dt": s.epoch_t / (s.i + 1), "since": since,
        "nll": s.loss * 0.9, "ppl_2": 2 ** (s.loss * 0.9), "ppl": 2.718**s.loss, "loss_rounded": round(s.loss, 5),
        "mean_loss_3": s.mean_loss * 0.3, "mean_loss_7": s.mean_loss * 0.7,
        "samples_of_epoch": s.i * s.batch, "samples_per_epoch": s.per_epoch * s.batch,
        "samples": (s.step + 1) * s.batch,
        "samples_per_s": s.batch / s.dt, "mean_samples_per_s": s.batch / s.mean_dt, "mean_steps_per_s": rate,
        "words": words, "words_per_s": words / s.dt, "words_per_s_rounded": round(words / s.dt, 1),
        "whole_words_per_s": round(words / s.dt), "thousand_words_per_s": words / s.dt / 1000,
        "mean_words_per_s": words * rate, "source_per_s": words / s.mean_dt * 0.97, "target_per_s": words / s.mean_dt,
        "since_words_per_s": words * len(s.durations[-s.every :]) / since, "tflops": 180 / s.dt,
        "rows": rows, "rows_words": rows * 20, "batch_words": s.batch * 20, "all_words": (s.step + 1) * s.batch * 20,
        "spent": _clock(s.epoch_t)[2:], "left": _clock(left)[2:], "blocks": "█" * int(10 * share),
        "left_by_all": _clock(all_dt * (s.total - s.step - 1)),
        "left_by_epoch": _clock(s.epoch_t / (s.i + 1) * (s.per_epoch - s.i)),
        "left_in_all": _clock(s.mean_dt * (s.total - s.step - 1)),
        "keras_bar": "=" * max(0, full - 1) + ">" + "." * (30 - full),
        "keras_left": f"{left:.0f}s" if left < 60 else f"{int(left // 60)}:{int(left % 60):02d}",
        "rate": f"{1 / s.mean_dt:5.2f}it/s" if s.mean_dt < 1 else f"{s.mean_dt:5.2f}s/it",
    }  # fmt: skip


_PLAIN = [
    "epoch", "epochs", "per_epoch", "i", "step", "total", "batch", "t", "dt", "mean_dt", "loss", "mean_loss", "lr",
    "now",
]  # fmt: skip
_PARTS = {"1": 0.1, "2": 0.2, "3": 0.3, "4": 0.4, "5": 0.5, "6": 0.6, "7": 0.7, "8": 0.8, "14": 1.4, "102": 1.02}
_WHEN: dict[str, Callable[[State], bool]] = {
    "": lambda _: True, "an epoch begins": lambda s: s.i == 0, "after an epoch": lambda s: s.i == 0 and s.epoch > 0,
    "every 250 steps": lambda s: s.step % 250 == 0, "it is due": lambda s: s.printed,
}  # fmt: skip


def _lines(several: list[Prints], state: State) -> list[str]:
    due = [each for each in several if _WHEN[each.when](state)]
    shown = _shown(state) if due else {}
    return [
        line.format(**shown, k=k, k_left=59 - k // 2) for each in due for k in range(*each.k) for line in each.lines
    ]


Formats = dict[str, tuple[Format, str]]


def _formats(part: str) -> Formats:
    return {each.name: (partial(_lines, each.prints), each.metrics) for each in _TEXTS.formats if each.part == part}


FORMATS, HELD_OUT, HELD_OUT_SECOND = _formats("judged"), _formats("held out"), _formats("held out second")
HEADERS = {each.name: each.header for each in _TEXTS.formats if each.header}
