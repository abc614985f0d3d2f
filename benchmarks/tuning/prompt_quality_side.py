"""The side of `prompt_quality` that runs the model: look up prompts, tune from these prompts, store every curve.

Each lookup and each tuning appends a record. A stopped run can therefore resume, and two runs may divide the tasks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.harness import machine
from benchmarks.tuning.prompt_quality import SPREAD, SPREAD_TASK
from benchmarks.tuning.prompt_tasks import PROMPTS, TASKS, Pairs
from stoker.chance import Stream
from stoker.contexts import ambient
from stoker.contexts.causal_lm import default_model, load_causal_lm
from stoker.contexts.folders import state_folder
from stoker.run_folder import RecordLog
from stoker.tuning.bank import build
from stoker.tuning.bank.build import ensure_bank
from stoker.tuning.bank.candidates import Candidate, read_candidates
from stoker.tuning.bank.layers import CLUSTERS, Layers
from stoker.tuning.bank.lookup import look_up
from stoker.tuning.job import Data, Job, Metric, Prompt, Sample, Training, Until, split

if TYPE_CHECKING:
    from stoker.contexts.language_model import CausalLM


CHOSEN = (
    "claims", "calculations", "topics", "endings", "names", "climate", "results", "articles", "opposites", "sums",
)  # fmt: skip
DEMONSTRATIONS = """\
I gave a friend an instruction. Based on the instruction they produced the following input-output pairs:

{pairs}
The instruction was to"""
"""Template from Honovich et al., "Instruction induction" (2022)."""
Record = dict[str, Any]
Points = Sequence[Sequence[float]]


class Settings(msgspec.Struct, frozen=True):
    """Settings, chosen before the first result. `scored`: training samples for a score; `evaluation`: samples that
    decide whether the target is reached; `tokens`: length of a prompt.
    """

    samples: int = 240
    longest: int = 120
    tokens: int = 16
    scored: int = 8
    evaluation: int = 12
    share: int = 24
    shortlist: int = 8
    randoms: int = 3
    demonstrations: int = 5
    target_iterations: int = 15
    iterations: int = 60
    evaluate_every: int = 3
    batch: int = 4
    seed: int = 0
    model: str = ""

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:8]


QUICK = Settings(
    samples=60, evaluation=6, scored=4, shortlist=3, randoms=2, target_iterations=2, iterations=4, evaluate_every=2
)


class Bench:
    def __init__(
        self, model: CausalLM, layers: Layers, settings: Settings, log: RecordLog, *, task: str, pairs: Pairs
    ) -> None:
        self.model, self.layers, self.settings, self.log, self.task = model, layers, settings, log, task
        self.data = Data(path=task, template="{input}", evaluation_samples=settings.evaluation, held_out=0.02)
        some = [pair for pair in pairs if len("".join(pair)) <= settings.longest]
        self.samples = [Sample(*pair) for pair in build.evaluation_samples(some, count=settings.samples)]
        parts = split(self.samples, data=self.data, seed=settings.seed)
        self.training = [(one.input, one.target) for one in parts.training]

    def compare(self) -> None:
        listed = self.keep("lookup", "", self.look_up)["best"]
        reach, most = self.target(), self.settings.iterations
        known = [one["points"] for key in listed if (one := self.log.get((self.task, "listed", key))) is not None]
        least = min((iterations_to(points, reach, most=most) for points in known), default=most)
        for place, key in enumerate(listed):
            # A prompt that needs more iterations than another prompt is not the best, so its tuning stops early.
            enough = most if place == 0 else least
            points = self.reached("listed", self.layers.candidates[key].text, reach=reach, most=enough)
            least = min(least, iterations_to(points, reach, most=most))
        for text in self.draw(self.settings.randoms):
            self.reached("random", text, reach=reach, most=most)

    def compare_induced(self) -> None:
        text = self.keep("induction", "", self.induce)["text"]
        self.reached("induced", text, reach=self.target(), most=self.settings.iterations)

    def spread(self, count: int) -> None:
        for text in self.draw(count):
            self.tuned("spread", text, reach=None, most=self.settings.iterations)

    def target(self) -> float:
        most = self.settings.target_iterations
        return target([self.tuned("random", text, reach=None, most=most) for text in self.draw(self.settings.randoms)])

    def reached(self, part: str, text: str, *, reach: float, most: int) -> Points:
        """Return the curve up to the target or `most` iterations. Repeat a tuning that stopped too early."""
        points: Points = self.tuned(part, text, reach=reach, most=most)["points"]
        if _ended_early(points, reach, most=most):
            points = self.tuned(f"{part}, on", text, reach=reach, most=most)["points"]
        return points

    def tuned(self, part: str, text: str, *, reach: float | None, most: int) -> Record:
        return self.keep(part, Candidate(text=text).key, lambda: self.tune(text, reach=reach, most=most))

    def keep(self, part: str, prompt: str, make: Callable[[], Record]) -> Record:
        key = {"task": self.task, "part": part, "prompt": prompt}
        if (found := self.log.get(tuple(key.values()))) is None:
            begun = time.process_time()
            found = {**key, **make()}
            found["spent_s"] = round(time.process_time() - begun, 1)
            self.log.append([found])
            tell({name: value for name, value in found.items() if name != "losses"})
        return found

    def look_up(self) -> Record:
        settings = self.settings
        chosen = build.evaluation_samples(self.training, count=settings.scored)
        score = build.scorer(self.model, chosen, tokens=settings.tokens, batch_size=4)
        found = look_up(self.layers, score, limit=len(self.layers) // settings.share)
        losses = {key: round(loss, 4) for key, loss in found.losses.items()}
        return {
            "best": sorted(found.losses, key=found.losses.__getitem__)[: settings.shortlist],
            "scores": found.scores,
            "losses": losses,
        }

    def draw(self, count: int) -> list[str]:
        chance = Stream(self.settings.seed, f"random prompts, {self.task}")
        every = list(self.layers.candidates.values())
        order = sorted(range(len(every)), key=chance.uniform)
        return [every[place].text for place in order[:count]]

    def induce(self) -> Record:
        shown = build.evaluation_samples(self.training, count=self.settings.demonstrations)
        pairs = "".join(f"Input:{one}\nOutput:{two}\n" for one, two in shown)
        said = self.model.generate([DEMONSTRATIONS.format(pairs=pairs)], max_new_tokens=2 * self.settings.tokens)[0]
        return {"text": " ".join(said.split()) or "Answer."}

    def tune(self, text: str, *, reach: float | None, most: int) -> Record:
        from stoker.tuning.tune import tune

        settings = self.settings
        own = len(self.model.tokenizer(text[: 64 * settings.tokens], add_special_tokens=False)["input_ids"])
        job = Job(
            data=self.data, prompt=Prompt(initial=text, virtual_tokens=min(own, settings.tokens)),
            until=Until(metric=Metric.LOSS, reach=reach, iterations=most, evaluate_every=settings.evaluate_every),
            training=Training(batch=settings.batch, seed=settings.seed),
        )  # fmt: skip
        tuned = tune(self.model, job, self.samples)
        points = [(point.iteration, point.loss) for point in tuned.points]
        return {"text": text[:80], "points": points, "end": tuned.end.value}


def target(randoms: Sequence[Record]) -> float:
    return float(statistics.mean(min(loss for _, loss in one["points"]) for one in randoms))


def iterations_to(points: Points, reach: float, *, most: int) -> int:
    return next((max(1, int(iteration)) for iteration, loss in points if loss <= reach), most)


def crossing(points: Points, reach: float, *, most: int) -> float:
    if points[0][1] <= reach:
        return 1.0
    for (one, above), (two, below) in itertools.pairwise(points):
        if below <= reach:
            return max(1.0, one + (two - one) * (above - reach) / (above - below))
    return float(most)


def _ended_early(points: Points, reach: float, *, most: int) -> bool:
    return points[-1][0] < most and min(loss for _, loss in points) > reach


def task_summary(records: Sequence[Record], *, most: int) -> dict[str, Any] | None:
    names = ("lookup", "random", "listed", "induced")
    parts = {part: [one for one in records if one["part"] == part] for part in names}
    if not parts["lookup"] or not parts["random"] or len(parts["listed"]) < len(parts["lookup"][0]["best"]):
        return None
    reach = target(parts["random"])
    on: dict[tuple[str, str], Points] = {
        (one["part"], one["prompt"]): one["points"] for one in records if one["part"].endswith(", on")
    }
    of: dict[str, dict[str, Points]] = {
        part: {
            one["prompt"]: on[key] if (key := (f"{part}, on", one["prompt"])) in on else one["points"]
            for one in parts[part]
        }
        for part in ("listed", "random", "induced")
    }
    listed = [of["listed"][key] for key in parts["lookup"][0]["best"]]
    if any(_ended_early(points, reach, most=most) for points in (listed[0], *of["random"].values())):
        return None
    found: dict[str, Any] = {"reach": reach, "scores": parts["lookup"][0]["scores"]}
    for name, count in (("", iterations_to), ("_between", crossing)):
        found[f"by_score{name}"] = count(listed[0], reach, most=most)
        found[f"best{name}"] = min(count(points, reach, most=most) for points in listed)
        found[f"randoms{name}"] = [count(points, reach, most=most) for points in of["random"].values()]
        found[f"induced{name}"] = [count(points, reach, most=most) for points in of["induced"].values()]
    found["listed"] = [f"{'>' if points[-1][1] > reach else ''}{int(points[-1][0])}" for points in listed]
    found["reached"] = min(loss for _, loss in listed[0]) <= reach
    return found


def spread_of(records: Sequence[Record], settings: Settings) -> dict[str, Any] | None:
    """Return the iterations after which each curve of the spread reaches the mean of all curves' lowest losses."""
    curves: list[Points] = [one["points"] for one in records if one["part"] == "spread"]
    if not curves:
        return None
    first = [[point for point in points if point[0] <= settings.target_iterations] for points in curves]
    reach, most = target([{"points": points} for points in first]), settings.iterations
    return {
        "reach": reach,
        "iterations": [iterations_to(points, reach, most=most) for points in curves],
        "between": [crossing(points, reach, most=most) for points in curves],
        "never": sum(min(loss for _, loss in points) > reach for points in curves),
    }


