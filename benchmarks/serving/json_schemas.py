"""Measure texts that follow random JSON schemas: the share of valid answers, and seconds per token against free text.

The schemas have the shapes of JSONSchemaBench (arXiv:2501.10868): nested objects, arrays, enums, patterns, numbers with
bounds, `anyOf` and `$ref`. A tiny random model with the vocabulary of SmolLM2 draws at a temperature of 1, so it writes
any token that a grammar allows. `jsonschema` judges each answer that ended by itself. A first run warms up. Each
further batch runs 50 schemas, or free texts of the same lengths.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.harness import MODEL, need, numbers_of, run_side, take_turns
from benchmarks.tables import Bar, Line, Table

GROUP, LONGEST = 50, 1_000
Schema = dict[str, Any]


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need(*MODEL, "llguidance", "jsonschema")
    found = run_side(side, schemas=GROUP if quick else 1_000, timeout_s=7200)
    say(numbers_of(found))
    ratio, judged = statistics.median(found["ratios"]), found["ended"]
    lines = [
        Line(
            what=f"valid of {judged} answers ({found['cut']} more were cut, {found['refused']} refused)",
            cells={"%": [100 * found["valid"] / judged]}, bar=Bar(at_least=100, repeats=1), digits=1,
        ),
        Line(
            what="time per token, times free text's", cells={"ratio": [ratio]}, bar=Bar(at_most=1.1, repeats=1),
            digits=2,
        ),
        Line(what="compilation of a schema, median", cells={"ms": [found["compile_ms"]]}, digits=1),
    ]  # fmt: skip
    return Table(lines=lines)


# ---- schemas


def random_schema(chance: random.Random) -> Schema:
    """Return an object's schema with bounded texts; a part of it may be used by reference."""
    schema = _object(chance, depth=0)
    if chance.random() < 0.4:
        schema["$defs"] = {"part": _object(chance, depth=2)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["properties"]["parts"] = {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
        schema["required"].append("part")
    return schema


def _object(chance: random.Random, *, depth: int) -> Schema:
    every = ["id", "name", "kind", "size", "tags", "owner", "address", "x y", "ünï", 'a"b']
    names = chance.sample(every, chance.randint(1, 5))
    return {
        "type": "object", "additionalProperties": False, "required": [name for name in names if chance.random() < 0.7],
        "properties": {name: _value(chance, depth=depth + 1) for name in names},
    }  # fmt: skip


def _value(chance: random.Random, *, depth: int) -> Schema:
    patterns = ["^[A-Z]{2}[0-9]{3}$", "^(ab|c)+d?$", "^\\\\d{4}-\\\\d{2}$"]
    makers: list[Callable[[], Schema]] = [
        lambda: {"type": "string", "maxLength": chance.randint(0, 12)},
        lambda: {"type": "string", "pattern": chance.choice(patterns)},
        lambda: {"type": "integer", "minimum": chance.randint(-500, 0), "maximum": chance.randint(1, 5000)},
        lambda: {"type": "number", "minimum": -1.5, "exclusiveMaximum": chance.choice([2, 99.5])},
        lambda: {"enum": chance.sample(["red", "green", 3, None, True, "déjà", "x\\ny"], 3)},
        lambda: {"type": ["boolean", "null"]},
        lambda: {"const": chance.choice(["fixed", 7, {"a": [1]}])},
    ]
    if depth < 3:
        item = {"type": "array", "minItems": 1}
        makers += [
            lambda: _object(chance, depth=depth),
            lambda: {**item, "items": _value(chance, depth=depth + 1), "maxItems": chance.randint(1, 3)},
            lambda: {"anyOf": [_value(chance, depth=depth + 1), {"type": "null"}]},
        ]
    return chance.choice(makers)()


# ---- one side


def side(schemas: int) -> dict[str, Any]:
    model = _tiny_model()
    chance = random.Random(35)
    drawn = [random_schema(chance) for _ in range(schemas)]
    totals = {"valid": 0, "ended": 0, "cut": 0, "refused": 0}
    ratios: list[float] = []
    compile_ms: list[float] = []
    _run(model, [{"max_new_tokens": 30}] * 4)
    for start in range(0, schemas, GROUP):
        group = drawn[start : start + GROUP]
        some = _compiled(model, group, compile_ms)
        held: list[dict[str, Any]] = [{"json_schema": json.dumps(each)} for each in some]
        _, texts = _run(model, held)
        free = [{"max_new_tokens": length, "engine_options": (("ignore_eos", True),)} for _, _, length in texts]
        sides = {name: partial(_run, model, asked) for name, asked in (("held", held), ("free", free))}
        took_s = {name: ran[0] for name, ran in take_turns(start // GROUP, sides).items()}
        ratios.append(took_s["held"] / took_s["free"])
        totals["refused"] += len(group) - len(some)
        for schema, (text, finish, _) in zip(some, texts, strict=True):
            totals["cut"] += finish == "length"
            totals["ended"] += finish == "stop"
            totals["valid"] += finish == "stop" and _is_valid(text, schema)
    return {**totals, "ratios": ratios, "compile_ms": statistics.median(compile_ms)}


def _is_valid(text: str, schema: Schema) -> bool:
    jsonschema: Any = import_module("jsonschema")
    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


def _compiled(model: Any, schemas: list[Schema], took_ms: list[float]) -> list[Schema]:
    from stoker.contexts.inference.adapter import Sampling

    found = []
    for schema in schemas:
        began = time.perf_counter()
        try:
            model._prompts.texts.prepare_sampling(Sampling(json_schema=json.dumps(schema)))
        except ValueError:
            continue
        took_ms.append(1000 * (time.perf_counter() - began))
        found.append(schema)
    return found


def _run(model: Any, samplings: list[dict[str, Any]]) -> tuple[float, list[tuple[str, str, int]]]:
    """Return the seconds of one batch, and the text, finish and token count of each request."""
    from stoker.contexts.inference.adapter import GenerationRequest, Sampling

    found: dict[int, tuple[str, str, int]] = {}
    with model._thread.alone():
        engine = model._thread.engine
        for place, options in enumerate(samplings):
            sampling = Sampling(**{"max_new_tokens": LONGEST, "temperature": 1.0, "seed": (7, place), **options})
            engine.add(GenerationRequest(place, (5, 6, 7, 8), sampling))
        counts = dict.fromkeys(range(len(samplings)), 0)
        began = time.perf_counter()
        while engine.get_load().running + engine.get_load().waiting:
            for token in engine.step():
                counts[token.request] += 1
                if token.finish is not None:
                    found[token.request] = (token.text, token.finish.value, counts[token.request])
        took_s = time.perf_counter() - began
    return took_s, [found[place] for place in range(len(samplings))]


def _tiny_model() -> Any:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from stoker.contexts.causal_lm import default_model
    from stoker.contexts.language_model import CausalLM

    folder, file = os.path.split(default_model())
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=2 * LONGEST, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return CausalLM(LlamaForCausalLM(config).eval(), tokenizer, name="tiny", engine="continuous")
