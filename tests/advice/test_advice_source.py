from __future__ import annotations

import textwrap
from typing import Any

import pytest

from stoker.manager.advice.source import reading
from stoker.manager.advice.source.extractor import SourceText, extract_facts
from stoker.manager.advice.source.facts import UNKNOWN, WorkloadFacts


def facts(text: str, *, function: str = "", **options: Any) -> WorkloadFacts:
    return extract_facts(SourceText(textwrap.dedent(text), function), **options)


def values(found: WorkloadFacts) -> dict[str, Any]:
    return {field: fact.value for field, fact in found.known_facts().items()}


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("from transformers import AutoModel\nAutoModel.from_pretrained('gpt2')", "model", "gpt2"),
        ("from transformers import AutoModelForCausalLM as M\nM.from_pretrained('x')", "task", "text-generation"),
        ("from transformers import pipeline\npipeline('summarization', model='t5')", "task", "summarization"),
        ("from transformers import pipeline\npipeline('summarization', model='t5')", "model", "t5"),
        ("from stoker import causal_lm\ncausal_lm('models/small')", "model", "models/small"),
        ("from sentence_transformers import SentenceTransformer as S\nS('mini')", "framework", "sentence-transformers"),
        ("import torchvision\ntorchvision.models.resnet50()", "model", "resnet50"),
        ("from datasets import load_dataset\nload_dataset('glue', 'sst2')", "data", "glue/sst2"),
        ("from datasets import load_dataset\nload_dataset('x', split='train[:500]')", "items", 500),
        ("import torchvision\ntorchvision.datasets.CIFAR10('here')", "data", "CIFAR10"),
        ("import pandas\npandas.read_csv('a.csv')", "data", "a.csv"),
        ("from torch.utils.data import DataLoader\nDataLoader(d, batch_size=4 * 8)", "batch_size", 32),
        ("from transformers import TrainingArguments as T\nT(per_device_train_batch_size=4)", "batch_size", 4),
        ("from transformers import TrainingArguments as T\nT(bf16=True)", "precision", "bfloat16"),
        ("import torch\nwith torch.autocast('cuda', dtype=torch.float16):\n    pass", "precision", "float16"),
        ("model.half()", "precision", "float16"),
        ("model.to('cuda:0')", "devices", "cuda"),
        ("world_size = 8", "devices", 8),
        ("for epoch in range(2, 12):\n    pass", "epochs", 10),
        ("from tqdm import trange\nfor step in trange(50, desc='train'):\n    pass", "steps", 50),
        ("for x in y:\n    break\nelse:\n    batch_size = 32", "batch_size", 32),
        ("batch_size = int('9' * 5000)\nn = int(0x" + "f" * 4000 + ")\nepochs = 7", "epochs", 7),
        ("tokenizer(texts, max_length=128, truncation=True)", "sequence_length", 128),
        ("import jax\njax.jit(f)", "framework", "jax"),
        ("from torch import nn\nclass Net(nn.Module):\n    pass\nNet()", "model", "Net"),
        ("from sklearn.svm import LinearClassifier\nLinearClassifier()", "task", "classification"),
        ("size = 'xl'\nname = f'gpt2-{size}'\nAutoModel.from_pretrained(name)", "model", "gpt2-xl"),
        ("import os\nAutoModel.from_pretrained(os.path.join('models', 'a'))", "model", "models/a"),
        ("c = {'batch_size': 7}\nDataLoader(d, batch_size=c['batch_size'])", "batch_size", 7),
        ("a, b = 3, 'm'\nAutoModel.from_pretrained(b)", "model", "m"),
        ("import os\nAutoModel.from_pretrained(os.environ.get('MODEL', 'fallback'))", "model", "fallback"),
    ],
)
def test_each_kind_of_workload_fact_is_read_from_source_code(text: str, field: str, value: Any):
    found = facts(text)
    assert values(found)[field] == value, found.notes
    assert 0 < found.known_facts()[field].sure <= 1


def test_value_that_the_source_does_not_show_is_unknown():
    found = facts("import os\n\nAutoModel.from_pretrained(pick())\nDataLoader(d, batch_size=8)\n")
    assert values(found) == {"batch_size": 8}
    assert found.model.value == UNKNOWN
    assert found.epochs is None


def test_arguments_are_followed_through_calls_of_own_functions():
    text = """
    from torch.utils.data import DataLoader
    SCALE = 2
    def batches(rows, size): return DataLoader(rows, batch_size=size * SCALE)
    def work(rows, batch=4, name="tiny"):
        AutoModel.from_pretrained(name)
        return batches(rows, size=batch)
    """
    assert values(facts(text, function="work"))["batch_size"] == 8
    found = facts(text, function="work", arguments={"batch": 16, "name": "large"})
    assert values(found)["batch_size"] == 32
    assert (found.model.value, found.model.sure) == ("large", 0.95)


