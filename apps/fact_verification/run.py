"""Run fact verification: read the input files, compute missing scores, write the results file, and print a report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stoker import causal_lm
from stoker.apps.common.calls import Job, run_calls, split_into_batches
from stoker.apps.common.command_line import (
    RunChoice,
    align_next_steps,
    format_command,
    format_count,
    format_estimated_wait,
    resolve_options,
)
from stoker.apps.common.models_file import model_digest_or_name
from stoker.apps.common.runner import ApplicationOutcome, OpenRun, RunAttempt, RunSpec, execute_run
from stoker.apps.fact_verification import APP
from stoker.apps.fact_verification.functions import Question, Scores, verify
from stoker.apps.fact_verification.options import (
    Claim,
    PromptTemplate,
    VerificationOptions,
    choose_prompts,
    draw_claims,
    read_claims,
    run_identity,
)
from stoker.apps.fact_verification.results import (
    KEY,
    compute_prompt_figures,
    format_confusion_tables,
    format_cost,
    format_results_table,
    format_verdict,
    make_log_records,
    make_result_rows,
    make_summary,
    write_results,
    write_timeline,
)
from stoker.contexts import Awareness, Recipe, default_model
from stoker.errors import StokerError
from stoker.run_folder import RecordLog

VerificationCall = tuple[PromptTemplate, tuple[Claim, ...]]


def run_verification(given_options: dict[str, Any], choice: RunChoice) -> int:
    """Check the claims. Return the exit status: 0, or 130 after Ctrl-C. Raises StokerError. Results so far are kept."""
    options = resolve_options(
        VerificationOptions, given_options, app=APP, resume=choice.resume, files=("claims", "prompts")
    )
    everything = read_claims(options.claims_path)
    claims = draw_claims(everything, limit=options.limit or None, seed=options.seed)
    prompts = choose_prompts(options, claims)
    recipe, model = make_recipe(options)
    model_name = Path(options.model or default_model()).name.removesuffix(".gguf")
    level = "" if options.awareness is Awareness.FULL else f" · awareness {options.awareness.value}"
    total = len(prompts) * len(claims)
    sizes = f"{format_count(len(prompts), 'prompt')} x {format_count(len(claims), 'claim')} = {total:,} inferences"
    spec = RunSpec(
        app=APP, prefix="fact", parameters=run_identity(options, model=model, prompts=prompts, claims=claims),
        options=options, key=KEY, total=total, site=options.site, through_make=True,
        headline=[f"fact verification · {model_name} · {sizes}{level}"],
    )  # fmt: skip

    def complete_run(work: OpenRun) -> ApplicationOutcome:
        _run_missing_calls(work, options, recipe, prompts, claims)
        return _write_results(work, options, prompts, claims, everything=len(everything))

    return execute_run(spec, complete_run, choice)


def _write_results(
    work: OpenRun, options: VerificationOptions, prompts: Sequence[PromptTemplate], claims: Sequence[Claim], *,
    everything: int,
) -> ApplicationOutcome:  # fmt: skip
    attempt, folder = work.attempt, work.folder
    rows = make_result_rows(prompts, claims, work.log, calibrate=options.calibrate)
    summary = make_summary(rows, attempt, prompts=prompts, calibrated=options.calibrate)
    timeline = folder.write("timeline.json", lambda path: write_timeline(rows, path))
    folder.write_json("summary.json", summary)
    name = f"results.{options.format}"
    results = folder.finish(name=name, write=lambda path: write_results(rows, path, kind=options.format))
    made, demo = compute_prompt_figures(rows), not options.model and not options.claims
    blocks = (
        format_results_table(made),
        format_confusion_tables(made),
        [f"  {line}" for line in format_verdict(rows, made, calibrated=options.calibrate, demo=demo)],
        [*(f"  {line}" for line in format_cost(attempt)), f"  results  {results}    timeline  {timeline}"],
        _suggest_next_commands(options, attempt, everything=everything, prompts=len(prompts)),
    )
    return ApplicationOutcome(
        summary=summary, files={"results": results, "timeline": timeline}, bold="   best",
        report=[line for block in blocks for line in ("", *block)],
    )  # fmt: skip


def _format_command(arguments: str) -> str:
    return format_command(APP, arguments, through_make=True)


def make_recipe(options: VerificationOptions) -> tuple[Recipe, str]:
    """Return the model's recipe with the chosen level of context awareness, and the model's identity."""
    path = options.model or default_model()
    # With an awareness below `full`, each call loads the model, as in the paper's context-agnostic and partial-context
    # versions.
    recipe = causal_lm(
        path, snapshot=options.snapshot, awareness=options.awareness, slots=1,
        calls_per_library=0 if options.awareness is Awareness.FULL else 1,
    )  # fmt: skip
    return recipe, model_digest_or_name(recipe, path)


def plan_missing_calls(
    prompts: Sequence[PromptTemplate], claims: Sequence[Claim], log: RecordLog, *, batch_size: int
) -> list[VerificationCall]:
    """Return the missing calls, grouped by prompt, because a library caches the text of a prompt."""
    calls: list[VerificationCall] = []
    for prompt in prompts:
        left = [claim for claim in claims if (prompt.digest, claim.id) not in log]
        calls.extend((prompt, batch) for batch in split_into_batches(left, batch_size))
    return calls


def _run_missing_calls(
    work: OpenRun, options: VerificationOptions, recipe: Recipe, prompts: Sequence[PromptTemplate],
    claims: Sequence[Claim],
) -> None:  # fmt: skip
    calls = plan_missing_calls(prompts, claims, work.log, batch_size=options.batch_size)
    questions = (
        Question(
            number=number, prefix=prompt.prefix, texts=tuple(map(prompt.fill, batch)), words=prompt.words,
            tensor_batch=options.tensor_batch,
        )
        for number, (prompt, batch) in enumerate(calls)
    )  # fmt: skip

    def store_scores(scores: Scores) -> int:
        work.attempt.infer_s += scores.infer_s
        work.attempt.origin = scores.origin
        return work.log.append(make_log_records(*calls[scores.number], scores))

    def run_and_name_failed_claims(jobs: Sequence[Job]) -> Iterator[Scores]:
        try:
            yield from run_calls(jobs)
        except StokerError as error:
            raise name_failed_claims(error, calls, file=options.claims_path) from error

    jobs = [(verify.with_options(context=recipe), questions)] if calls else []
    work.run_jobs(jobs, contexts={"": recipe}, take=store_scores, noun="claims", results=run_and_name_failed_claims)


def name_failed_claims(error: StokerError, calls: Sequence[VerificationCall], *, file: Path) -> StokerError:
    """Return an error that names the claims of the failed call. Other errors are returned unchanged."""
    number = error.facts.get("question")
    if number is None:
        return error
    prompt, claims = calls[number]
    first, last = claims[0], claims[-1]
    which = f"claim {first.id}" if first is last else f"claims {first.id} to {last.id} ({len(claims)})"
    problem = f"{first.place}: {which} with the template {prompt.name}: {error}"
    return StokerError.in_file(file, problem, key="claim")


def _suggest_next_commands(
    options: VerificationOptions, attempt: RunAttempt, *, everything: int, prompts: int
) -> list[str]:
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
        steps.append((_format_command(f"{same}--all"), which + about))
    if not options.model or not options.claims:
        steps.append((_format_command("--model PATH --claims FILE"), "your model, your claims"))
    if not options.prompts:
        steps.append((_format_command(f"{same}--prompts FILE"), "your templates; see --help"))
    if options.awareness is Awareness.FULL and attempt.made and not options.claims:
        steps.append((_format_command(f"{same}--awareness none --limit 32"), "the same without contexts"))
    return align_next_steps(steps)
