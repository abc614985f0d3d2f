"""Logs of trainings that never ran, in public formats whose programs are not here, and lines between those with
metrics.

A run has a seed, steps of uneven length (one in fifty is four times as long), a falling loss with noise, and ends
somewhere in the middle. A format is a function from the state at a step to the lines that the program prints then.
"""

from __future__ import annotations

import json
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
"""The lines that a program prints at a step; called at steps at which it prints."""
_PRINTS_MORE = ("nanogpt", "maxtext")


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


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _pytorch_mnist(s: State) -> list[str]:
    rows = s.per_epoch * s.batch
    return [f"Train Epoch: {s.epoch + 1} [{s.i * s.batch}/{rows} ({100 * s.i / s.per_epoch:.0f}%)]\tLoss: {s.loss:.6f}"]


def _imagenet(s: State) -> list[str]:
    lines = []
    if s.i == 0 and s.epoch:
        lines = [
            f"Test: [{k:3d}/100]\tTime {s.dt / 3:6.3f} ({s.dt / 3:6.3f})\tLoss {s.loss:.4e} ({s.loss:.4e})\t"
            f"Acc@1  31.25 ( 30.10)\tAcc@5  56.25 ( 55.00)"
            for k in range(0, 100, 10)
        ] + [" *   Acc@1 30.100 Acc@5 55.000"]
    lines.append(
        f"Epoch: [{s.epoch}][{s.i + 1:5d}/{s.per_epoch}]\tTime {s.dt:6.3f} ({s.mean_dt:6.3f})\t"
        f"Data {s.dt / 50:6.3f} ({s.mean_dt / 50:6.3f})\tLoss {s.loss:.4e} ({s.mean_loss:.4e})\t"
        f"Acc@1  12.50 ( 11.80)\tAcc@5  31.25 ( 30.12)"
    )
    return lines


def _timm(s: State) -> list[str]:
    lines = []
    if s.i == 0 and s.epoch:
        lines = [
            f"Test: [{k:4d}/48]  Time: {s.dt / 3:.3f} ({s.dt / 3:.3f})  Loss:  {s.loss:6.3f} ({s.loss:6.3f})  "
            f"Acc@1:  31.250 ( 30.100)  Acc@5:  56.250 ( 55.000)"
            for k in range(0, 49, 8)
        ]
    lines.append(
        f"Train: {s.epoch} [{s.i:>4d}/{s.per_epoch} ({100 * s.i / (s.per_epoch - 1):>3.0f}%)]  "
        f"Loss: {s.loss:#.3g} ({s.mean_loss:#.3g})  Time: {s.dt:.3f}s, {s.batch / s.dt:>7.2f}/s  "
        f"({s.mean_dt:.3f}s, {s.batch / s.mean_dt:>7.2f}/s)  LR: {s.lr:.3e}  Data: {s.dt / 40:.3f} (0.012)"
    )
    return lines


def _fairseq(s: State) -> list[str]:
    stamp = f"{s.now:%Y-%m-%d %H:%M:%S}"
    lines = []
    if s.i == 0 and s.epoch:
        lines = [
            f"{stamp} | INFO | valid | epoch {s.epoch:03d} | valid on 'valid' subset | loss {s.loss:.3f} | ppl 90.1 | "
            f"wps 70123.4 | wpb 2890.1 | bsz 98.2 | num_updates {s.step}"
        ]
    rate = 1 / s.mean_dt
    lines.append(
        f"{stamp} | INFO | train_inner | epoch {s.epoch + 1:03d}:  {s.i + 1:5d} / {s.per_epoch:d} "
        f"loss={s.loss:.3f}, nll_loss={s.loss * 0.9:.3f}, ppl={2 ** (s.loss * 0.9):.2f}, "
        f"wps={s.batch * s.tokens * rate:.1f}, ups={rate:.2f}, wpb={s.batch * s.tokens}, bsz={s.batch}, "
        f"num_updates={s.step + 1}, lr={s.lr:g}, gnorm=1.32, loss_scale=64, train_wall={10 * s.dt:.0f}, "
        f"gb_free=9.1, wall={s.t:.0f}"
    )
    return lines


def _deepspeed(s: State) -> list[str]:
    stamp = f"[{s.now:%Y-%m-%d %H:%M:%S},{s.now.microsecond // 1000:03d}] [INFO]"
    return [
        f"{stamp} [logging.py:96:log_dist] [Rank 0] step={s.step + 1}, skipped=0, lr=[{s.lr}], mom=[(0.9, 0.95)]",
        f"{stamp} [timer.py:260:stop] epoch={s.epoch}/micro_step={s.i + 1}/global_step={s.step + 1}, "
        f"RunningAvgSamplesPerSec={s.batch / s.mean_dt}, CurrSamplesPerSec={s.batch / s.dt}, MemAllocated=7.79GB, "
        f"MaxMemAllocated=10.55GB",
        f"loss: {s.loss:.4f}",
    ]


