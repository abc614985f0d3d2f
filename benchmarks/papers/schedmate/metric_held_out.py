"""Formats that no rule was written for (metric_logs/HELD_OUT.txt). Their print statements were read after the commit
"the rules are frozen here". What each prints, not how, is taken from the file that is named with it."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.papers.schedmate.metric_runs import Format, State


def detectron2(s: State) -> list[str]:
    if not s.printed:
        return []
    mean = s.t / (s.step + 1)
    eta = int(mean * (s.total - s.step - 1))
    left = f"{eta // 3600}:{eta // 60 % 60:02d}:{eta % 60:02d}"
    return [
        f"[{s.now:%m/%d %H:%M:%S} d2.utils.events]:  eta: {left}  iter: {s.step}  total_loss: {s.loss:.4g}  "
        f"loss_cls: {s.loss * 0.4:.4g}  loss_box_reg: {s.loss * 0.3:.4g}  loss_rpn_cls: {s.loss * 0.2:.4g}  "
        f"loss_rpn_loc: {s.loss * 0.1:.4g}  time: {mean:.4f}  data_time: {s.dt / 30:.4f}  lr: {s.lr:.5g}  "
        f"max_mem: 5120M"
    ]


def opennmt(s: State) -> list[str]:
    if not s.printed:
        return []
    rate = s.batch * s.tokens / s.mean_dt
    return [
        f"[{s.now:%Y-%m-%d %H:%M:%S},{s.now.microsecond // 1000:03d} INFO] "
        f"Step {s.step + 1:2d}/{s.total:5d}; acc:  31.20; "
        f"ppl: {2.718**s.loss:5.2f}; xent: {s.loss:4.2f}; lr: {s.lr:7.5f}; {rate * 0.97:3.0f}/{rate:3.0f} tok/s; "
        f"{s.t:6.0f} sec"
    ]


def marian(s: State) -> list[str]:
    if not s.printed:
        return []
    since = sum(s.durations[-s.every :])
    words = s.batch * s.tokens * len(s.durations[-s.every :]) / since
    rows = s.batch * (s.i + 1)
    return [
        f"[{s.now:%Y-%m-%d %H:%M:%S}] Ep. {s.epoch + 1} : Up. {s.step + 1} : Sen. {rows:,} : Cost {s.loss:.8f} * "
        f"{rows * 20:,} @ {s.batch * 20:,} after {(s.step + 1) * s.batch * 20:,} : Time {since:.2f}s : "
        f"{words:.2f} words/s : L.r. {s.lr:.4e}"
    ]


def maxtext(s: State) -> list[str]:
    return [
        f"completed step: {s.step}, seconds: {s.dt:.3f}, TFLOP/s/device: {180 / s.dt:.3f}, Tokens/s/device: "
        f"{s.batch * s.tokens / s.dt:.3f}, total_weights: {s.batch * s.tokens}, loss: {s.loss:.3f}"
    ]


def detr(s: State) -> list[str]:
    lines = []
    if s.i == 0 and s.epoch:
        lines = [
            f"Test:  [{k:3d}/100]  eta: 0:00:{59 - k // 2:02d}  class_error: 40.10  loss: {s.loss:.4f} ({s.loss:.4f})  "
            f"time: {s.dt / 3:.4f}  data: 0.0102  max mem: 5120"
            for k in range(0, 100, 10)
        ]
        lines.append("Test: Total time: 0:00:59 (0.5900 s / it)")
    if s.printed:
        eta = int(s.epoch_t / (s.i + 1) * (s.per_epoch - s.i))
        lines.append(
            f"Epoch: [{s.epoch}]  [{s.i:{len(str(s.per_epoch))}d}/{s.per_epoch}]  "
            f"eta: {eta // 3600}:{eta // 60 % 60:02d}:{eta % 60:02d}  lr: {s.lr:.6f}  class_error: 81.20  "
            f"loss: {s.loss:.4f} ({s.mean_loss:.4f})  loss_ce: {s.loss * 0.3:.4f} ({s.mean_loss * 0.3:.4f})  "
            f"loss_bbox: {s.loss * 0.7:.4f} "
            f"({s.mean_loss * 0.7:.4f})  time: {s.epoch_t / (s.i + 1):.4f}  data: 0.0102  max mem: 5120"
        )
    return lines


def torchtitan(s: State) -> list[str]:
    if not s.printed:
        return []
    return [
        f"[titan] {s.now:%Y-%m-%d %H:%M:%S},{s.now.microsecond // 1000:03d} - root - INFO - "
        f"\x1b[31mstep: {s.step + 1:2}  \x1b[32mloss: {s.loss:7.4f}  \x1b[38;2;180;60;0mgrad_norm:  1.2031  "
        f"\x1b[36mmemory: 47.31GiB(59.71%)  \x1b[34mtps: {round(s.batch * s.tokens / s.dt):,}  "
        f"\x1b[36mtflops: 212.45  \x1b[35mmfu: 38.20%\x1b[39m"
    ]


FORMATS: dict[str, tuple[Format, tuple[str, ...]]] = {
    "detectron2": (detectron2, ("overall_step", "loss", "steps_per_s", "learning_rate")),
    "opennmt": (opennmt, ("overall_step", "loss", "steps_per_s", "tokens_per_s", "fraction")),
    "marian": (marian, ("overall_step", "loss", "steps_per_s", "epoch", "tokens_per_s", "learning_rate")),
    "maxtext": (maxtext, ("overall_step", "loss", "steps_per_s", "tokens_per_s")),
    "detr": (detr, ("step", "loss", "steps_per_s", "epoch", "learning_rate")),
    "torchtitan": (torchtitan, ("overall_step", "loss", "steps_per_s", "tokens_per_s")),
}
HEADERS: dict[str, Callable[[State], list[str]]] = {}
