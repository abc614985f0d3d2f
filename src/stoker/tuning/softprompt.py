"""The soft prompt on a context's model, through PEFT, and without a trace when the call is over.

PEFT wraps a model for prompt tuning (Lester et al., arXiv:2104.08691) and leaves its weights alone, but it freezes them
and may touch the model's configuration; both are put back here, and the random numbers that it draws are put back too.
PEFT can begin from a text by itself, by loading the tokenizer from the hub once more: a context has its tokenizer, so
the embeddings are made here and handed over.

The model stays in evaluation mode: with dropout the numbers would depend on how the batch is split over ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import peft
import safetensors.torch
import torch

from stoker.tuning.encoding import Ids

_ADAPTER = "default"


def embed(model: Any, ids: Ids) -> torch.Tensor:
    """The embeddings of tokens, `[tokens, width]`, as 32-bit numbers on the CPU."""
    table = model.get_input_embeddings()
    with torch.no_grad():
        found = table(torch.tensor(ids, device=table.weight.device))
    return found.detach().float().cpu()


class SoftPrompt:
    """A model with a soft prompt before its input. `vectors` is what is trained, `[tokens, width]`, 32-bit."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        """PEFT's model: takes token ids, and puts the soft prompt before their embeddings."""
        self.base = wrapped.get_base_model()

    @property
    def vectors(self) -> torch.nn.Parameter:
        """The soft prompt."""
        found: torch.nn.Parameter = self.wrapped.prompt_encoder[_ADAPTER].embedding.weight
        return found

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        found: torch.device = self.base.get_input_embeddings().weight.device
        return found

    def __len__(self) -> int:
        return int(self.vectors.shape[0])

    def place(self, vectors: torch.Tensor) -> None:
        """Put these vectors in."""
        with torch.no_grad():
            self.vectors.copy_(vectors)

    def files(self) -> tuple[bytes, bytes]:
        """The soft prompt as PEFT saves it: `adapter_model.safetensors` and `adapter_config.json`."""
        tensors = {name: value.detach().cpu() for name, value in peft.get_peft_model_state_dict(self.wrapped).items()}
        config = {**self.wrapped.peft_config[_ADAPTER].to_dict(), "inference_mode": True}
        plain = {name: getattr(value, "value", value) for name, value in config.items()}
        said = json.dumps(plain, indent=1, default=str)
        return bytes(safetensors.torch.save(tensors)), said.encode()


@contextlib.contextmanager
def soft_prompt(model: Any, vectors: torch.Tensor) -> Iterator[SoftPrompt]:
    """`model` with `vectors` as its soft prompt, for as long as the block runs; after it the model is as it was."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    was_training = model.training
    slices = getattr(model.config, "pretraining_tp", None)
    config = peft.PromptTuningConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        prompt_tuning_init=peft.PromptTuningInit.RANDOM,
        num_virtual_tokens=vectors.shape[0],
    )
    try:
        with torch.random.fork_rng(devices=[]):
            wrapped = peft.get_peft_model(model, config)
        soft = SoftPrompt(wrapped)
        soft.place(vectors)
        model.eval()
        yield soft
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        model.train(was_training)
        if slices is not None:
            model.config.pretraining_tp = slices


def nearest_tokens(model: Any, vectors: torch.Tensor) -> list[int]:
    """For each vector of the soft prompt the token whose embedding has the least angle to it."""
    table = model.get_input_embeddings().weight.detach().float()
    table = table / table.norm(dim=1, keepdim=True).clamp_min(1e-12)
    found: list[int] = (vectors.detach().to(table.device).float() @ table.T).argmax(dim=1).tolist()
    return found