def _keras_classic(s: State) -> list[str]:
    lines = [f"Epoch {s.epoch + 1}/{s.epochs}"] if s.i == 0 else []
    full = 30 * (s.i + 1) // s.per_epoch
    bar = "=" * max(0, full - 1) + ">" + "." * (30 - full)
    eta = s.eta_s
    left = f"{eta:.0f}s" if eta < 60 else f"{int(eta // 60)}:{int(eta % 60):02d}"
    width = len(str(s.per_epoch))
    lines.append(
        "\b" * 80 + f"\r{s.i + 1:{width}d}/{s.per_epoch} [{bar}] - ETA: {left} - loss: {s.loss:.4f} - acc: 0.3125"
    )
    return lines


def _nanogpt(s: State) -> list[str]:
    lines = []
    if s.step % 250 == 0:
        lines.append(f"step {s.step}: train loss {s.loss:.4f}, val loss {s.loss * 1.02:.4f}")
    if s.printed:
        lines.append(f"iter {s.step}: loss {s.loss:.4f}, time {s.dt * 1000:.2f}ms, mfu 31.20%")
    return lines


def _json_lines(s: State) -> list[str]:
    line = {
        "time": f"{s.now.isoformat()}", "step": s.step + 1, "total_steps": s.total, "train/loss": round(s.loss, 5),
        "lr": s.lr, "tokens_per_second": round(s.batch * s.tokens / s.dt, 1), "step_time": round(s.dt, 5),
    }  # fmt: skip
    return [json.dumps(line)]


def _detectron2(s: State) -> list[str]:
    mean = s.t / (s.step + 1)
    eta = int(mean * (s.total - s.step - 1))
    left = f"{eta // 3600}:{eta // 60 % 60:02d}:{eta % 60:02d}"
    return [
        f"[{s.now:%m/%d %H:%M:%S} d2.utils.events]:  eta: {left}  iter: {s.step}  total_loss: {s.loss:.4g}  "
        f"loss_cls: {s.loss * 0.4:.4g}  loss_box_reg: {s.loss * 0.3:.4g}  loss_rpn_cls: {s.loss * 0.2:.4g}  "
        f"loss_rpn_loc: {s.loss * 0.1:.4g}  time: {mean:.4f}  data_time: {s.dt / 30:.4f}  lr: {s.lr:.5g}  "
        f"max_mem: 5120M"
    ]


def _opennmt(s: State) -> list[str]:
    rate = s.batch * s.tokens / s.mean_dt
    return [
        f"[{s.now:%Y-%m-%d %H:%M:%S},{s.now.microsecond // 1000:03d} INFO] "
        f"Step {s.step + 1:2d}/{s.total:5d}; acc:  31.20; "
        f"ppl: {2.718**s.loss:5.2f}; xent: {s.loss:4.2f}; lr: {s.lr:7.5f}; {rate * 0.97:3.0f}/{rate:3.0f} tok/s; "
        f"{s.t:6.0f} sec"
    ]


def _marian(s: State) -> list[str]:
    since = sum(s.durations[-s.every :])
    words = s.batch * s.tokens * len(s.durations[-s.every :]) / since
    rows = s.batch * (s.i + 1)
    return [
        f"[{s.now:%Y-%m-%d %H:%M:%S}] Ep. {s.epoch + 1} : Up. {s.step + 1} : Sen. {rows:,} : Cost {s.loss:.8f} * "
        f"{rows * 20:,} @ {s.batch * 20:,} after {(s.step + 1) * s.batch * 20:,} : Time {since:.2f}s : "
        f"{words:.2f} words/s : L.r. {s.lr:.4e}"
    ]


