"""The collection that estimates are judged on: small recipes of twelve families, each with a source of its own.

In ten families the sizes are arguments; in two they are constants of the source, which is then another text a recipe.
"""

from __future__ import annotations

import itertools
import random

import msgspec

from benchmarks import corpora

SOURCES = "recipe_sources"
A_FAMILY = 9
"""Recipes of each family, drawn from its grid."""

Sizes = dict[str, tuple[int, ...]]


class Family(msgspec.Struct, frozen=True):
    """A source, the values that the arguments of `load` and of `run` take, and those of its constants."""

    name: str
    load: Sizes = {}
    run: Sizes = {}
    constants: dict[str, tuple[int, ...]] = {}


class CollectedRecipe(msgspec.Struct, frozen=True):
    """One recipe: the source of its family with its constants, and its arguments."""

    name: str
    family: str
    source: str
    load: dict[str, int]
    run: dict[str, int]


FAMILIES = (
    Family(
        "mlp_forward",
        {"width": (64, 256, 512, 1024), "layers": (2, 4, 8)},
        {"batch_size": (8, 32, 128), "items": (256, 1024)},
    ),
    Family(
        "mlp_training",
        {"width": (32, 128, 512)},
        {"batch_size": (16, 64), "epochs": (1, 2, 4), "items": (256, 1024)},
    ),
    Family(
        "encoder_layers",
        {"d_model": (32, 64, 128, 256), "layers": (1, 2, 4)},
        {"batch_size": (2, 8, 16), "seq_len": (32, 128)},
    ),
    Family(
        "lstm_tagger",
        {"hidden": (32, 128, 256), "layers": (1, 2)},
        {"batch_size": (4, 16, 64), "length": (16, 64, 128)},
    ),
    Family("convnet", {"channels": (8, 16, 32, 64)}, {"image_size": (16, 32, 64, 96), "batch_size": (2, 8, 32)}),
    Family(
        "dense_numpy",
        {"width": (64, 256, 512), "depth": (2, 4, 8)},
        {"batch": (16, 64, 256), "steps": (5, 20, 50)},
    ),
    Family(
        "attention_numpy",
        {"dim": (32, 64, 128)},
        {"batch_size": (1, 4, 16), "seq_len": (64, 128, 256), "rounds": (2, 8)},
    ),
    Family(
        "kmeans_numpy",
        {"n_samples": (500, 2000, 8000), "dim": (8, 32)},
        {"clusters": (4, 16), "max_iters": (5, 20)},
    ),
    Family(
        "tiny_llama",
        {"hidden_size": (64, 128, 256), "num_hidden_layers": (1, 2, 4)},
        {"batch_size": (1, 4, 16), "max_new_tokens": (4, 16, 32)},
    ),
    Family(
        "tiny_bert",
        {"hidden_size": (32, 64, 128, 256)},
        {"batch_size": (2, 8), "max_length": (16, 64, 128), "items": (8, 32)},
    ),
    Family(
        "script_style", constants={"DIM": (48, 96, 192, 384), "BATCH_SIZE": (8, 32, 128), "STEPS": (5, 20, 80)}
    ),
    Family(
        "config_class",
        constants={
            "width": (32, 64, 128), "seq_len": (32, 64, 128), "batch_size": (4, 8, 32), "steps": (1, 3, 9),
        },
    ),
)  # fmt: skip


def recipes(*, held_out: bool = False) -> list[CollectedRecipe]:
    """The recipes, always the same: of each family so many points of its grid, drawn with a fixed seed; or as many
    others, on which nothing was decided."""
    found, sources = [], corpora.members(SOURCES)
    for family in FAMILIES:
        text = sources[f"{family.name}.py"].decode()
        every = {**family.load, **family.run, **family.constants}
        grid = [dict(zip(every, values, strict=True)) for values in itertools.product(*every.values())]
        drawn = random.Random(family.name).sample(grid, A_FAMILY)
        if held_out:
            others = [sizes for sizes in grid if sizes not in drawn]
            drawn = random.Random(f"{family.name}, held out").sample(others, A_FAMILY)
        for number, sizes in enumerate(drawn):
            source = _with_constants(text, {name: sizes[name] for name in family.constants})
            found.append(
                CollectedRecipe(
                    name=f"{family.name}-{'held-out-' if held_out else ''}{number}",
                    family=family.name,
                    source=source,
                    load={name: sizes[name] for name in family.load},
                    run={name: sizes[name] for name in family.run},
                )
            )
    return found


def _with_constants(text: str, constants: dict[str, int]) -> str:
    lines = text.splitlines(keepends=True)
    for place, line in enumerate(lines):
        for name, value in constants.items():
            for beginning in (f"{name} = ", f"    {name}: int = "):
                if line.startswith(beginning):
                    lines[place] = f"{beginning}{value}\n"
    return "".join(lines)
