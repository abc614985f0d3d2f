"""Contexts and functions of the site suite for pilots. The functions import optional packages when they run.

Functions take the loaded context first, as in every app with a context.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import stoker
from stoker import context
from stoker.contexts import devices, load_causal_lm
from stoker.units import show_bytes

_PILOT = "stoker.pilot.main"
BEAT_S = 0.2
"""Seconds that a streaming call takes."""


class Whereabouts(NamedTuple):
    """Host of a call, pilot process and its start time, library process, and block of the pilot."""

    host: str
    pilot: int
    began: float
    library: int
    block: str

    def same_pilot(self, other: Whereabouts) -> bool:
        return (self.host, self.pilot, self.began) == (other.host, other.pilot, other.began)


def whereabouts(_context: Any = None) -> Whereabouts:
    """Return where this call runs. `pilot` is 0 if the library has no pilot of Stoker as ancestor."""
    pilot = _find_pilot_process()
    process, began = (pilot.pid, pilot.create_time()) if pilot else (0, 0.0)
    return Whereabouts(socket.gethostname(), process, began, os.getpid(), os.environ.get("PARSL_WORKER_BLOCK_ID", ""))


def _find_pilot_process() -> psutil.Process | None:
    above = [each for each in psutil.Process().parents() if _PILOT in each.cmdline()]
    return above[-1] if above else None


@context
def table(name: str) -> dict[str, Any]:
    return {"name": name, "library": os.getpid()}


def loaded_in(loaded: dict[str, Any]) -> tuple[str, int, int]:
    return loaded["name"], loaded["library"], os.getpid()


@context(files=("path",))
def with_file(path: str) -> str:
    return path


def facts_of_file(path: str) -> tuple[str, int, int, int]:
    found = os.stat(path)
    return socket.gethostname(), found.st_size, found.st_dev, found.st_ino


def leave_pilot(loaded: Any, victim: Whereabouts, how: int, hold_s: float) -> Whereabouts:
    """On the victim, send signal `how` (0: none) to the pilot and wait. On another pilot, return its whereabouts."""
    here = whereabouts(loaded)
    if not here.same_pilot(victim):
        time.sleep(BEAT_S)
        return here
    if how:
        os.kill(victim.pilot, how)
    until = time.monotonic() + hold_s
    while time.monotonic() < until:
        time.sleep(0.05)
    return here


def beat(loaded: Any, number: int) -> tuple[int, Whereabouts]:
    time.sleep(BEAT_S)
    return number, whereabouts(loaded)


def end_library(loaded: Any, victim: int) -> int:
    if os.getpid() == victim:
        os.kill(victim, signal.SIGKILL)
    return os.getpid()


def greet_rank(_loaded: Any) -> tuple[int, str]:
    place = stoker.gang()
    if place.rank == 0:
        if place.listener is None:
            raise RuntimeError("rank 0 has no listener")
        place.listener.settimeout(30)
        peer, _ = place.listener.accept()
        with peer:
            peer.settimeout(30)
            return place.size, peer.recv(100).decode()
    host, _, port = place.rendezvous.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as peer:
        peer.sendall(f"rank {place.rank}".encode())
    return place.size, ""


@context(devices=2)
def over_two_devices() -> tuple[str, ...]:
    names = devices()
    gpus = [name for name in names if name.startswith("cuda")]
    if gpus:
        import torch

        return tuple(str(torch.ones(1, device=name).device) for name in gpus)
    return names


def held_devices(loaded: tuple[str, ...]) -> tuple[str, ...]:
    return loaded


class SeenDevice(NamedTuple):
    """Facts in a call: device, CUDA_VISIBLE_DEVICES, NVML description, GPUs of torch (-1: no torch), usable
    cores.
    """

    device: str
    visible: str
    said: str
    torch_gpus: int
    cores: int


def seen_device(_loaded: Any) -> SeenDevice:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    said = _describe_gpu(visible.partition(",")[0]) if visible else ""
    count = _count_torch_gpus() if visible else -1
    return SeenDevice(stoker.device(), visible, said, count, len(os.sched_getaffinity(0)))


def _count_torch_gpus() -> int:
    try:
        import torch
    except Exception:  # torch is optional on a pilot
        return -1
    return int(torch.cuda.device_count())


_MODES = {0: "shared", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}


def _describe_gpu(name: str) -> str:
    """Return NVML's name, mode and used memory (`NVIDIA A10, EXCLUSIVE_PROCESS`, `MIG 1g.5gb, a MIG part`), or the NVML
    error.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        kind = pynvml.nvmlDeviceGetName(handle)
        kind = kind.decode() if isinstance(kind, bytes) else str(kind)
    except Exception as error:
        return f"NVML does not say: {error}"
    if name.startswith("MIG"):
        return f"{kind}, a MIG part"
    try:
        mode = _MODES.get(pynvml.nvmlDeviceGetComputeMode(handle), "another mode")
        return f"{kind}, {mode}{_describe_memory_of_others(handle)}"
    except Exception:
        return str(kind)


