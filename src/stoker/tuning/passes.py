"""Run the soft prompt on the model of a context with PEFT: gradients and measurements.

PEFT freezes the weights, may change the model's configuration, and draws random numbers; `attach_soft_prompt` undoes
this. `embed_tokens` replaces PEFT's own embedding, which would load the tokenizer from the hub again. The model stays
in evaluation mode, because dropout would depend on the division of a batch among ranks.

All results are sums over samples or tokens, which the caller adds over all ranks. Padding is on the right, so the
results of a row do not depend on other rows (except for rounding). To save memory, only the positions before target
tokens pass through the output layer. Accuracy needs no generation: the model generates the target if and only if each
target token is the most likely token after its predecessors.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

import peft
import safetensors.torch
import torch

from stoker.contexts.prompts import max_positions
from stoker.tuning.encoding import EncodedSample, Ids, split_into_chunks
from stoker.tuning.job import Metric
from stoker.tuning.metrics import MetricSums, measure_text

_ADAPTER_NAME = "default"


def embed_tokens(model: Any, ids: Ids) -> torch.Tensor:
    table = model.get_input_embeddings()
    with torch.no_grad():
        found = table(torch.tensor(ids, device=table.weight.device))
    return found.detach().float().cpu()


class SoftPrompt:
    """A model with a soft prompt before its input. `vectors`: `[tokens, width]`."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.base = wrapped.get_base_model()

    @property
    def vectors(self) -> torch.nn.Parameter:
        found: torch.nn.Parameter = self.wrapped.prompt_encoder[_ADAPTER_NAME].embedding.weight
        return found

    @property
    def device(self) -> torch.device:
        found: torch.device = self.base.get_input_embeddings().weight.device
        return found

    def __len__(self) -> int:
        return int(self.vectors.shape[0])

    def set_vectors(self, vectors: torch.Tensor) -> None:
        with torch.no_grad():
            self.vectors.copy_(vectors)

    def adapter_files(self) -> tuple[bytes, bytes]:
        """Return the soft prompt in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`."""
        tensors = {name: value.detach().cpu() for name, value in peft.get_peft_model_state_dict(self.wrapped).items()}
        config = {**self.wrapped.peft_config[_ADAPTER_NAME].to_dict(), "inference_mode": True}
        plain = {name: getattr(value, "value", value) for name, value in config.items()}
        said = json.dumps(plain, indent=1, default=str)
        return bytes(safetensors.torch.save(tensors)), said.encode()


@contextlib.contextmanager
def attach_soft_prompt(model: Any, vectors: torch.Tensor) -> Iterator[SoftPrompt]:
    """Add a soft prompt to the model while the `with` block runs, then restore the model."""
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
        soft.set_vectors(vectors)
        model.eval()
        yield soft
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        model.train(was_training)
        if slices is not None:
            model.config.pretraining_tp = slices


def nearest_tokens(model: Any, vectors: torch.Tensor) -> list[int]:
    """Return the token whose embedding is nearest in angle to each vector."""
    table = model.get_input_embeddings().weight.detach().float()
    table = table / table.norm(dim=1, keepdim=True).clamp_min(1e-12)
    found: list[int] = (vectors.detach().to(table.device).float() @ table.T).argmax(dim=1).tolist()
    return found


_IGNORED = -100


def compute_gradient(
    soft: SoftPrompt, rows: Sequence[EncodedSample], *, micro_batch: int
) -> tuple[torch.Tensor, float, int]:
    """Return the gradient `[tokens, width]` of the summed loss of `rows`, this loss in nats, and its token count."""
    soft.vectors.grad = None
    loss, tokens = 0.0, 0
    with torch.inference_mode(mode=False), torch.enable_grad():
        for some in split_into_chunks(rows, most=micro_batch):
            logits, wanted = _target_logits(soft, some)
            summed = _summed_loss(logits, wanted)
            summed.backward()
            loss += float(summed.detach())
            tokens += sum(len(row.target) for row in some)
    found = soft.vectors.grad
    soft.vectors.grad = None
    return (torch.zeros_like(soft.vectors) if found is None else found.detach()), loss, tokens


