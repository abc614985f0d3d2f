"""Formats of public training scripts for which rules were written. What each prints, not how, is taken from the file
that is named with it."""

from __future__ import annotations

import json

from benchmarks.papers.schedmate.metric_runs import Format, State


def pytorch_mnist(s: State) -> list[str]:
    if not s.printed:
        return []
    rows = s.per_epoch * s.batch
    return [f"Train Epoch: {s.epoch + 1} [{s.i * s.batch}/{rows} ({100 * s.i / s.per_epoch:.0f}%)]\tLoss: {s.loss:.6f}"]


def imagenet(s: State) -> list[str]:
    lines = []
    if s.i == 0 and s.epoch:
        lines = [
            f"Test: [{k:3d}/100]\tTime {s.dt / 3:6.3f} ({s.dt / 3:6.3f})\tLoss {s.loss:.4e} ({s.loss:.4e})\t"
            f"Acc@1  31.25 ( 30.10)\tAcc@5  56.25 ( 55.00)"
            for k in range(0, 100, 10)
        ] + [" *   Acc@1 30.100 Acc@5 55.000"]
    if s.printed:
        lines.append(
            f"Epoch: [{s.epoch}][{s.i + 1:5d}/{s.per_epoch}]\tTime {s.dt:6.3f} ({s.mean_dt:6.3f})\t"
            f"Data {s.dt / 50:6.3f} ({s.mean_dt / 50:6.3f})\tLoss {s.loss:.4e} ({s.mean_loss:.4e})\t"
            f"Acc@1  12.50 ( 11.80)\tAcc@5  31.25 ( 30.12)"
        )
    return lines


def timm(s: State) -> list[str]:
    lines = []
    if s.i == 0 and s.epoch:
        lines = [
            f"Test: [{k:4d}/48]  Time: {s.dt / 3:.3f} ({s.dt / 3:.3f})  Loss:  {s.loss:6.3f} ({s.loss:6.3f})  "
            f"Acc@1:  31.250 ( 30.100)  Acc@5:  56.250 ( 55.000)"
            for k in range(0, 49, 8)
        ]
    if s.printed:
        lines.append(
            f"Train: {s.epoch} [{s.i:>4d}/{s.per_epoch} ({100 * s.i / (s.per_epoch - 1):>3.0f}%)]  "
            f"Loss: {s.loss:#.3g} ({s.mean_loss:#.3g})  Time: {s.dt:.3f}s, {s.batch / s.dt:>7.2f}/s  "
            f"({s.mean_dt:.3f}s, {s.batch / s.mean_dt:>7.2f}/s)  LR: {s.lr:.3e}  Data: {s.dt / 40:.3f} (0.012)"
        )
    return lines


def fairseq(s: State) -> list[str]:
    stamp = f"{s.now:%Y-%m-%d %H:%M:%S}"
    lines = []
    if s.i == 0 and s.epoch:
        lines = [
            f"{stamp} | INFO | valid | epoch {s.epoch:03d} | valid on 'valid' subset | loss {s.loss:.3f} | ppl 90.1 | "
            f"wps 70123.4 | wpb 2890.1 | bsz 98.2 | num_updates {s.step}"
        ]
    if s.printed:
        rate = 1 / s.mean_dt
        lines.append(
            f"{stamp} | INFO | train_inner | epoch {s.epoch + 1:03d}:  {s.i + 1:5d} / {s.per_epoch:d} "
            f"loss={s.loss:.3f}, nll_loss={s.loss * 0.9:.3f}, ppl={2 ** (s.loss * 0.9):.2f}, "
            f"wps={s.batch * s.tokens * rate:.1f}, ups={rate:.2f}, wpb={s.batch * s.tokens}, bsz={s.batch}, "
            f"num_updates={s.step + 1}, lr={s.lr:g}, gnorm=1.32, loss_scale=64, train_wall={10 * s.dt:.0f}, "
            f"gb_free=9.1, wall={s.t:.0f}"
        )
    return lines


