"""Compare scores of lm-eval through `stoker serve` (`local-completions`) and by its own Hugging Face backend (`hf`).

The model is SmolLM2-135M in float32, from the same folder on both sides. The items are made from FEVER's claims of
`apps/fact_verification`: 102 claims with three labels (log-likelihoods), and copies of 30 claims (generation). lm-eval
has its own environment, with the Python `LM_EVAL_PYTHON`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import MODEL, Skipped, need, output_of, run_side
from benchmarks.serving.gateways import served
from benchmarks.starting import keep_state_in
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.causal_lm import default_model
from stoker.contexts.snapshot import prepare_weights_folder

CLAIMS, COPIES = 102, 30
SCORES = {"claim_labels": "acc", "copied_claims": "exact_match"}
"""The metric of each task."""
PYTHON = os.environ.get("LM_EVAL_PYTHON", sys.executable)


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need(*MODEL)
    if subprocess.run([PYTHON, "-c", "import lm_eval"], capture_output=True, check=False).returncode:
        raise Skipped(f"{PYTHON} cannot import lm_eval; LM_EVAL_PYTHON names another")
    items = 6 if quick else CLAIMS
    found = run_side(side, items=items, timeout_s=3600)
    lines = []
    for task, by_side in found.items():
        say(", ".join([task, *(f"{side} {score:.4f}" for side, score in by_side.items())]))
        difference = abs(by_side["gateway"] - by_side["hf"])
        cells = {side: [score] for side, score in by_side.items()}
        what = f"{task}, {SCORES[task]}, {min(items, COPIES) if task == 'copied_claims' else items} items"
        bar = Bar(at_most=0.01, repeats=1)
        lines.append(Line(what=what, cells={**cells, "difference": [difference]}, bar=bar, digits=4, last_digits=4))
    return Table(lines=lines)


# ---- one side

MODELS = '[models.smollm2]\npath = "model"\ndtype = "float32"\nmemory = "4 GB"\nmin = 1\nmax = 1\n'
DATA = Path(__file__).resolve().parents[2] / "apps" / "fact_verification" / "data" / "fever_sample.jsonl"
LABELS = {"SUPPORTS": "True", "REFUTES": "False", "NOT ENOUGH INFO": "Unknown"}
SHOTS = 3
"""Solved examples before each item of `copied_claims`."""


def side(items: int) -> dict[str, dict[str, float]]:
    import torch

    with tempfile.TemporaryDirectory(prefix="lm-eval-") as place:
        folder = Path(place)
        keep_state_in(folder)
        shutil.copytree(prepare_weights_folder(default_model(), dtype=torch.float32)[0], folder / "model")
        _write_tasks(folder / "tasks", items)
        options = f"pretrained={folder}/model,dtype=float32"
        found = {"hf": _scores(folder, "hf", options, "--device", "cpu")}
        with served(folder, MODELS) as port:
            options = f"model=smollm2,base_url=http://127.0.0.1:{port}/v1/completions,tokenizer={folder}/model"
            options += ",num_concurrent=4,tokenized_requests=False,timeout=600"
            found["gateway"] = _scores(folder, "local-completions", options)
    return {task: {side: scores[task] for side, scores in found.items()} for task in SCORES}


def _write_tasks(folder: Path, items: int) -> None:
    """Write both tasks for lm-eval. JSON is YAML."""
    folder.mkdir()
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    labels = [{"claim": row["claim"], "label": list(LABELS).index(row["label"])} for row in rows[:items]]
    _write_task(
        folder, "claim_labels", labels, output_type="multiple_choice", doc_to_choice=list(LABELS.values()),
        doc_to_text="Is the claim true, false or unknown?\nClaim: {{claim}}\nAnswer:", doc_to_target="label",
    )  # fmt: skip
    sentences = [(f"Sentence: {row['claim']}\nThe same sentence:", row["claim"]) for row in rows[-COPIES - SHOTS :]]
    shots = "".join(f"{text} {claim}\n\n" for text, claim in sentences[:SHOTS])
    claims = [{"text": shots + text, "claim": claim} for text, claim in sentences[SHOTS:]][:items]
    _write_task(
        folder, "copied_claims", claims, output_type="generate_until", doc_to_text="{{text}}",
        doc_to_target="{{claim}}",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 48, "do_sample": False, "temperature": 0.0},
        filter_list=[{"name": "none", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
    )  # fmt: skip


def _write_task(folder: Path, name: str, rows: list[dict[str, Any]], **settings: Any) -> None:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test", "metric_list": [{"metric": SCORES[name]}], **settings,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(task))


def _scores(folder: Path, model: str, options: str, *more: str) -> dict[str, float]:
    """Run lm-eval, and return each task's score."""
    out = folder / f"scores-{model}"
    command = [
        PYTHON, "-m", "lm_eval", "run", "--model", model, "--model_args", options, "--tasks", *SCORES, "--include_path",
        str(folder / "tasks"), "--batch_size", "8", "--output_path", str(out), *more,
    ]  # fmt: skip
    offline = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "-"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output_of(command, timeout_s=3600, folder=folder, environment={**environment, **offline})
    [file] = out.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    return {
        task: float(next(value for name, value in results[task].items() if name.split(",")[0] == metric))
        for task, metric in SCORES.items()
    }
