"""A model in vLLM: where its weights lie, what memory it may take, and what its texts are made of."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from stoker.contexts import ambient
from stoker.contexts.inference.vllm_engine import VLLMEngine
from stoker.contexts.inference.vllm_start import VLLMStart
from stoker.contexts.prompts import PromptReader, end_tokens
from stoker.contexts.snapshot import weights_folder


def start_engine(path: str, *, dtype: Any, device: str, name: str = "", why: str = "") -> tuple[VLLMEngine, str]:
    """vLLM with the model at `path`, within the memory that this library's recipe declares; and how its weights were
    found, for people."""
    folder, how = weights_folder(path, dtype=dtype, name=name)
    start = VLLMStart(
        folder, dtype=str(dtype).removeprefix("torch."), device=device,
        device_memory_bytes=ambient.device_memory_bytes(), why=why,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ends = end_tokens(start.end_tokens, tokenizer)
    return VLLMEngine(start, PromptReader(tokenizer, ends=ends, longest=start.model_longest)), how
