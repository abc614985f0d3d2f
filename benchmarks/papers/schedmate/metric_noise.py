"""Lines between those with metrics, as the logs of real jobs are full of them. None of them is progress."""

from __future__ import annotations

import random

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
    """A few lines, or many."""
    return [
        chance.choice(_LINES).format(
            pid=chance.randrange(1000, 9999), gpu=chance.randrange(8), small=chance.randrange(1, 31)
        )
        for _ in range(chance.choice((1, 2, 5, 25)))
    ]
