from __future__ import annotations

from math import isnan

import pytest

from stoker.manager.advice.metrics import LineMetrics, read_metrics
from stoker.manager.advice.metrics.names import split_off_line_time


def read(line: str) -> LineMetrics:
    metrics = read_metrics(line)
    assert metrics is not None
    return metrics


def counts(line: str) -> set[tuple[str, float, float | None]]:
    return {(each.unit, each.done, each.total) for each in read(line).counters}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (" 45%|####5     | 90/200 [00:30<00:36,  3.02it/s, loss=0.31]", {("step", 90, 200)}),
        ("Epoch 3/10:  45%|████▌     | 90/200 [00:30<00:36]", {("epoch", 3, 10), ("step", 90, 200)}),
        ("90it [00:30,  3.02it/s]", {("step", 90, None)}),
        ("embed: 1.20kit [00:30, 40.0it/s, loss=0.3]", {("step", 1200, None)}),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.293032", {("epoch", 1, None), ("step", 640, 60000)}),
        ("Epoch: [2][  10/5005]\tTime  0.412 ( 0.533)\tLoss 6.9e+00", {("epoch", 2, None), ("step", 10, 5005)}),
        ("Epoch [3/10], Step [100/600], Loss: 0.1", {("epoch", 3, 10), ("step", 100, 600)}),
        ("12/50 [====>.........................] - ETA: 5s - loss: 0.1000", {("step", 12, 50)}),
        ("12/50 ━━━━━━━━━━━━━━━━━━━━ 5s 100ms/step - loss: 0.1000", {("step", 12, 50)}),
        (" iteration  10/ 100 | consumed samples: 32 | lm loss: 1.04E+01 |", {("step", 10, 100), ("sample", 32, None)}),
        ("iter 100: loss 2.5000, time 30.12ms, mfu 12.00%", {("step", 100, None)}),
        ("[10]\ttrain-rmse:0.30000", {("step", 10, None)}),
        ("{'loss': '1.23', 'learning_rate': '5e-05', 'epoch': '0.5'}", {("epoch", 0.5, None)}),
        ('{"step": 100, "total_steps": 400, "loss": 0.5}', {("step", 100, 400)}),
        ("step 1,200/10,000 | loss 2.31", {("step", 1200, 10000)}),
        ("processed 30 of 100 documents", {("sample", 30, 100)}),
        ("progress: 45%", {("percent", 45, 100)}),
        ("model.bin:  45%|####5     | 450M/1.00G [00:10<00:12, 45.0MB/s]", {("byte", 450e6, 1e9)}),
    ],
)  # fmt: skip
def test_progress_counts_are_read_from_a_log_line(line: str, found: set[tuple[str, float, float | None]]):
    assert counts(line) == found


@pytest.mark.parametrize(
    ("line", "metric", "value"),
    [
        ("45%|#5 | 90/200 [00:30<00:36,  3.02it/s, loss=0.31]", "loss", 0.31),
        ("45%|#5 | 90/200 [00:30<00:36,  4.0s/it]", "steps_per_s", 0.25),
        ("45%|#5 | 90/200 [01:00:30<1 day, 0:00:36, 4.0s/it]", "eta_s", 86436),
        ("45%|#5 | 90/200 [00:30<?, ?it/s]", "elapsed_s", 30),
        ("epoch 001:  10 / 100 loss=12.3, wps=25000, ups=7.5, lr=1e-06, train_wall=1, wall=5", "steps_per_s", 7.5),
        (" iteration 1/ 50 | elapsed time per iteration (ms): 500.0 | lm loss: 1.0E+01 |", "steps_per_s", 2),
        (" iteration 1/ 50 | elapsed time per iteration (ms): 500.0 | lm loss: 1.0E+01 |", "loss", 10),
        ("global_step=9, RunningAvgSamplesPerSec=58.7, CurrSamplesPerSec=6", "samples_per_s", 58.7),
        ("step 3/9 | loss 2.31 | 12.5k tokens/s | 0.5 s/step", "tokens_per_s", 12500),
        ("step 3/9 | loss 2.31 | 12.5k tokens/s | 0.5 s/step", "steps_per_s", 2),
        ("step 250: train loss 2.1000, val loss 2.2000", "loss", 2.1),
        ("12/50 [===>....] - ETA: 1:05 - loss: 0.1 - val_loss: 0.2", "eta_s", 65),
        ("Train: 3 [ 1/9 (8%)]  Loss: 6.91 (6.92)  Time: 0.400s,  640.12/s  LR: 1.000e-03", "samples_per_s", 640.12),
        ("step: 9, lr: 0.1, policy_loss: -0.25, elapsed: 1h 2m 3s", "elapsed_s", 3723),
        ("step: 9, lr: 0.1, policy_loss: -0.25, elapsed: 1h 2m 3s", "loss", -0.25),
        ("{'loss': 1.2, 'learning_rate': 5e-05, 'epoch': 0.5}", "learning_rate", 5e-5),
        ("2026-03-07 21:58:13,250 step 3/9", "line_s", split_off_line_time("2026-03-07 21:58:13.250")[0]),
    ],
)
def test_loss_rates_and_times_are_read_from_a_log_line(line: str, metric: str, value: float):
    assert getattr(read(line), metric) == pytest.approx(value)