def summary(log: RecordLog, settings: Settings, tasks: Sequence[str]) -> dict[str, Any]:
    records = list(log)
    of = {task: [one for one in records if one["task"] == task] for task in tasks}
    found = {task: task_summary(some, most=settings.iterations) for task, some in of.items()}
    spreads = {task: spread_of(some, settings) for task, some in of.items()}
    return {
        "machine": machine(), "settings": msgspec.to_builtins(settings),
        "tasks": {task: one for task, one in found.items() if one is not None},
        "spread": {task: one for task, one in spreads.items() if one is not None},
        "spent_s": math.fsum(one["spent_s"] for one in records),
    }  # fmt: skip


def run(tasks: Sequence[str] = (), quick: bool = False, report: bool = False, folder: str = "") -> dict[str, Any]:
    """Run tasks. `quick`: use a tiny random model and a task of letters; `report`: only report the records; `folder`:
    folder of the records, by default in the state folder.
    """
    place = Path(folder) if folder else state_folder() / "prompt-quality-benchmark"
    settings = QUICK if quick else Settings()
    settings = msgspec.structs.replace(settings, model="tiny" if quick else Path(default_model()).name)
    place.mkdir(parents=True, exist_ok=True)
    tasks = tasks or (["letters"] if quick else CHOSEN)
    with RecordLog(place / f"curves-{settings.digest}.jsonl", key=("task", "part", "prompt")) as log:
        if not report:
            run_tasks(log, tasks, settings, place / f"bank-{settings.digest}", quick=quick)
        return summary(log, settings, tasks)


def run_tasks(log: RecordLog, tasks: Sequence[str], settings: Settings, bank_folder: Path, *, quick: bool) -> None:
    import torch

    torch.set_num_threads(1)
    ambient.enter_library(device="cuda:0" if torch.cuda.is_available() and not quick else "cpu")
    try:
        if quick:
            model, candidates = toy()
        else:
            model = load_causal_lm(default_model(), dtype="float32", engine="transformers")
            candidates = read_candidates(PROMPTS)
        bank = ensure_bank(
            bank_folder, candidates, model=settings.model, read=build.reader(model), k=8 if quick else CLUSTERS,
            capacity=len(candidates), progress=lambda done, of: tell(f"features: {done:,} of {of:,}"),
        )  # fmt: skip
        benches = [
            Bench(model, bank.layers, settings, log, task=task, pairs=letters() if quick else TASKS[task]())
            for task in tasks
        ]
        for bench in benches:
            bench.compare()
        for bench in benches:
            bench.compare_induced()
        for bench in benches:
            if quick or bench.task == SPREAD_TASK:
                bench.spread(4 if quick else SPREAD)
    finally:
        ambient.leave_library()


def letters() -> Pairs:
    return [(f"{'ab'[number % 2] * (1 + number % 7)} {number} ", ("no", "yes")[number % 2]) for number in range(60)]


def toy() -> tuple[CausalLM, list[Candidate]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.gpu.model import tokenizer
    from stoker.contexts.language_model import CausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    model, letters_only = LlamaForCausalLM(config), tokenizer(256)
    letters_only.add_special_tokens({"eos_token": "<end>"})
    words = ("say", "write", "guess", "tell", "answer", "yes", "no", "the letter", "a word", "it")
    texts = [" ".join(some) for some in itertools.permutations(words, 2)]
    context = CausalLM(model.eval().requires_grad_(False), letters_only, name="tiny")
    return context, [Candidate(text=text) for text in texts]


def tell(said: object) -> None:
    print(said if isinstance(said, str) else json.dumps(said), file=sys.stderr, flush=True)