def test_code_of_other_functions_and_the_main_block_is_ignored():
    text = """
    big = AutoModel.from_pretrained("big")
    small = AutoModel.from_pretrained("small")
    def mine(x): return small(x)
    def other(x): return AutoModel.from_pretrained("third")
    if __name__ == "__main__": DataLoader(x, batch_size=99)
    """
    found = facts(text, function="mine")
    assert values(found) == {"model": "small"}


ARGPARSE = """
import argparse
def main():
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("training")
    group.add_argument("--batch-size", "-b", type=int, default=32)
    parser.add_argument("--model", default="small")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("corpus", nargs="?", default="none")
    args = parser.parse_args()
    AutoModel.from_pretrained(args.model)
    load_dataset(args.corpus)
    if args.half:
        model.half()
    DataLoader(d, batch_size=args.batch_size)
if __name__ == "__main__":
    main()
"""


def test_argparse_defaults_are_read():
    assert values(facts(ARGPARSE)) == {"batch_size": 32, "model": "small", "data": "none"}


def test_click_options_are_read():
    text = """
    import click
    @click.command()
    @click.option("--epochs", default=3)
    @click.option("-n", "--name", "model_name", default="m")
    def main(epochs, model_name):
        AutoModel.from_pretrained(model_name)
    main()
    """
    assert values(facts(text)) == {"epochs": 3, "model": "m"}
    assert values(facts(text, function="main")) == {"epochs": 3, "model": "m"}


def test_dataclasses_are_read_as_settings_and_as_options():
    text = """
    from dataclasses import dataclass, field
    @dataclass
    class Settings:
        batch_size: int = 8
        model_name: str = field(default="base")
        width: int = 64
    """
    used = "def work():\n    s = Settings(batch_size=16)\n    AutoModel.from_pretrained(s.model_name)\n"
    found = extract_facts(SourceText(textwrap.dedent(text) + used, "work"))
    assert values(found) == {"batch_size": 16, "model": "base"}
    assert found.further["width"].value == 64
    parsed = (
        "from transformers import HfArgumentParser\ns, *_ = HfArgumentParser(Settings).parse_args_into_dataclasses()\n"
    )
    given = extract_facts(SourceText(textwrap.dedent(text) + parsed))
    assert values(given)["batch_size"] == 8


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def broken(:\n", "line 1 does not parse"),
        ("x = 1\0", "does not parse"),
        ("(" * 5000 + ")" * 5000, "parse"),
        ("x = " + "-" * 20_000 + "1", "<source>|the source"),
        ("def other(): pass\ndef third(): pass\n", "has no function work"),
        ("x = 1\n" * 400_000, "not read: it has more than"),
    ],
)
def test_unreadable_source_has_no_facts_and_a_reason(text: str, why: str):
    found = extract_facts(SourceText(text, "work"))
    assert not found.known_facts()
    assert any(part in " ".join(found.notes) for part in why.split("|")), found.notes


def test_source_over_the_limits_keeps_its_first_facts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "MOST_NODES", 500)
    text = "DataLoader(d, batch_size=8)\n" + "f(1)\n" * 1000 + "for epoch in range(3): pass\n"
    found = facts(text)
    assert values(found) == {"batch_size": 8}
    assert "more than 500 expressions" in found.notes[0]


@pytest.mark.parametrize(
    "text",
    [
        "def f(n): return f(n + 1)\nf(0)",
        "def f(): g()\ndef g(): f()\nf()",
        "class A(A): pass\nA()",
        "class A:\n    def __init__(self): A()\nA()",
        "x = 10 ** 10 ** 10\ny = 'a' * 10 ** 12\nz = 1 // 0\nw = 1 << 10 ** 9\nint('9' * 100000)\nrange(0, 5, 0)",
        "a = [1]\na[5]\na['x']\na[True]\n(lambda: 0)()\n'{0.__class__}'.format(1)\n'{}'.format()\n1 < 'a'\n-'a'",
        "import os\nos.system('touch /tmp/never')\nexec('raise SystemExit')\nraise SystemExit\nassert False",
        "match x:\n    case {'a': [1, *_]}: f()\nasync def g():\n    async for i in x: await y\n"
        "    async with z as w: pass",
        "try:\n    pass\nexcept* ValueError as e:\n    f()\nwhile True: f()\ndel x\nglobal q",
        "from . import x\nfrom .. import y\nfrom ...z import *\nimport a.b.c as d",
        "\n".join(f"def f{i}(): f{i + 1}(); f{i + 1}()" for i in range(60)) + "\nf0()",
    ],
)
def test_odd_sources_raise_no_error(text: str):
    found = facts(text)
    assert not any("only a part of the source" in note for note in found.notes), found.notes
