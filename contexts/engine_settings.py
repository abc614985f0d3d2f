"""Settings of a language model's engine. The library validates setting values when it loads the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from stoker.config_errors import suggest_similar_name
from stoker.errors import RecipeError, StokerError

_STOKER_SETTING = {
    "model": "path", "dtype": "dtype", "max_model_len": "max_model_len", "tensor_parallel_size": "devices",
    "gpu_memory_utilization": "device_memory", "kv_cache_memory_bytes": "device_memory",
}  # fmt: skip
"""Stoker settings that replace vLLM arguments, by the name of the argument."""
_RESERVED_ARGUMENTS = frozenset(
    {
        "distributed_executor_backend", "enable_sleep_mode", "max_logprobs", "enable_prompt_embeds", "enable_lora",
        "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules",
    }
)  # fmt: skip


class EngineSettings(msgspec.Struct, frozen=True):
    """Settings of an engine. `max_model_len`: maximum tokens of a prompt and its continuation (0: the model's limit).
    `chat_template`: text of a template (empty: the model's). `vllm`: engine arguments of vLLM.
    """

    max_model_len: int = 0
    chat_template: str = ""
    vllm: Mapping[str, Any] = {}

    def check(self, *, engine: str) -> None:
        """Raise RecipeError if the engine does not support a setting.

        Args:
            engine: Name of the engine.
        """
        length = self.max_model_len
        if type(length) is not int or length < 0:
            raise RecipeError(f"max_model_len = {length!r} is not a number of tokens", option="max_model_len")
        if not isinstance(self.chat_template, str):
            raise RecipeError("chat_template must be the text of a template", option="chat_template")
        for name in self.vllm:
            if name in _STOKER_SETTING:
                raise RecipeError(f"vllm: use Stoker's {_STOKER_SETTING[name]} instead of {name}", option="vllm")
            if name in _RESERVED_ARGUMENTS:
                raise RecipeError(f"vllm: Stoker sets {name} itself; leave it out", option="vllm")
        if self.vllm and engine != "vllm":
            names = ", ".join(self.vllm)
            raise RecipeError(f'{names}: only vLLM supports this; write engine = "vllm"', option="engine")

    def max_length(self, model_limit: int) -> int:
        """Return the maximum tokens of a prompt and its continuation.

        Args:
            model_limit: The model's limit in tokens; 0: unknown.

        Raises:
            StokerError: `max_model_len` exceeds the limit.
        """
        if model_limit and self.max_model_len > model_limit:
            raise StokerError(
                f"max_model_len = {self.max_model_len} is more than the {model_limit} tokens of the model"
            )
        return self.max_model_len or model_limit

    def set_chat_template(self, tokenizer: Any) -> None:
        """Set the chat template of a tokenizer.

        Args:
            tokenizer: A tokenizer of Transformers.

        Raises:
            StokerError: The template has a syntax error.
        """
        if not self.chat_template:
            return
        from jinja2 import TemplateSyntaxError  # Transformers needs jinja2 for any template

        tokenizer.chat_template = self.chat_template
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise StokerError(f"chat_template: line {error.lineno}: {error.message}") from error
        except Exception:
            return  # not an error of the template, which may require other messages than this test message


def check_vllm_arguments(given: Collection[str], known: Collection[str], *, version: str) -> None:
    """Raise StokerError for an argument that vLLM does not have."""
    for name in given:
        if name not in known:
            hint = suggest_similar_name(name, known, otherwise="")
            raise StokerError(f"vllm: {name} is not an engine argument of vLLM {version}{hint and f'; {hint}'}")
