"""Load a language model in a library: its weights, its dtype, and its engine.

vLLM reads weights itself, from a folder of safetensors; every other engine computes with a model of Transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
from pathlib import Path
from typing import Any

import torch

from stoker.contexts import ambient
from stoker.contexts.language_model import CausalLM
from stoker.contexts.snapshot import load_parts
from stoker.contexts.torch_settings import be_quiet, dtype_of
from stoker.errors import StokerError
from stoker.units import show_seconds

log = logging.getLogger(__name__)

_HOW_TO_INSTALL = "pip install 'stoker[vllm]' in the environment of this site's pilots, or leave engine=\"vllm\" away"


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    snapshot: bool = True,
    name: str = "",
    threads: int = 0,
    engine: str = "auto",
    graphs: bool = False,
) -> CausalLM:
    """Load the model at `path` (a folder, a `.gguf` file, or a hub name) on this library's device. `name`: the cache
    name of the object at `path`; computed if empty. `graphs`: as in `causal_lm`. Raises Transformers' errors for an
    unreadable model, ValueError for an engine that does not support the model, and StokerError if vLLM cannot start."""
    began = time.monotonic()
    if threads:
        torch.set_num_threads(threads)
    be_quiet()
    device = ambient.device()
    wanted = dtype_of(dtype, path=path, device=device)
    why = why_vllm(engine, device=device)
    if why:
        if graphs:
            log.info("graphs=True has no effect on vLLM, which captures its own graphs")
        made = _load_vllm(path, dtype=wanted, device=device, name=name, why=why, began=began)
        log.info("model %s in vLLM on %s (%s): %s", path, device, why, made.origin)
        return made
    loaded, how = load_parts(path, dtype=wanted, device=device, snapshot=snapshot, name=name)
    origin = f"{how}, in {show_seconds(time.monotonic() - began)}"
    if loaded.weights:
        origin += f" ({loaded.weights})"
    log.info("model %s on %s in %s: %s", path, device, loaded.model.dtype, origin)
    return CausalLM(loaded.model, loaded.tokenizer, name=Path(path).name, origin=origin, engine=engine, graphs=graphs)


def why_vllm(engine: str, *, device: str) -> str:
    """Why vLLM writes, for people; empty if another engine does. Raises StokerError where it is asked for and does not
    import."""
    if engine not in ("auto", "vllm"):
        return ""
    asked = engine == "vllm"
    if not asked and (not device.startswith("cuda") or importlib.util.find_spec("vllm") is None):
        return ""
    try:
        importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if asked and error.name == "vllm":
            raise StokerError(f'engine="vllm": vLLM is not installed here; {_HOW_TO_INSTALL}') from None
        return _broken(error, asked=asked)
    except Exception as error:  # its compiled parts are for other devices, or another PyTorch
        return _broken(error, asked=asked)
    return "it was asked for" if asked else "vLLM is installed, and the device is a GPU"


def _broken(error: Exception, *, asked: bool) -> str:
    if asked:
        raise StokerError(
            f'engine="vllm": vLLM is installed here and does not import ({error}); {_HOW_TO_INSTALL}'
        ) from error
    log.warning("vLLM is installed and does not import (%s); the default engine writes", error)
    return ""


def _load_vllm(path: str, *, dtype: Any, device: str, name: str, why: str, began: float) -> CausalLM:
    from stoker.contexts.inference.vllm_engine import start_engine  # it imports vLLM, which few environments have

    engine, how = start_engine(path, dtype=dtype, device=device, name=name, why=why)
    origin = f"{how}, in {show_seconds(time.monotonic() - began)}"
    return CausalLM(None, engine.prompts.tokenizer, name=Path(path).name, origin=origin, engine=engine)
