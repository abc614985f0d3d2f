"""The second round of formats that no rule was written for (metric_logs/HELD_OUT.txt). What each prints, not how, is
taken from the file that is named with it."""

from __future__ import annotations

from benchmarks.papers.schedmate.metric_runs import Format, State


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def mmengine(s: State) -> list[str]:
    stamp = f"{s.now:%m/%d %H:%M:%S} - mmengine - INFO -"
    lines = []
    if s.i == 0 and s.epoch:
        lines = [
            f"{stamp} Epoch(val) [{s.epoch}][{k:3d}/100]    eta: 0:00:09  time: {s.dt / 3:.4f}  data_time: 0.0102  "
            f"memory: 1022  "
            for k in range(10, 101, 10)
        ]
    if s.printed:
        epoch = f"[{s.epoch + 1}]".rjust(len(str(s.epochs)) + 3)
        lines.append(
            f"{stamp} Epoch(train){epoch}[{s.i + 1:{len(str(s.per_epoch))}d}/{s.per_epoch}]  lr: {s.lr:.4e}  "
            f"eta: {_clock(s.mean_dt * (s.total - s.step - 1))}  time: {s.mean_dt:.4f}  data_time: {s.dt / 50:.4f}  "
            f"memory: 5120  loss: {s.loss:.4f}  loss_cls: {s.loss * 0.6:.4f}  loss_bbox: {s.loss * 0.4:.4f}"
        )
    return lines


def composer(s: State) -> list[str]:
    if not s.printed:
        return []
    return [
        f"[epoch={s.epoch + 1}][batch={s.i + 1}/{s.per_epoch}]:",
        f"\t Train time/batch: {s.step}",
        f"\t Train time/epoch: {s.epoch}",
        f"\t Train loss/train/total: {s.loss:.4f}",
        f"\t Train throughput/batches_per_sec: {1 / s.mean_dt:.4f}",
        f"\t Train throughput/samples_per_sec: {s.batch / s.mean_dt:.4f}",
        f"\t Train lr-DecoupledAdamW/group0: {s.lr:.4e}",
    ]


def ultralytics(s: State) -> list[str]:
    lines = []
    if s.i == 0:
        lines = ["      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size"]
    if s.printed:
        share = (s.i + 1) / s.per_epoch
        columns = "".join(f"{s.loss * part:11.4g}" for part in (0.5, 0.3, 0.2))
        spent, left = _clock(s.epoch_t)[2:], _clock(s.eta_s)[2:]
        rate = f"{1 / s.mean_dt:5.2f}it/s" if s.mean_dt < 1 else f"{s.mean_dt:5.2f}s/it"
        lines.append(
            f"\r{f'{s.epoch + 1}/{s.epochs}':>11}{'7.31G':>11}{columns}{31:11.4g}{640:11.4g}: {share:4.0%}|"
            f"{'█' * int(10 * share):10}| {s.i + 1}/{s.per_epoch} [{spent}<{left}, {rate}]"
        )
    return lines


def espnet(s: State) -> list[str]:
    if not s.printed:
        return []
    first = max(1, s.i + 2 - s.every)
    return [
        f"[node07] {s.now:%Y-%m-%d %H:%M:%S},{s.now.microsecond // 1000:03d} (trainer:762) INFO: "
        f"{s.epoch + 1}epoch:train:{first}-{s.i + 1}batch: iter_time=2.1e-04, forward_time={s.mean_dt * 0.4:.3f}, "
        f"loss_ctc={s.loss * 1.4:.3f}, loss_att={s.loss * 0.8:.3f}, acc=0.612, loss={s.loss:.3f}, "
        f"backward_time={s.mean_dt * 0.4:.3f}, optim_step_time=0.031, optim0_lr0={s.lr:.3e}, train_time={s.mean_dt:.3f}"
    ]


FORMATS: dict[str, tuple[Format, tuple[str, ...]]] = {
    "mmengine": (mmengine, ("step", "loss", "steps_per_s", "epoch", "learning_rate")),
    "composer": (composer, ("step", "loss", "steps_per_s", "epoch", "samples_per_s")),
    "ultralytics": (ultralytics, ("step", "steps_per_s", "epoch", "fraction")),
    "espnet": (espnet, ("step", "loss", "steps_per_s", "epoch", "learning_rate")),
}
