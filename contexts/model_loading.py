"""Load a language model in a library: choose the engine and the devices."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from stoker.contexts import ambient
from stoker.contexts.engine_settings import EngineSettings
from stoker.contexts.language_model import CausalLM
from stoker.contexts.model_source import can_split_heads_evenly
from stoker.contexts.prompts import max_positions
from stoker.contexts.snapshot import load_model_and_tokenizer
from stoker.contexts.streamed_model import computation_dtype, hide_transformers_progress_bar
from stoker.errors import StokerError
from stoker.units import show_seconds

log = logging.getLogger(__name__)

_NO_SETTINGS = EngineSettings()
_HOW_TO_INSTALL = "pip install 'stoker[vllm]' in the environment of this site's pilots, or leave out engine=\"vllm\""


def load_model(
    path: str, *, dtype: str = "auto", snapshot: bool = True, name: str = "", threads: int = 0, engine: str = "auto",
    graphs: bool = False, settings: EngineSettings = _NO_SETTINGS, adapters: Mapping[str, str] | None = None,
) -> CausalLM:  # fmt: skip
    """Load the model at `path` on this library's devices, as in `causal_lm`. `name`: cache name of the model."""
    began = time.monotonic()
    if threads:
        torch.set_num_threads(threads)
    hide_transformers_progress_bar()
    devices = tuple(dict.fromkeys(ambient.devices()))
    device = devices[0]
    wanted = computation_dtype(dtype, path=path, device=device)
    why = reason_for_vllm(engine, device=device)
    parts = len(ambient.devices())
    if why and engine == "auto" and not can_split_heads_evenly(path, parts):
        log.info("vLLM cannot split the attention heads over %d devices; another engine splits the layers", parts)
        why = ""
    if why:
        if graphs:
            log.info("graphs=True has no effect on vLLM, which captures its own graphs")
        from stoker.contexts.inference.vllm_engine import start_engine  # the module imports vLLM, which is often absent

        serving, how = start_engine(
            path, dtype=wanted, device=device, name=name, why=why, settings=settings, adapters=adapters
        )
        origin = f"{how}, in {show_seconds(time.monotonic() - began)}"
        log.info("model %s in vLLM on %s (%s): %s", path, device, why, origin)
        return CausalLM(
            None, serving.prompts.tokenizer, name=Path(path).name, origin=origin, engine=serving, adapters=adapters
        )
    if len(devices) > 1 and graphs:
        raise StokerError(f"graphs=True supports one device only, and this library has {len(devices)} devices")
    loaded, how = load_model_and_tokenizer(path, dtype=wanted, devices=devices, snapshot=snapshot, name=name)
    settings.set_chat_template(loaded.tokenizer)
    longest = settings.max_length(max_positions(loaded.model.config))
    origin = f"{how}, in {show_seconds(time.monotonic() - began)}"
    if loaded.weights:
        origin += f" ({loaded.weights})"
    log.info("model %s on %s in %s: %s", path, ", ".join(devices), loaded.model.dtype, origin)
    return CausalLM(
        loaded.model, loaded.tokenizer, name=Path(path).name, origin=origin, engine=engine, graphs=graphs,
        longest=longest, adapters=adapters,
    )  # fmt: skip


def reason_for_vllm(engine: str, *, device: str) -> str:
    """Return the reason to use vLLM, or "". Raises StokerError."""
    asked = engine == "vllm"
    is_found = device.startswith("cuda") and importlib.util.find_spec("vllm") is not None
    if not asked and not (engine == "auto" and is_found):
        return ""
    try:
        importlib.import_module("vllm")
    except Exception as error:  # vLLM may be compiled for other devices or for another PyTorch
        if not asked:
            log.warning("vLLM is installed, but its import fails (%s); the default engine is used", error)
            return ""
        if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            raise StokerError(f'engine="vllm": vLLM is not installed here; {_HOW_TO_INSTALL}') from None
        raise StokerError(
            f'engine="vllm": vLLM is installed here, but its import fails ({error}); {_HOW_TO_INSTALL}'
        ) from error
    return 'engine="vllm" was given' if asked else "vLLM is installed, and the device is a GPU"