def _describe_memory_of_others(handle: Any) -> str:
    import pynvml

    pilot = _find_pilot_process()
    ours = {os.getpid(), *(each.pid for each in (pilot.children(recursive=True) if pilot is not None else []))}
    holders = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    held = sum(each.usedGpuMemory or 0 for each in holders if each.pid not in ours)
    return f", {show_bytes(held)} held by other processes" if held else ""


@context
def on_device(size: int) -> Any:
    try:
        import torch
    except Exception as error:
        return f"PyTorch does not import in the pilot: {error}"
    if not torch.cuda.is_available():
        return f"PyTorch in the pilot ({torch.__version__}) sees no GPU"
    return torch.ones(size, dtype=torch.uint8, device=stoker.device())


class DeviceUse(NamedTuple):
    """Bytes of a GPU. `process`: use by this library, 0 if NVML does not know; `device`: use by all processes; `total`:
    size. `why`: the reason if nothing was measured.
    """

    process: int = 0
    device: int = 0
    total: int = 0
    why: str = ""


def device_use(held: Any) -> DeviceUse:
    if isinstance(held, str):
        return DeviceUse(why=held)
    import pynvml

    pynvml.nvmlInit()
    name = os.environ["CUDA_VISIBLE_DEVICES"].partition(",")[0]
    by_name = not name.isdigit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(name) if by_name else pynvml.nvmlDeviceGetHandleByIndex(int(name))
    used = {each.pid: each.usedGpuMemory or 0 for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return DeviceUse(int(used.get(os.getpid(), 0)), int(info.total - info.free), int(info.total))


def ask_too_much(held: Any) -> str:
    if isinstance(held, str):
        return held
    import torch

    torch.empty(1 << 50, dtype=torch.uint8, device=held.device)
    return "a petabyte of device memory was granted"


SMALL_BYTES = 300_000_000


@context(memory=f"{SMALL_BYTES} B")
def small_table() -> dict[str, int]:
    return {"library": os.getpid()}


def fill_memory(_loaded: Any, count: int) -> int:
    held = bytearray(count)
    held[::4096] = b"x" * len(held[::4096])
    threading.Event().wait(30.0)
    return len(held)


def answer(_loaded: Any) -> int:
    return 42


def variable(_loaded: Any, name: str) -> str:
    return os.environ.get(name, "")


class BothModels(NamedTuple):
    """A model loaded by Stoker and by Transformers, or the reason why no model is available."""

    stokers: Any = None
    transformers: Any = None
    tokenizer: Any = None
    why: str = ""


@context(load_limit="3 min")
def tiny_llama() -> BothModels:
    why = _why_no_models()
    if why:
        return BothModels(why=why)
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _write_llama(Path(folder))
        own = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").to(stoker.device())
        return BothModels(load_causal_lm(folder, dtype="float32", snapshot=False), own.eval(), tokenizer)


class PickledModel(NamedTuple):
    """A model loaded from a pickle, or the reason why no model is available."""

    model: Any = None
    why: str = ""


@context(load_limit="3 min")
def pickled_llama() -> PickledModel:
    why = _why_no_models()
    if why:
        return PickledModel(why=why)
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        _write_llama(Path(folder))
        weights = Path(folder) / "model.safetensors"
        torch.save(AutoModelForCausalLM.from_pretrained(folder).state_dict(), Path(folder) / "pytorch_model.bin")
        weights.unlink()
        return PickledModel(load_causal_lm(folder, dtype="float32"))


def origin_and_text(loaded: PickledModel) -> tuple[str, str, int, str]:
    """Return the model's origin, a generated text, the process id, and the reason why no model was loaded."""
    if loaded.why:
        return "", "", os.getpid(), loaded.why
    [text] = loaded.model.generate(["one day"], max_new_tokens=16)
    return loaded.model.origin, text, os.getpid(), ""


def _why_no_models() -> str:
    try:
        importlib.import_module("torch")
        importlib.import_module("transformers")
    except Exception as error:
        return f"PyTorch and Transformers do not import in the pilot: {error}"
    return ""


def _write_llama(folder: Path) -> Any:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = [chr(code) if code > 32 else "Ġ" for code in range(32, 127)]
    found = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=found, clean_up_tokenization_spaces=False)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, max_position_embeddings=256, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def two_texts(models: BothModels, prompts: list[str], count: int) -> tuple[list[str], list[str], str]:
    """Return the texts of the Stoker engine, the texts of Transformers, and the reason without texts."""
    if models.why:
        return [], [], models.why
    import torch

    own = []
    for prompt in prompts:
        tokens = models.tokenizer(prompt, return_tensors="pt").to(models.transformers.device)
        with torch.no_grad():
            out = models.transformers.generate(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], do_sample=False,
                max_new_tokens=count, pad_token_id=0,
            )  # fmt: skip
        own.append(models.tokenizer.decode(out[0, tokens["input_ids"].shape[1] :]))
    return models.stokers.generate(prompts, max_new_tokens=count), own, ""
