"""What stands around a failure: job headers, lines that only look bad, and the cascade when one of several ranks dies.

The tracebacks of ranks that lose another one, and the launcher's summary, are what `torchrun` with three Gloo ranks
printed here (`torchrun.txt`); NCCL's words are from its and PyTorch's sources.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

HEADERS = (
    ("Loading cuda/12.4", "  Loading requirement: gcc/12.2.0", "Job {job} started on {host}", "SLURM_JOB_NODELIST={host}", "SLURM_NTASKS=8"),
    ("000 ({job}.000.000) 2026-11-26 03:02:11 Job submitted from host: <10.3.0.5:9618>", "001 ({job}.000.000) 2026-11-26 03:02:40 Job executing on host: "
     "<10.3.0.77:9618>"),
    ("Requirement already satisfied: torch in /opt/conda/lib/python3.11/site-packages (2.13.0)", "WARNING: Running pip as the 'root' user can result in "
     "broken permissions and conflicting behaviour with the system package manager."),
    ("+ export NCCL_DEBUG=WARN", "+ export TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "+ srun --kill-on-bad-exit=1 python train.py --on_error raise"),
    (),
)  # fmt: skip

HARMLESS: tuple[tuple[str, ...], ...] = (
    ("/opt/conda/lib/python3.11/site-packages/torch/utils/data/dataloader.py:557: UserWarning: This DataLoader will create 16 worker processes in total. Our "
     "suggested max number of worker in current system is 8, which might get slow or even freeze.", "  warnings.warn("),
    ("/opt/conda/lib/python3.11/site-packages/transformers/utils/generic.py:311: FutureWarning: torch.utils._pytree._register_pytree_node is deprecated.",
     "  torch.utils._pytree._register_pytree_node("),
    ("[W1126 03:11:09.104 ProcessGroupNCCL.cpp:4115] Warning: using GPU 0 to perform barrier as devices used by this process are currently unknown.",),
    ("WARNING: could not read /proc/sys/kernel/numa_balancing, ignoring",),
    ("urllib3.connectionpool WARNING Retrying (Retry(total=2, connect=None, read=None)) after connection broken by 'ReadTimeoutError(\"Read timed out.\")': "
     "/api/models/gpt2",),
    ("wandb: Network error (ConnectionError), entering retry loop.", "wandb: Network error resolved after 0:00:21.304917, resuming normal operation."),
    ("WARNING: read of shard-00013.tar failed: [Errno 5] Input/output error, retrying (attempt 1 of 5)", "INFO: read of shard-00013.tar succeeded on attempt 2"),
    ("2026-11-26 03:20:11 WARNING data: skipping corrupted image 00417.jpg (UnidentifiedImageError: cannot identify image file)",),
    ("Error rate on dev-clean: 4.21%, errors by class: 0: 17, 1: 3, 2: 0",),
    ("ERROR:tensorboard:Could not write summary for step 120, retrying in background",),
    ("[{clock}] EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (corrected)",),
    ("ERROR opentelemetry.exporter: Failed to export traces to collector:4317, error code: StatusCode.UNAVAILABLE, will retry in 8 s",),
    ("Traceback (most recent call last):", "  File \"/opt/conda/lib/python3.11/site-packages/wandb/sdk/internal/sender.py\", line 411, in send_request",
     "    response.raise_for_status()", "requests.exceptions.HTTPError: 502 Server Error: Bad Gateway for url: https://api.example.org/files",
     "wandb: upload failed, retrying in 10 s; training continues"),
    ("INFO: gradient overflow, skipping step, loss scale reduced to 32768.0",),
    ("{host}:{pid}:{pid} [{gpu}] NCCL INFO Call to connect returned Connection refused, retrying",),
    ("checkpoint: lock file is stale, removed; continuing",),
    ("slurmstepd: info: task_p_pre_launch: Using sched_affinity for tasks",),
    ("Exception ignored in: <function _releaseLock at 0x7f3a>", "  (harmless at interpreter shutdown of a worker)"),
)  # fmt: skip

_NCCL_REMOTE = (
    "[rank{rank}]: torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, remote process exited "
    "or there was a network error, NCCL version 2.21.5",
    "[rank{rank}]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "[rank{rank}]: Last error:",
    "[rank{rank}]: socketProgress: Connection closed by remote peer {host}<41234>",
)
_WATCHDOG = (
    "[rank{rank}]:[E1126 05:11:27.{clock3} ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2201, OpType="
    "ALLREDUCE, NumelIn=16777216, NumelOut=16777216, Timeout(ms)=600000) ran for 600041 milliseconds before timing out.",
    "[rank{rank}]:[E1126 05:11:27.{clock3} ProcessGroupNCCL.cpp:684] [Rank {rank}] To avoid data inconsistency, we are taking the entire process down.",
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    "  what():  [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated with exception: [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=2201, OpType=ALLREDUCE) ran for 600041 milliseconds before timing out.",
)
_STACK = tuple(
    f"frame #{number}: {symbol} + 0x{offset:x} (0x7f{number:02x}a4c1b{number:03x} in /opt/conda/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so)"
    for number, (symbol, offset) in enumerate(
        (("c10::Error::Error(c10::SourceLocation, std::string)", 0x96), ("c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<long>)", 0x282),
         ("c10d::ProcessGroupNCCL::watchdogHandler()", 0x233), ("c10d::ProcessGroupNCCL::ncclCommWatchdog()", 0x14d), ("<unknown function>", 0xdbbf4),
         ("<unknown function>", 0x94ac3), ("clone", 0x44))
    )
)  # fmt: skip
_HEARTBEAT = (
    "[rank{rank}]:[W1126 05:11:28.{clock3} TCPStore.cpp:125] recvValue failed on SocketImpl(fd=67, addr=[{host}]:40122, remote=[{host}]:29500): Connection reset "
    "by peer",
    '[rank{rank}]:[W1126 05:11:28.{clock3} ProcessGroupNCCL.cpp:1659] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has shut down '
    "too early), with error: Broken pipe",
)


@cache
def torchrun() -> tuple[list[str], list[str]]:
    lines = Path(__file__).with_name("torchrun.txt").read_text().split("\n")
    first = next(at for at, line in enumerate(lines) if line.startswith("[rank0]: Traceback"))
    last = next(at for at, line in enumerate(lines) if line.startswith("[rank0]: RuntimeError"))
    end = next(at for at, line in enumerate(lines) if "closing signal SIGTERM" in line)
    return [line.replace("[rank0]", "[rank{rank}]") for line in lines[first : last + 1]], lines[end:]


def lost_another(chance: random.Random, style: str) -> list[str]:
    lines = list(torchrun()[0])
    if style == "nccl":
        lines[-1:] = _NCCL_REMOTE
    elif style == "watchdog":
        lines = [*_WATCHDOG, *_STACK * chance.randrange(1, 3), *_HEARTBEAT]
    return lines


def ending(chance: random.Random, *, ranks: int) -> list[str]:
    lines = list(torchrun()[1]) if ranks > 1 and chance.random() < 0.6 else []
    kind = chance.random()
    if kind < 0.5:
        lines += [f"srun: error: {{host}}: task {rank}: Exited with exit code 1" for rank in range(min(ranks, 8))]
        if ranks > 1:
            lines.append("srun: launch/slurm: _step_signal: Terminating StepId={job}.0")
            lines.append("slurmstepd: error: *** STEP {job}.0 ON {host} CANCELLED AT 2026-11-26T05:12:09 ***")
    elif kind < 0.65:
        lines.append("005 ({job}.000.000) 2026-11-26 05:12:11 Job terminated.")
        lines.append("\t(1) Normal termination (return value 1)")
    elif kind < 0.8 and ranks > 1:
        lines += ["--------------------------------------------------------------------------", "mpirun detected that one or more processes exited with non-zero "
                  "status, thus causing", "the job to be terminated. The first process to do so was:", "  Process name: [[61205,1],3]", "  Exit code:    1"]  # fmt: skip
    return lines