def megatron(s: State) -> list[str]:
    if not s.printed:
        return []
    return [
        f" [{s.now:%Y-%m-%d %H:%M:%S}] iteration {s.step + 1:8d}/{s.total:8d} | consumed samples: "
        f"{(s.step + 1) * s.batch:12d} | elapsed time per iteration (ms): {s.dt * 1000:.1f} | throughput per GPU "
        f"(TFLOP/s/GPU): 180.2 | learning rate: {s.lr:.6E} | global batch size: {s.batch:5d} | lm loss: {s.loss:.6E} "
        f"| loss scale: 1.0 | grad norm: 1.203 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    ]


def deepspeed(s: State) -> list[str]:
    if not s.printed:
        return []
    stamp = f"[{s.now:%Y-%m-%d %H:%M:%S},{s.now.microsecond // 1000:03d}] [INFO]"
    return [
        f"{stamp} [logging.py:96:log_dist] [Rank 0] step={s.step + 1}, skipped=0, lr=[{s.lr}], mom=[(0.9, 0.95)]",
        f"{stamp} [timer.py:260:stop] epoch={s.epoch}/micro_step={s.i + 1}/global_step={s.step + 1}, "
        f"RunningAvgSamplesPerSec={s.batch / s.mean_dt}, CurrSamplesPerSec={s.batch / s.dt}, MemAllocated=7.79GB, "
        f"MaxMemAllocated=10.55GB",
        f"loss: {s.loss:.4f}",
    ]


def keras_classic(s: State) -> list[str]:
    lines = [f"Epoch {s.epoch + 1}/{s.epochs}"] if s.i == 0 else []
    if s.printed:
        full = 30 * (s.i + 1) // s.per_epoch
        bar = "=" * max(0, full - 1) + ">" + "." * (30 - full)
        eta = s.eta_s
        left = f"{eta:.0f}s" if eta < 60 else f"{int(eta // 60)}:{int(eta % 60):02d}"
        width = len(str(s.per_epoch))
        lines.append(
            "\b" * 80 + f"\r{s.i + 1:{width}d}/{s.per_epoch} [{bar}] - ETA: {left} - loss: {s.loss:.4f} - acc: 0.3125"
        )
    return lines


def nanogpt(s: State) -> list[str]:
    lines = []
    if s.step % 250 == 0:
        lines.append(f"step {s.step}: train loss {s.loss:.4f}, val loss {s.loss * 1.02:.4f}")
    if s.printed:
        lines.append(f"iter {s.step}: loss {s.loss:.4f}, time {s.dt * 1000:.2f}ms, mfu 31.20%")
    return lines


def nanogpt_header(s: State) -> list[str]:
    return ["Overriding: max_iters = " + str(s.total), "tokens per iteration will be: 491,520"]


def json_lines(s: State) -> list[str]:
    if not s.printed:
        return []
    line = {
        "time": f"{s.now.isoformat()}", "step": s.step + 1, "total_steps": s.total, "train/loss": round(s.loss, 5),
        "lr": s.lr, "tokens_per_second": round(s.batch * s.tokens / s.dt, 1), "step_time": round(s.dt, 5),
    }  # fmt: skip
    return [json.dumps(line)]


def plain_steps(s: State) -> list[str]:
    if not s.printed:
        return []
    return [
        f"{s.now:%H:%M:%S} step {s.step + 1:,}/{s.total:,} | loss {s.loss:.3f} | lr {s.lr:.2e} | {s.dt * 1000:.0f} "
        f"ms/step | {s.batch * s.tokens / s.dt / 1000:.1f}k tokens/s"
    ]


def epoch_lines(s: State) -> list[str]:
    if not s.printed:
        return []
    return [f"Epoch [{s.epoch + 1}/{s.epochs}], Step [{s.i + 1}/{s.per_epoch}], Loss: {s.loss:.4f}"]


FORMATS: dict[str, tuple[Format, tuple[str, ...]]] = {
    "pytorch_mnist": (pytorch_mnist, ("samples_done", "loss", "epoch", "samples_of_steps_per_s")),
    "imagenet": (imagenet, ("step", "loss", "steps_per_s", "epoch")),
    "timm": (timm, ("step", "loss", "steps_per_s", "epoch", "samples_per_s", "learning_rate")),
    "fairseq": (fairseq, ("step", "loss", "steps_per_s", "epoch", "tokens_per_s", "learning_rate")),
    "megatron": (megatron, ("overall_step", "loss", "steps_per_s", "learning_rate", "fraction")),
    "deepspeed": (deepspeed, ("overall_step", "loss", "steps_per_s", "epoch", "samples_per_s")),
    "keras_classic": (keras_classic, ("step", "loss", "steps_per_s", "epoch", "fraction")),
    "nanogpt": (nanogpt, ("overall_step", "loss", "steps_per_s", "fraction")),
    "json_lines": (json_lines, ("overall_step", "loss", "steps_per_s", "tokens_per_s", "learning_rate", "fraction")),
    "plain_steps": (plain_steps, ("overall_step", "loss", "steps_per_s", "tokens_per_s", "learning_rate", "fraction")),
    "epoch_lines": (epoch_lines, ("step", "loss", "steps_per_s", "epoch", "fraction")),
}
"""Each format, and what its logs tell."""
HEADERS = {"nanogpt": nanogpt_header}