def _detr(s: State) -> list[str]:
    lines = []
    if s.i == 0 and s.epoch:
        lines = [
            f"Test:  [{k:3d}/100]  eta: 0:00:{59 - k // 2:02d}  class_error: 40.10  loss: {s.loss:.4f} ({s.loss:.4f})  "
            f"time: {s.dt / 3:.4f}  data: 0.0102  max mem: 5120"
            for k in range(0, 100, 10)
        ]
        lines.append("Test: Total time: 0:00:59 (0.5900 s / it)")
    eta = int(s.epoch_t / (s.i + 1) * (s.per_epoch - s.i))
    lines.append(
        f"Epoch: [{s.epoch}]  [{s.i:{len(str(s.per_epoch))}d}/{s.per_epoch}]  "
        f"eta: {eta // 3600}:{eta // 60 % 60:02d}:{eta % 60:02d}  lr: {s.lr:.6f}  class_error: 81.20  "
        f"loss: {s.loss:.4f} ({s.mean_loss:.4f})  loss_ce: {s.loss * 0.3:.4f} ({s.mean_loss * 0.3:.4f})  "
        f"loss_bbox: {s.loss * 0.7:.4f} "
        f"({s.mean_loss * 0.7:.4f})  time: {s.epoch_t / (s.i + 1):.4f}  data: 0.0102  max mem: 5120"
    )
    return lines


def _mmengine(s: State) -> list[str]:
    stamp = f"{s.now:%m/%d %H:%M:%S} - mmengine - INFO -"
    lines = []
    if s.i == 0 and s.epoch:
        lines = [
            f"{stamp} Epoch(val) [{s.epoch}][{k:3d}/100]    eta: 0:00:09  time: {s.dt / 3:.4f}  data_time: 0.0102  "
            f"memory: 1022  "
            for k in range(10, 101, 10)
        ]
    epoch = f"[{s.epoch + 1}]".rjust(len(str(s.epochs)) + 3)
    lines.append(
        f"{stamp} Epoch(train){epoch}[{s.i + 1:{len(str(s.per_epoch))}d}/{s.per_epoch}]  lr: {s.lr:.4e}  "
        f"eta: {_clock(s.mean_dt * (s.total - s.step - 1))}  time: {s.mean_dt:.4f}  data_time: {s.dt / 50:.4f}  "
        f"memory: 5120  loss: {s.loss:.4f}  loss_cls: {s.loss * 0.6:.4f}  loss_bbox: {s.loss * 0.4:.4f}"
    )
    return lines


def _ultralytics(s: State) -> list[str]:
    lines = []
    if s.i == 0:
        lines = ["      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size"]
    share = (s.i + 1) / s.per_epoch
    columns = "".join(f"{s.loss * part:11.4g}" for part in (0.5, 0.3, 0.2))
    spent, left = _clock(s.epoch_t)[2:], _clock(s.eta_s)[2:]
    rate = f"{1 / s.mean_dt:5.2f}it/s" if s.mean_dt < 1 else f"{s.mean_dt:5.2f}s/it"
    lines.append(
        f"\r{f'{s.epoch + 1}/{s.epochs}':>11}{'7.31G':>11}{columns}{31:11.4g}{640:11.4g}: {share:4.0%}|"
        f"{'█' * int(10 * share):10}| {s.i + 1}/{s.per_epoch} [{spent}<{left}, {rate}]"
    )
    return lines


def _espnet(s: State) -> list[str]:
    first = max(1, s.i + 2 - s.every)
    return [
        f"[node07] {s.now:%Y-%m-%d %H:%M:%S},{s.now.microsecond // 1000:03d} (trainer:762) INFO: "
        f"{s.epoch + 1}epoch:train:{first}-{s.i + 1}batch: iter_time=2.1e-04, forward_time={s.mean_dt * 0.4:.3f}, "
        f"loss_ctc={s.loss * 1.4:.3f}, loss_att={s.loss * 0.8:.3f}, acc=0.612, loss={s.loss:.3f}, "
        f"backward_time={s.mean_dt * 0.4:.3f}, optim_step_time=0.031, optim0_lr0={s.lr:.3e}, train_time={s.mean_dt:.3f}"
    ]


