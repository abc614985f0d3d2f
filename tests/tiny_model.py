from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest


def write_tiny_model(
    folder: Path, *, seed: int = 0, ends: bool = True, longest: int = 2048, width: int = 64, layers: int = 6,
    ascii_only: bool = False,
) -> None:  # fmt: skip
    """Write a random Llama with letters as tokens, without the slow import of PyTorch. `seed` determines the weights.
    `ends`: the model has an end token; else texts reach their limit. `longest`: maximum tokens of a text. `width`: size
    of a hidden state. `ascii_only`: tokens are characters; else bytes, which may be parts of characters.
    """
    tokenizers = pytest.importorskip("tokenizers")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    folder.mkdir()
    letters = sorted(
        letter for letter in tokenizers.pre_tokenizers.ByteLevel.alphabet() if letter < "\x7f" or not ascii_only
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", **({"eos_token": letters[0]} if ends else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    words, inner = len(letters), 64
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": words, "hidden_size": width,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 4, "tie_word_embeddings": False,
        "max_position_embeddings": longest, "torch_dtype": "float32", **({} if ends else {"eos_token_id": None}),
        **({"head_dim": inner // 4} if width != inner else {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (words, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (words, width),
    }
    for layer in range(layers):
        names = [*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        for name in names:
            outwards = name.endswith(("o_proj", "down_proj"))
            shapes[f"model.layers.{layer}.{name}.weight"] = (width, inner) if outwards else (inner, width)
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"model.layers.{layer}.{name}.weight": (width,) for name in norms}
    chance = np.random.default_rng(seed)
    weights = {name: chance.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