@pytest.mark.parametrize(
    "line",
    [
        "", "   ", "hello", "epochs: 10", "learning_rate: 0.001", "lr=0.1, epochs=3", "max_steps: 1000",
        "step_size: 30", "up 3 days, load 0.5",
        "Namespace(batch_size=64, epochs=14, lr=1.0, gamma=0.7, log_interval=10)",
        "TrainingArguments(learning_rate=5e-05, num_train_epochs=3, max_steps=-1)",
        '{"epochs": 3, "batch_size": 16, "seed": 1, "lr": 0.1, "warmup_steps": 100}',
        "eta: 0.3, max_depth: 6, seed: 1, n_estimators: 100",
        "python train.py --lr 0.1 --epochs 3 --batch-size 32 --loss 1",
        "2024/05/01 12:00:00 connecting to 10.0.0.1/24 port 80", "http://10.0.0.3:8080/api/v1/10/20",
        "torch 2.3.1, cuda 12.1, python 3.11.7, driver 550/54", "shape [32/64, 128] torch.Size([32, 10])",
        "/data/run/10/20/model.pt saved", "GPU 3 of 8", "attempt 2 of 5", "Saving checkpoint at step 500",
        'File "train.py", line 12, in step', "RuntimeError: step 3/9: loss 1.0", "model.layers.3.mlp  0.5",
        "{'train_runtime': 10.5, 'train_steps_per_second': 11.9, 'train_loss': 1.9, 'epoch': 3.0}",
        "x" * 5000 + " step 3/9 loss 1.0",
    ],
)  # fmt: skip
def test_log_line_that_reports_no_progress_has_no_metrics(line: str):
    assert read_metrics(line) is None


def test_escapes_and_carriage_returns_are_ignored():
    line = "\x1b[31mstep: 1/9\x1b[0m loss: 3.0\r\x1b[K\x1b[32mstep: 2/9\x1b[0m  \x1b[1mloss:\x1b[0m 2.5\r"
    assert {(each.done, each.total) for each in read(line).counters} == {(2, 9)}
    assert read(line).loss == 2.5
    assert read("\b" * 40 + "12/50 [===>....] - ETA: 5s - loss: 0.1").eta_s == 5


def test_nan_and_infinite_losses_are_read():
    assert isnan(read("step 3/9 loss nan").loss or 0.0)
    assert read("step 3/9 loss inf").loss == float("inf")


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank3]: step 3/9 loss 1.0", 3), ("[Rank 2] step=3 loss=1.0", 2), ("[default1]:step 3/9", None),
        ("[1,5]<stdout>: step 3/9 loss 1.0", 5), ("7: step 3/9 loss 1.0", 7), ("(Worker pid=12) step 3/9", 12),
        ("2026-03-07 21:58:13 [INFO] [Rank 4] step 3/9", 4), ("step 3/9", None),
    ],
)  # fmt: skip
def test_ranks_are_read_from_a_line(line: str, rank: int | None):
    assert read(line).rank == rank


@pytest.mark.parametrize(
    ("line", "evaluates"),
    [
        ("Test: [ 10/100]\tTime 0.1\tLoss 1.0", True),
        ("Validation DataLoader 0:  50%|##| 5/10 [00:01<00:01, 5it/s]", True),
        ("{'eval_loss': 1.1, 'eval_steps_per_second': 5.6, 'epoch': 1.0}", True),
        ("12/50 - loss: 0.1 - val_loss: 0.2", False),
        ("Train: 3 [ 1/9 (8%)] Loss: 1", False), ("training on test set: step 3/9", False),
    ],
)  # fmt: skip
def test_evaluation_line_is_distinguished_from_a_training_line(line: str, evaluates: bool):
    assert read(line).evaluates is evaluates