Formats = dict[str, tuple[Format, str]]
"""Each format, and the metrics that its logs have."""
FORMATS: Formats = {
    "pytorch_mnist": (_pytorch_mnist, "samples_done loss epoch samples_of_steps_per_s"),
    "imagenet": (_imagenet, "step loss steps_per_s epoch"),
    "timm": (_timm, "step loss steps_per_s epoch samples_per_s learning_rate"),
    "fairseq": (_fairseq, "step loss steps_per_s epoch tokens_per_s learning_rate"),
    # NVIDIA/Megatron-LM, megatron/training/training.py.
    "megatron": (
        lambda s: [
            f" [{s.now:%Y-%m-%d %H:%M:%S}] iteration {s.step + 1:8d}/{s.total:8d} | consumed samples: "
            f"{(s.step + 1) * s.batch:12d} | elapsed time per iteration (ms): {s.dt * 1000:.1f} | throughput per GPU "
            f"(TFLOP/s/GPU): 180.2 | learning rate: {s.lr:.6E} | global batch size: {s.batch:5d} | lm loss: "
            f"{s.loss:.6E} | loss scale: 1.0 | grad norm: 1.203 | number of skipped iterations:   0 "
            "| number of nan iterations:   0 |"
        ],
        "overall_step loss steps_per_s learning_rate fraction",
    ),
    "deepspeed": (_deepspeed, "overall_step loss steps_per_s epoch samples_per_s"),
    "keras_classic": (_keras_classic, "step loss steps_per_s epoch fraction"),
    "nanogpt": (_nanogpt, "overall_step loss steps_per_s fraction"),
    "json_lines": (_json_lines, "overall_step loss steps_per_s tokens_per_s learning_rate fraction"),
    # What people write themselves: step N/M, with thousands separated and a rate in tokens.
    "plain_steps": (
        lambda s: [
            f"{s.now:%H:%M:%S} step {s.step + 1:,}/{s.total:,} | loss {s.loss:.3f} | lr {s.lr:.2e} | {s.dt * 1000:.0f} "
            f"ms/step | {s.batch * s.tokens / s.dt / 1000:.1f}k tokens/s"
        ],
        "overall_step loss steps_per_s tokens_per_s learning_rate fraction",
    ),
    # yunjey/pytorch-tutorial, tutorials/02-intermediate/convolutional_neural_network/main.py.
    "epoch_lines": (
        lambda s: [f"Epoch [{s.epoch + 1}/{s.epochs}], Step [{s.i + 1}/{s.per_epoch}], Loss: {s.loss:.4f}"],
        "step loss steps_per_s epoch fraction",
    ),
}
HELD_OUT: Formats = {
    "detectron2": (_detectron2, "overall_step loss steps_per_s learning_rate"),
    "opennmt": (_opennmt, "overall_step loss steps_per_s tokens_per_s fraction"),
    "marian": (_marian, "overall_step loss steps_per_s epoch tokens_per_s learning_rate"),
    # AI-Hypercomputer/maxtext, MaxText/metric_logger.py. It prints every step.
    "maxtext": (
        lambda s: [
            f"completed step: {s.step}, seconds: {s.dt:.3f}, TFLOP/s/device: {180 / s.dt:.3f}, Tokens/s/device: "
            f"{s.batch * s.tokens / s.dt:.3f}, total_weights: {s.batch * s.tokens}, loss: {s.loss:.3f}"
        ],
        "overall_step loss steps_per_s tokens_per_s",
    ),
    "detr": (_detr, "step loss steps_per_s epoch learning_rate"),
    # pytorch/torchtitan, torchtitan/components/metrics.py, with colours.
    "torchtitan": (
        lambda s: [
            f"[titan] {s.now:%Y-%m-%d %H:%M:%S},{s.now.microsecond // 1000:03d} - root - INFO - "
            f"\x1b[31mstep: {s.step + 1:2}  \x1b[32mloss: {s.loss:7.4f}  \x1b[38;2;180;60;0mgrad_norm:  1.2031  "
            f"\x1b[36mmemory: 47.31GiB(59.71%)  \x1b[34mtps: {round(s.batch * s.tokens / s.dt):,}  "
            f"\x1b[36mtflops: 212.45  \x1b[35mmfu: 38.20%\x1b[39m"
        ],
        "overall_step loss steps_per_s tokens_per_s",
    ),
}
HELD_OUT_SECOND: Formats = {
    "mmengine": (_mmengine, "step loss steps_per_s epoch learning_rate"),
    # mosaicml/composer, composer/loggers/console_logger.py: a heading, and a line for each metric.
    "composer": (
        lambda s: [
            f"[epoch={s.epoch + 1}][batch={s.i + 1}/{s.per_epoch}]:",
            f"\t Train time/batch: {s.step}",
            f"\t Train time/epoch: {s.epoch}",
            f"\t Train loss/train/total: {s.loss:.4f}",
            f"\t Train throughput/batches_per_sec: {1 / s.mean_dt:.4f}",
            f"\t Train throughput/samples_per_sec: {s.batch / s.mean_dt:.4f}",
            f"\t Train lr-DecoupledAdamW/group0: {s.lr:.4e}",
        ],
        "step loss steps_per_s epoch samples_per_s",
    ),
    "ultralytics": (_ultralytics, "step steps_per_s epoch fraction"),
    "espnet": (_espnet, "step loss steps_per_s epoch learning_rate"),
}
HEADERS = {"nanogpt": lambda s: ["Overriding: max_iters = " + str(s.total), "tokens per iteration will be: 491,520"]}
