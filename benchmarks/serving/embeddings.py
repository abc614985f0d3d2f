"""Measure embeddings of short texts: Stoker's `encoder` in a session, a sorting script, and padding to the maximum.

Texts have the lengths of tweets (STOKER_TRACES/lengths/tweet_token_lengths.csv.gz), else lognormal lengths. The model
has all-MiniLM-L6-v2's shape and random weights. *Sorted*: a script sorts texts by length and pads batches of 32 to the
longest text, with two threads or two processes (the faster variant counts). *Padded*: each text is padded to 512
tokens.
"""

from __future__ import annotations

import csv
import gzip
import math
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import in_turns, need, ratios, run_side
from benchmarks.tables import Bar, Line, Table

LENGTHS = Path(os.environ.get("STOKER_TRACES", ""), "lengths", "tweet_token_lengths.csv.gz")
MEDIAN, P98, SHORTEST, LONGEST = 23, 61, 4, 294
WORDS, BATCH, POSITIONS = 5000, 32, 512


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need("torch", "transformers")
    repeats, texts, padded = (1, 300, 20) if quick else (3, 20_000, 600)

    def rate(name: str) -> float:
        count = padded if name == "padded" else texts
        ways = (1, 2) if name == "sorted" else (1,)
        return max(float(run_side(side, way=name, texts=count, processes=way)["texts_per_s"]) for way in ways)

    found = in_turns({name: partial(rate, name) for name in ("stoker", "sorted", "padded")}, repeats, say)
    lines = [Line(what=name, cells={"texts/s": rates}, digits=0) for name, rates in found.items()]
    for other, least in (("padded", 1.5), ("sorted", 0.95)):
        cells = {"ratio": ratios(found["stoker"], found[other])}
        lines.append(Line(what=f"stoker against {other}", cells=cells, bar=Bar(at_least=least), digits=2))
    return Table(lines=lines)


def texts_like_tweets(count: int) -> list[str]:
    chance, words = random.Random(1), random.Random(2)
    if os.environ.get("STOKER_TRACES") and LENGTHS.exists():
        with gzip.open(LENGTHS, "rt") as file:
            drawn = chance.sample([int(row[0]) for row in list(csv.reader(file))[1:]], count)
    else:
        width = math.log(P98 / MEDIAN) / 2.0537  # The 98th percentile of the normal distribution.
        drawn = [round(chance.lognormvariate(math.log(MEDIAN), width)) for _ in range(count)]
    lengths = [min(LONGEST, max(SHORTEST, tokens)) for tokens in drawn]
    return [" ".join(f"w{words.randrange(WORDS)}" for _ in range(tokens - 2)) for tokens in lengths]


def write_model(folder: Path, words: Sequence[str] = ()) -> None:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = words or [f"w{number}" for number in range(WORDS)]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
        max_position_embeddings=POSITIONS,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)


def stoker_rate(folder: Path, all_texts: Sequence[str]) -> float:
    import stoker
    from stoker import encoder
    from stoker.apps.common.calls import split_into_batches
    from stoker.apps.embed.functions import EmbedRequest, embed_texts

    recipe = encoder(str(folder))
    app = embed_texts.with_options(context=recipe)
    batches = enumerate(split_into_batches(all_texts, 256))
    requests = [EmbedRequest(number=number, texts=batch, tensor_batch=BATCH) for number, batch in batches]
    with stoker.load(progress=False) as session:
        session.warm(recipe, len(os.sched_getaffinity(0))).result()
        list(stoker.map(app, requests[:4], ordered=False))
        begun = time.perf_counter()
        found = sum(len(each.vectors) for each in stoker.map(app, requests, ordered=False))
        taken_s = time.perf_counter() - begun
    if found != len(all_texts):
        raise SystemExit(f"{len(all_texts)} texts went out and {found} vectors came back")
    return found / taken_s


class Script:
    def __init__(self, folder: Path, *, threads: int) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(threads)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()
        self.embed_all(["w1 w2"])

    def embed_all(self, all_texts: Sequence[str], *, longest: int = 0) -> int:
        rows = self._tokenizer(list(all_texts))["input_ids"]
        if not longest:
            rows.sort(key=len)
        return sum(len(self._embed(rows[at : at + BATCH], longest)) for at in range(0, len(rows), BATCH))

    def _embed(self, rows: list[list[int]], longest: int) -> Any:
        import torch

        padding = {"padding": "max_length", "max_length": longest} if longest else {"padding": True}
        inputs = self._tokenizer.pad({"input_ids": rows}, return_tensors="pt", **padding)
        with torch.inference_mode():
            states = self._model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][:, :, None].float()
        pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
        return torch.nn.functional.normalize(pooled, dim=1).numpy()


def _work(folder: Path, own_texts: Sequence[str], barrier: Any, out: Any) -> None:
    script = Script(folder, threads=1)
    barrier.wait()
    out.put(script.embed_all(own_texts))


def sorted_rate(folder: Path, all_texts: Sequence[str], *, processes: int) -> float:
    if processes == 1:
        return script_rate(folder, all_texts)
    start = multiprocessing.get_context("spawn")
    barrier, out = start.Barrier(processes + 1), start.Queue()
    shares = [all_texts[part::processes] for part in range(processes)]
    workers = [start.Process(target=_work, args=(folder, share, barrier, out)) for share in shares]
    for worker in workers:
        worker.start()
    barrier.wait()
    begun = time.perf_counter()
    found: int = sum(out.get() for _ in workers)
    taken_s = time.perf_counter() - begun
    for worker in workers:
        worker.join()
    return found / taken_s


def script_rate(folder: Path, all_texts: Sequence[str], *, longest: int = 0) -> float:
    script = Script(folder, threads=len(os.sched_getaffinity(0)))
    begun = time.perf_counter()
    return script.embed_all(all_texts, longest=longest) / (time.perf_counter() - begun)


def side(way: str, texts: int, processes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="embeddings-") as place:
        folder, all_texts = Path(place) / "model", texts_like_tweets(texts)
        write_model(folder)
        os.environ.setdefault("STOKER_HOME", place + "/home")
        match way:
            case "stoker":
                rate = stoker_rate(folder, all_texts)
            case "sorted":
                rate = sorted_rate(folder, all_texts, processes=processes)
            case _:
                rate = script_rate(folder, all_texts, longest=POSITIONS)
    return {"texts_per_s": rate}
