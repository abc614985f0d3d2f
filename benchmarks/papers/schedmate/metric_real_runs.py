"""Programs of six frameworks that train something small, print as their users let them, and are killed in the middle.

`python -m benchmarks.papers.schedmate.metric_real_runs FORMAT SEED FOLDER` writes FOLDER/FORMAT-SEED.log, and beside
it a
JSON of what is true at its end: the step, the loss, steps a second over the last second half, how much of the run is
over, and the length and the time of the log at an earlier look. The logs in metric_logs/ were made by it. keras (with
KERAS_BACKEND=torch), pytorch_lightning, xgboost and lightgbm are not among Stoker's requirements.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

PER_EPOCH, EPOCHS = 60, 3


class Truth:
    """What is true of a run: told each step, it ends the program after the last one."""

    def __init__(self, form: str, seed: int, folder: Path) -> None:
        self.log = folder / f"{form}-{seed}.log"
        self._answers = folder / f"{form}-{seed}.json"
        self.chance = random.Random(f"{form}{seed}")
        self.ends_after = self.chance.randrange(PER_EPOCH // 2, PER_EPOCH * EPOCHS - 8)
        self.step_s = self.chance.uniform(0.015, 0.05)
        self._times: list[float] = []
        self._look: dict[str, float] = {}
        descriptor = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)

    def step(self, loss: float, *, per_epoch: int = PER_EPOCH, epochs: int = EPOCHS, overall: bool = False) -> None:
        time.sleep(self.step_s * self.chance.uniform(0.9, 1.1))
        self._times.append(time.time())
        done = len(self._times)
        if done == self.ends_after // 2:
            sys.stdout.flush()
            self._look = {"bytes": self.log.stat().st_size, "at_s": self._times[-1]}
        if done > self.ends_after:
            self._end(loss, done - 1, per_epoch, epochs, overall)

    def _end(self, loss: float, done: int, per_epoch: int, epochs: int, overall: bool) -> NoReturn:
        sys.stdout.flush()
        half = self._times[done // 2 : done]
        values: dict[str, Any] = {
            "step": done if overall else (done - 1) % per_epoch + 1,
            "loss": loss,
            "steps_per_s": (len(half) - 1) / (half[-1] - half[0]),
            "fraction": done / (per_epoch * epochs),
        }
        self._answers.write_text(json.dumps({"values": values, "look": self._look, "end_s": self._times[-1]}))
        os._exit(0)


class Model:
    """Linear regression by hand-made steps of PyTorch."""

    def __init__(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.layer = torch.nn.Linear(16, 1)
        self._optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.01)
        self._right = torch.randn(16, 1)

    def step(self) -> float:
        import torch

        data = torch.randn(64, 16)
        loss = ((self.layer(data) - data @ self._right) ** 2).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()


def tqdm_bar(truth: Truth, seed: int) -> None:
    from tqdm import tqdm

    model = Model(seed)
    for epoch in range(1, EPOCHS + 1):
        bar = tqdm(range(PER_EPOCH), desc=f"Epoch {epoch}/{EPOCHS}")
        for _ in bar:
            loss = model.step()
            bar.set_postfix(loss=f"{loss:.4f}")
            truth.step(loss)
        for _ in tqdm(range(12), desc="Validation"):
            time.sleep(0.02)


def tqdm_nested(truth: Truth, seed: int) -> None:
    from tqdm import tqdm

    model = Model(seed)
    for _ in tqdm(range(EPOCHS), desc="epochs", position=0):
        inner = tqdm(range(PER_EPOCH), desc="batches", position=1, leave=False)
        for _ in inner:
            loss = model.step()
            inner.set_postfix(loss=f"{loss:.4f}")
            truth.step(loss)


def hf_trainer(truth: Truth, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    rows = [{"input_ids": (ids := torch.randint(0, 64, (12,))), "labels": ids} for _ in range(PER_EPOCH * 2)]
    last = {"loss": 0.0}

    class Told(TrainerCallback):
        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            last["loss"] = logs.get("loss", last["loss"])

        def on_step_end(self, *_: Any, **__: Any) -> None:
            truth.step(last["loss"], overall=True)

    folder = f"/tmp/hf-trainer-{os.getpid()}"
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, num_train_epochs=EPOCHS, logging_steps=5, save_strategy="no",
        eval_strategy="epoch", report_to=[], use_cpu=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:16], callbacks=[Told()]).train()


def lightning(truth: Truth, seed: int) -> None:
    import pytorch_lightning as pl
    import torch
    from pytorch_lightning.callbacks import TQDMProgressBar

    model = Model(seed)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model.layer

        def training_step(self, batch: Any, _at: int) -> Any:
            loss = ((self.layer(batch[0]) - batch[1]) ** 2).mean()
            self.log("train_loss", loss, prog_bar=True)
            truth.step(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = torch.randn(PER_EPOCH * 8, 16)
    rows = torch.utils.data.TensorDataset(data, data @ torch.randn(16, 1))
    pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
        callbacks=[TQDMProgressBar(refresh_rate=1)],
    ).fit(Module(), torch.utils.data.DataLoader(rows, batch_size=8))  # fmt: skip


def keras_fit(truth: Truth, seed: int) -> None:
    import keras
    import numpy as np

    keras.utils.set_random_seed(seed)

    class Told(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, _batch: int, logs: Any = None) -> None:
            truth.step(float(logs["loss"]))

    data = np.random.default_rng(seed).normal(size=(PER_EPOCH * 8, 16))
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    model.fit(data, data.sum(1), batch_size=8, epochs=EPOCHS, callbacks=[Told()])


def xgboost(truth: Truth, seed: int) -> None:
    import numpy as np
    import xgboost as xgb

    class Told(xgb.callback.TrainingCallback):  # type: ignore[misc,name-defined]
        def after_iteration(self, _model: Any, _epoch: int, evals_log: Any) -> bool:
            truth.step(evals_log["train"]["rmse"][-1], per_epoch=PER_EPOCH * EPOCHS, epochs=1, overall=True)
            return False

    data = np.random.default_rng(seed).normal(size=(400, 8))
    rows = xgb.DMatrix(data, label=data.sum(1))
    settings = {"max_depth": 2, "eta": 0.05, "nthread": 1}
    xgb.train(settings, rows, PER_EPOCH * EPOCHS, evals=[(rows, "train")], verbose_eval=1, callbacks=[Told()])


def lightgbm(truth: Truth, seed: int) -> None:
    import lightgbm as lgb
    import numpy as np

    def told(env: Any) -> None:
        truth.step(env.evaluation_result_list[0][2], per_epoch=PER_EPOCH * EPOCHS, epochs=1, overall=True)

    data = np.random.default_rng(seed).normal(size=(400, 8))
    rows = lgb.Dataset(data, data.sum(1))
    settings = {"objective": "regression", "metric": "l2", "num_threads": 1, "learning_rate": 0.05}
    lgb.train(
        settings, rows, PER_EPOCH * EPOCHS, valid_sets=[rows], valid_names=["train"],
        callbacks=[lgb.log_evaluation(1), told],
    )  # fmt: skip


PROGRAMS = {
    "tqdm": tqdm_bar, "tqdm_nested": tqdm_nested, "hf_trainer": hf_trainer, "lightning": lightning, "keras": keras_fit,
    "xgboost": xgboost, "lightgbm": lightgbm,
}  # fmt: skip


def main() -> None:
    form, seed, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    PROGRAMS[form](Truth(form, seed, folder), seed)


if __name__ == "__main__":
    main()
