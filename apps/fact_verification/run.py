"""Run fact verification: read the input files, compute missing scores, write the results file, and print a report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stoker import causal_lm
from stoker.apps.common.calls import Job, run_calls, split_into_batches
from stoker.apps.common.command_line import RunChoice, columns, command, count, format_estimated_wait, resolve
from stoker.apps.common.models_file import model_digest_or_name
from stoker.apps.common.runner import Attempt, OpenRun, Outcome, RunSpec, execute
from stoker.apps.fact_verification import APP
from stoker.apps.fact_verification.functions import Question, Scores, verify
from stoker.apps.fact_verification.options import (
    Claim,
    PromptTemplate,
    VerificationOptions,
    choose_prompts,
    parameters,
    read_claims,
    sample_claims,
)
from stoker.apps.fact_verification.results import (
    KEY,
    confusion_tables,
    cost_lines,
    figures,
    make_records,
    make_rows,
    results_table,
    summarize,
    verdict,
    write_results,
    write_timeline,
)
from stoker.contexts import Awareness, Recipe, default_model
from stoker.errors import StokerError
from stoker.run_folder import RecordLog

VerificationCall = tuple[PromptTemplate, tuple[Claim, ...]]


def run(given: dict[str, Any], choice: RunChoice) -> int:
    """Return the exit status: 0, or 130 after Ctrl-C. Raises StokerError. Results so far are kept."""
    options = resolve(VerificationOptions, given, app=APP, resume=choice.resume, files=("claims", "prompts"))
    everything = read_claims(options.claims_path)
    claims = sample_claims(everything, limit=options.limit or None, seed=options.seed)
    prompts = choose_prompts(options, claims)
    recipe, model = make_recipe(options)
    model_name = Path(options.model or default_model()).name.removesuffix(".gguf")
    level = "" if options.awareness is Awareness.FULL else f" · awareness {options.awareness.value}"
    total = len(prompts) * len(claims)
    sizes = f"{count(len(prompts), 'prompt')} x {count(len(claims), 'claim')} = {total:,} inferences"
    spec = RunSpec(
        app=APP, prefix="fact", parameters=parameters(options, model=model, prompts=prompts, claims=claims),
        options=options, key=KEY, total=total, site=options.site, through_make=True,
        headline=[f"fact verification · {model_name} · {sizes}{level}"],
    )  # fmt: skip

    def make(work: OpenRun) -> Outcome:
        _infer(work, options, recipe, prompts, claims)
        return _results(work, options, prompts, claims, everything=len(everything))

    return execute(spec, make, choice)


def _results(
    work: OpenRun, options: VerificationOptions, prompts: Sequence[PromptTemplate], claims: Sequence[Claim], *,
    everything: int,
) -> Outcome:  # fmt: skip
    attempt, folder = work.attempt, work.folder
    rows = make_rows(prompts, claims, work.log, calibrate=options.calibrate)
    summary = summarize(rows, attempt, prompts=prompts, calibrated=options.calibrate)
    timeline = folder.write("timeline.json", lambda path: write_timeline(rows, path))
    folder.write_json("summary.json", summary)
    name = f"results.{options.format}"
    results = folder.finish(name=name, write=lambda path: write_results(rows, path, kind=options.format))
    made, demo = figures(rows), not options.model and not options.claims
    blocks = (
        results_table(made),
        confusion_tables(made),
        [f"  {line}" for line in verdict(rows, made, calibrated=options.calibrate, demo=demo)],
        [*(f"  {line}" for line in cost_lines(attempt)), f"  results  {results}    timeline  {timeline}"],
        _next_steps(options, attempt, everything=everything, prompts=len(prompts)),
    )
    return Outcome(
        summary=summary, files={"results": results, "timeline": timeline}, bold="   best",
        report=[line for block in blocks for line in ("", *block)],
    )  # fmt: skip


def _command(arguments: str) -> str:
    return command(APP, arguments, through_make=True)


def make_recipe(options: VerificationOptions) -> tuple[Recipe, str]:
    """Return the model's recipe at the chosen level of awareness, and the model's identity."""
    path = options.model or default_model()
    # With an awareness below `full`, each call loads the model, as in the paper's context-agnostic and partial-context
    # versions.
    recipe = causal_lm(
        path, snapshot=options.snapshot, awareness=options.awareness, slots=1,
        calls_per_library=0 if options.awareness is Awareness.FULL else 1,
    )  # fmt: skip
    return recipe, model_digest_or_name(recipe, path)


def plan(
    prompts: Sequence[PromptTemplate], claims: Sequence[Claim], log: RecordLog, *, batch_size: int
) -> list[VerificationCall]:
    """Return the missing calls, grouped by prompt, because a library caches the text of a prompt."""
    calls: list[VerificationCall] = []
    for prompt in prompts:
        left = [claim for claim in claims if (prompt.digest, claim.id) not in log]
        calls.extend((prompt, batch) for batch in split_into_batches(left, batch_size))
    return calls


def _infer(
    work: OpenRun, options: VerificationOptions, recipe: Recipe, prompts: Sequence[PromptTemplate],
    claims: Sequence[Claim],
) -> None:  # fmt: skip
    calls = plan(prompts, claims, work.log, batch_size=options.batch_size)
    questions = (
        Question(
            number=number, prefix=prompt.prefix, texts=tuple(map(prompt.fill, batch)), words=prompt.words,
            tensor_batch=options.tensor_batch,
        )
        for number, (prompt, batch) in enumerate(calls)
    )  # fmt: skip

    def take(scores: Scores) -> int:
        work.attempt.infer_s += scores.infer_s
        work.attempt.origin = scores.origin
        return work.log.append(make_records(*calls[scores.number], scores))

    def explained(jobs: Sequence[Job]) -> Iterator[Scores]:
        try:
            yield from run_calls(jobs)
        except StokerError as error:
            raise explain(error, calls, file=options.claims_path) from error

    jobs = [(verify.with_options(context=recipe), questions)] if calls else []
    work.infer(jobs, contexts={"": recipe}, take=take, noun="claims", results=explained)


def explain(error: StokerError, calls: Sequence[VerificationCall], *, file: Path) -> StokerError:
    """Return an error that names the claims of the failed call. Other errors are returned unchanged."""
    number = error.facts.get("question")
    if number is None:
        return error
    prompt, claims = calls[number]
    first, last = claims[0], claims[-1]
    which = f"claim {first.id}" if first is last else f"claims {first.id} to {last.id} ({len(claims)})"
    problem = f"{first.place}: {which} with the template {prompt.name}: {error}"
    return StokerError.in_file(file, problem, key="claim")


def _next_steps(options: VerificationOptions, attempt: Attempt, *, everything: int, prompts: int) -> list[str]:
    files = {"model": options.model, "claims": options.claims, "prompts": options.prompts, "site": options.site}
    here = f"{Path.cwd()}/"
    same = "".join(f"--{name} {shlex.quote(file.removeprefix(here))} " for name, file in files.items() if file)
    steps = []
    if options.limit and options.limit < everything:
        about = ""
        if attempt.made:
            each_s = attempt.infer_s / attempt.made / max(1, attempt.facts.devices)
            about = f" (about {format_estimated_wait(attempt.facts.load_s + everything * prompts * each_s)} here)"
        which = "every shipped claim" if not options.claims else f"all {everything:,} claims of the file"
        steps.append((_command(f"{same}--all"), which + about))
    if not options.model or not options.claims:
        steps.append((_command("--model PATH --claims FILE"), "your model, your claims"))
    if not options.prompts:
        steps.append((_command(f"{same}--prompts FILE"), "your templates; see --help"))
    if options.awareness is Awareness.FULL and attempt.made and not options.claims:
        steps.append((_command(f"{same}--awareness none --limit 32"), "the same without contexts"))
    return columns(steps)