def measure_prompt(
    soft: SoftPrompt, rows: Sequence[EncodedSample], *, metric: Metric, tokenizer: Any, batch: int
) -> MetricSums:
    """Measure loss and accuracy. If `metric` is ROUGE-L or BLEU, also generate texts and measure this metric."""
    found = MetricSums()
    with torch.inference_mode():
        for some in split_into_chunks(sorted(rows, key=len, reverse=True), most=batch):
            found += _measure_loss_and_accuracy(soft, some)
            if metric in (Metric.ROUGE, Metric.BLEU):
                for row, text in zip(some, generate_texts(soft, some, tokenizer=tokenizer), strict=True):
                    found += measure_text(text, row.text)
    return found


def generate_texts(soft: SoftPrompt, rows: Sequence[EncodedSample], *, tokenizer: Any) -> list[str]:
    """Generate texts greedily, with up to twice the tokens of the longest target."""
    device = soft.device
    width = max(len(row.source) for row in rows)
    pad = [width - len(row.source) for row in rows]
    ids = torch.tensor([(0,) * more + row.source for more, row in zip(pad, rows, strict=True)], device=device)
    table = soft.base.get_input_embeddings()
    with torch.inference_mode():
        prompt = soft.vectors.to(table.weight.dtype)
        embedded = []
        for more, of_row in zip(pad, table(ids), strict=True):
            embedded.append(torch.cat([of_row[:more], prompt, of_row[more:]]))
        whole = torch.arange(width + len(soft), device=device)[None, :]
        seen = (whole >= torch.tensor(pad, device=device)[:, None]).long()
        most = 2 * max(len(row.target) for row in rows)
        if longest := max_positions(soft.base.config):
            most = max(1, min(most, longest - width - len(soft)))
        end = tokenizer.eos_token_id
        made = soft.base.generate(
            inputs_embeds=torch.stack(embedded), attention_mask=seen, max_new_tokens=most, do_sample=False,
            num_beams=1, eos_token_id=end, pad_token_id=0 if end is None else end,
        )  # fmt: skip
    return [
        str(tokenizer.decode(_cut_at_end_token(ids, end), skip_special_tokens=True)).strip() for ids in made.tolist()
    ]


def _summed_loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    flat, targets = logits.flatten(0, 1), wanted.flatten()
    return torch.nn.functional.cross_entropy(flat, targets, ignore_index=_IGNORED, reduction="sum")


def _measure_loss_and_accuracy(soft: SoftPrompt, rows: Sequence[EncodedSample]) -> MetricSums:
    logits, wanted = _target_logits(soft, rows)
    losses = _summed_loss(logits, wanted)
    right = ((logits.argmax(dim=-1) == wanted) | (wanted == _IGNORED)).all(dim=1)
    return MetricSums(
        samples=float(len(rows)), tokens=float(sum(len(row.target) for row in rows)), loss=float(losses),
        correct=float(right.sum()),
    )  # fmt: skip


def _target_logits(soft: SoftPrompt, rows: Sequence[EncodedSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 logits `[rows, longest target, vocabulary]`, and the target tokens `[rows, longest target]`."""
    device, longest, width = soft.device, max(len(row.target) for row in rows), max(map(len, rows))
    ids = torch.tensor([(*row.source, *row.target, *(0,) * (width - len(row))) for row in rows], device=device)
    seen = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    wanted = torch.tensor(
        [(*row.target, *(_IGNORED,) * (longest - len(row.target))) for row in rows], device=device
    )  # fmt: skip
    # The model predicts a token at the position before it, and the soft prompt precedes the row.
    before = [len(soft) + len(row.source) - 1 for row in rows]
    places = [
        [start + min(at, len(row.target) - 1) for at in range(longest)] for start, row in zip(before, rows, strict=True)
    ]
    more: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(soft.base.forward).parameters:
        kept = sorted({place for some in places for place in some})
        index = {place: at for at, place in enumerate(kept)}
        places = [[index[place] for place in some] for some in places]
        more["logits_to_keep"] = torch.tensor(kept, device=device)
    logits = soft.wrapped(input_ids=ids, attention_mask=seen, use_cache=False, **more).logits
    chosen = torch.tensor(places, device=device)
    return logits[torch.arange(len(rows), device=device)[:, None], chosen].float(), wanted


def _cut_at_end_token(ids: list[int], end: int | None) -> list[int]:
    return ids[: ids.index(end)] if end is not None and end in ids else ids
