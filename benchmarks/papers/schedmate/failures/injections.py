"""What is injected into a program: the words in which the tables of fault types are written.

A *fault type* has a name, whose fault it is, and some injections. An injection says where in the program it strikes
(`data`, `compute`, `sync`, `save`, `start`), and how: user's code that really fails (`code`), an exception that a library
raises in the very words of that library (`raises`, at the place `library` in its source), or lines that the kernel, the
batch system or a daemon writes (`prints`), after which the program is gone (`dies`) or goes on to what it raises.

`{host}`, `{gpu}`, `{pid}`, `{job}`, `{bus}`, `{rank}`, `{user}`, `{clock}` are filled in by the seed.

The programs that faults are injected into: user's code as it is written, run for real on the CPU.

`vision` trains a small convolutional network in a loop of its own; `language` fine-tunes a tiny causal model with
Transformers' Trainer; `plain` works on records without PyTorch. `ranks` is `vision` with Gloo. Each calls functions that
an injection replaces at a step: `read_batch` (data), `forward` (compute), `average` (sync), `save` and `prepare` (start).
"""

from __future__ import annotations

from typing import NamedTuple

INFRASTRUCTURE, FRAMEWORK, USER = "infrastructure", "framework", "user"


class Injection(NamedTuple):
    where: str
    code: str = ""
    raises: str = ""
    library: tuple[str, str, str] = ("", "", "")
    """Of what raises: its file below site-packages (or from /), its function, its line."""
    prints: tuple[str, ...] = ()
    dies: bool = False
    programs: tuple[str, ...] = ("vision", "language", "plain")


class FaultType(NamedTuple):
    name: str
    kind: str
    component: str
    injections: tuple[Injection, ...]


def raised(where: str, raises: str, file: str, function: str, line: str, *prints: str, only: str = "") -> Injection:
    return Injection(where, raises=raises, library=(file, function, line), prints=prints, programs=_programs(only))


def coded(where: str, code: str, *, only: str = "") -> Injection:
    return Injection(where, code=code, programs=_programs(only))


def killed(*prints: str, where: str = "compute", only: str = "") -> Injection:
    return Injection(where, prints=prints, dies=True, programs=_programs(only))


def _programs(only: str) -> tuple[str, ...]:
    return tuple(only.split()) if only else ("vision", "language", "plain")


TORCH_ONLY = "vision language"
C10D = ("torch/distributed/distributed_c10d.py", "all_reduce", "work = group.allreduce([tensor], opts)")
LOGGER = ("torch/distributed/c10d_logger.py", "wrapper", "return func(*args, **kwargs)")
LINEAR = ("torch/nn/modules/linear.py", "forward", "return F.linear(input, self.weight, self.bias)")
BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward", "return Variable._execution_engine.run_backward(")
SERIAL = ("torch/serialization.py", "__init__", "super().__init__(torch._C.PyTorchFileWriter(self.name))")


FUNCTIONS = {"data": "read_batch", "compute": "forward", "sync": "average", "save": "save", "start": "prepare"}

_COMMON = """
import logging, math, os, random, sys, time, warnings
logging.basicConfig(level=logging.INFO, stream=sys.stdout, force=True, format=LOG_FORMAT)
log = logging.getLogger("train")
def prepare(step): log.info("configuration: %s", {"lr": 0.1, "on_error": "raise", "timeout": 1800, "seed": SEED})
def average(step): return None
def save(step): log.info("saved checkpoint step=%d in %.2f s, 0 errors", step, random.random())
"""

VISION = (
    _COMMON
    + """
import torch
torch.manual_seed(SEED)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def read_batch(step): return torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
def forward(step, batch):
    images, labels = batch
    logits = model(images)
    return torch.nn.functional.cross_entropy(logits, labels), (logits.argmax(1) != labels).float().mean()
def main():
    prepare(0)
    log.info("parameters: %d, threads: %d", sum(p.numel() for p in model.parameters()), torch.get_num_threads())
    for step in range(STEPS):
        batch = read_batch(step)
        loss, error = forward(step, batch)
        optimizer.zero_grad()
        loss.backward()
        average(step)
        optimizer.step()
        log.info("epoch %d step %d loss %.4f top1_error %.3f lr %.5f images/s %.1f", step // 50, step, loss.item(), error, 0.1, 900 + random.random())
        if step % 50 == 49:
            print(f"validation: val_error={random.random():.4f} word error rate {random.random():.2%} failed_batches=0", flush=True)
            save(step)
    save(STEPS)
    print("training finished, best val_error=0.1312", flush=True)
"""
)

LANGUAGE = (
    _COMMON
    + """
import torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
transformers.set_seed(SEED)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2))
STEP = {"data": 0, "compute": 0}
def read_batch(step):
    tokens = torch.randint(0, 64, (8,))
    return {"input_ids": tokens, "labels": tokens}
def forward(step, *args, **kwargs): return Trainer.compute_loss(*args, **kwargs)
class Texts(torch.utils.data.Dataset):
    def __len__(self): return 2 * STEPS
    def __getitem__(self, index):
        STEP["data"] += 1
        return read_batch(STEP["data"] // 2)
class Finetuning(Trainer):
    def compute_loss(self, *args, **kwargs):
        STEP["compute"] += 1
        return forward(STEP["compute"], self, *args, **kwargs)
class Saving(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        average(state.global_step)
        if state.global_step % 50 == 49: save(state.global_step)
def main():
    prepare(0)
    arguments = TrainingArguments(output_dir=FOLDER, max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1, report_to=[],
                                  save_strategy="no", use_cpu=True, disable_tqdm=SEED % 3 != 0)
    Finetuning(model, arguments, train_dataset=Texts(), callbacks=[Saving()]).train()
    save(STEPS)
"""
)

PLAIN = (
    _COMMON
    + """
def read_batch(step): return [{"text": f"record {step}-{i}", "label": i % 2} for i in range(8)]
def forward(step, batch): return sum(len(record["text"]) for record in batch) / len(batch)
def main():
    prepare(0)
    for step in range(STEPS):
        batch = read_batch(step)
        mean = forward(step, batch)
        average(step)
        log.info("shard %d: %d records, mean length %.2f, rejected=0, invalid=0, %.1f records/s", step, len(batch), mean, 1e4 * random.random())
        if step % 50 == 49:
            save(step)
    save(STEPS)
    log.info("done: %d shards", STEPS)
"""
)

PROGRAMS = {"vision": VISION, "language": LANGUAGE, "plain": PLAIN}
LOG_FORMATS = (
    "%(asctime)s %(levelname)s %(name)s: %(message)s",
    "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s",
    "%(levelname)s:%(name)s:%(message)s",
    "%(message)s",
)
