"""One run, from options to report: read, open the folder, infer what is missing, write the final file, report."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import stoker
from stoker.apps.common.calls import (
    Stopped,
    columns,
    command,
    count,
    in_batches,
    run_calls,
    say_kept,
    session_line,
    show_minutes,
    stop_on_signals,
)
from stoker.apps.fact_verification import APP, report
from stoker.apps.fact_verification.claims import Claim, PromptTemplate, read_claims, sample_claims
from stoker.apps.fact_verification.functions import Question, Scores, language_model, verify
from stoker.apps.fact_verification.options import VerificationOptions, choose_prompts, parameters, resolve
from stoker.apps.fact_verification.results import KEY, figures, make_records, make_rows, write_results, write_timeline
from stoker.config import load_site
from stoker.console import Screen
from stoker.contexts import Awareness, Recipe, default_model, model_recipe
from stoker.errors import StokerError
from stoker.run_folder import RecordLog, open_run, read_options
from stoker.sessions import ContextFacts, facts_of

INTERRUPTED = 130


class VerificationCall(msgspec.Struct, frozen=True):
    """One call to be made: these claims with this template."""

    prompt: PromptTemplate
    claims: tuple[Claim, ...]


def run(
    given: dict[str, Any], *, resume: Path | None, out: Path | None, fresh: bool, screen: Screen, json: bool
) -> int:
    """Does the run and reports it. 0, or 130 after Ctrl-C (the results so far are kept).

    Raises StokerError for input that cannot be used, and for a call that failed (the results so far are kept then too).
    """
    options = resolve(read_options(resume, app=APP) if resume else None, given)
    everything = read_claims(options.claims_path)
    claims = sample_claims(everything, limit=options.limit or None, seed=options.seed)
    prompts = choose_prompts(options, claims)
    recipe, model = make_recipe(options)
    load_site(options.site or None)  # a wrong site file is said before there is a run folder
    folder = open_run(
        Path("runs"),
        app=APP,
        prefix="fact",
        parameters=parameters(options, model=model, prompts=prompts, claims=claims),
        options=msgspec.to_builtins(options),
        folder=resume or out,
        fresh=fresh,
    )
    total = len(prompts) * len(claims)
    with contextlib.closing(folder), folder.log(key=KEY) as log, stop_on_signals():
        try:
            for line in _headline(options, prompts=len(prompts), claims=len(claims)):
                screen.line(line)
            if len(log):
                screen.line(f"  going on with {folder.path}: {len(log)} of {total} are there")
            attempt = _infer(options, recipe, prompts, claims, log=log, screen=screen)
            rows = make_rows(prompts, claims, log, calibrate=options.calibrate)
            summary = report.summary(rows, attempt, prompts=prompts, calibrated=options.calibrate)
            timeline = folder.write("timeline.json", lambda path: write_timeline(rows, path))
            folder.write_json("summary.json", summary)
            name = f"results.{options.format}"
            results = folder.finish(name=name, write=lambda path: write_results(rows, path, kind=options.format))
        except Stopped:
            say_kept(screen, folder=folder.path, kept=len(log), total=total, app=APP, through_make=True)
            return INTERRUPTED
        except BaseException:
            if len(log):
                say_kept(
                    screen, folder=folder.path, kept=len(log), total=total, app=APP, failed=True, through_make=True
                )
            raise
    if json:
        screen.json({**summary, "run": str(folder.path), "results": str(results), "timeline": str(timeline)})
        return 0
    made, demo = figures(rows), not options.model and not options.claims
    for block in (
        report.results_table(made),
        report.confusion_tables(made),
        [f"  {line}" for line in report.verdict(rows, made, calibrated=options.calibrate, demo=demo)],
        [*(f"  {line}" for line in report.cost_lines(attempt)), f"  results  {results}    timeline  {timeline}"],
        _next_steps(options, attempt, everything=len(everything), prompts=len(prompts)),
    ):
        screen.line()
        for line in block:
            screen.line(line, style="bold" if line.endswith("   best") else "")
    return 0


def _command(arguments: str) -> str:
    return command(APP, arguments, through_make=True)


def _headline(options: VerificationOptions, *, prompts: int, claims: int) -> list[str]:
    model = Path(options.model or default_model()).name.removesuffix(".gguf")
    level = "" if options.awareness is Awareness.FULL else f" · awareness {options.awareness.value}"
    sizes = f"{count(prompts, 'prompt')} x {count(claims, 'claim')} = {prompts * claims:,} inferences"
    return [f"fact verification · {model} · {sizes}{level}"]


def make_recipe(options: VerificationOptions) -> tuple[Recipe, str]:
    """The model's recipe at this level of awareness; and what identifies the model, its content or its hub name."""
    path = options.model or default_model()
    # Below full, each call has a process of its own that loads for itself: the paper's context-agnostic and
    # partial-context versions.
    recipe = model_recipe(
        language_model,
        path,
        snapshot=options.snapshot,
        awareness=options.awareness,
        calls_per_library=0 if options.awareness is Awareness.FULL else 1,
    )
    return recipe, ", ".join(part.name for part in recipe.objects) or path


def plan(
    prompts: Sequence[PromptTemplate], claims: Sequence[Claim], log: RecordLog, *, batch_size: int
) -> list[VerificationCall]:
    """The calls that are still to be made, prompt by prompt: a library keeps what a prompt's claims share."""
    calls: list[VerificationCall] = []
    for prompt in prompts:
        left = [claim for claim in claims if (prompt.digest, claim.id) not in log]
        calls.extend(VerificationCall(prompt=prompt, claims=batch) for batch in in_batches(left, batch_size))
    return calls


def _infer(
    options: VerificationOptions,
    recipe: Recipe,
    prompts: Sequence[PromptTemplate],
    claims: Sequence[Claim],
    *,
    log: RecordLog,
    screen: Screen,
) -> report.Attempt:
    """Makes the missing results. What it brings back says what that took."""
    calls = plan(prompts, claims, log, batch_size=options.batch_size)
    kept, infer_s, origin, begun = len(log), 0.0, "", time.perf_counter()
    facts = ContextFacts()
    if calls:
        with stoker.load(options.site or None, progress=False) as session:
            screen.line(session_line(session))
            ask = facts_of(session, {recipe.key})
            questions = (
                Question(
                    number=number,
                    prefix=call.prompt.prefix,
                    texts=tuple(call.prompt.fill(claim) for claim in call.claims),
                    words=call.prompt.answers,
                    tensor_batch=options.tensor_batch,
                )
                for number, call in enumerate(calls)
            )
            scored = verify.with_options(context=recipe)
            total = len(prompts) * len(claims)
            with screen.progress(total=total, done=kept, noun="claims", facts=ask) as progress:
                scores: Scores
                try:
                    for scores in run_calls([(scored, questions)]):
                        call = calls[scores.number]
                        progress.advance(log.append(make_records(call.prompt, call.claims, scores)))
                        infer_s += scores.infer_s
                        origin = scores.origin
                except StokerError as error:
                    raise explain(error, calls, file=options.claims_path) from error
            facts = ask()
    return report.Attempt(
        wall_s=time.perf_counter() - begun,
        made=len(log) - kept,
        kept=kept,
        calls=len(calls),
        infer_s=infer_s,
        facts=facts,
        origin=origin,
    )


def explain(error: StokerError, calls: Sequence[VerificationCall], *, file: Path) -> StokerError:
    """The error with the claims that it is about, when it came out of a call; else as it is."""
    number = error.facts.get("question")
    if number is None:
        return error
    call = calls[number]
    first, last = call.claims[0], call.claims[-1]
    which = f"claim {first.id}" if first is last else f"claims {first.id} to {last.id} ({len(call.claims)})"
    return StokerError(
        f"{file}: {first.place}: {which} with the template {call.prompt.name}: {error}", file=str(file), key="claim"
    )


def _given(options: VerificationOptions) -> str:
    """The files that this run was about, for a command that is to be about them too."""
    files = {"model": options.model, "claims": options.claims, "prompts": options.prompts, "site": options.site}
    here = f"{Path.cwd()}/"
    return "".join(f"--{name} {shlex.quote(file.removeprefix(here))} " for name, file in files.items() if file)


def _next_steps(options: VerificationOptions, attempt: report.Attempt, *, everything: int, prompts: int) -> list[str]:
    same = _given(options)
    steps = []
    if options.limit and options.limit < everything:
        about = ""
        if attempt.made:
            each_s = attempt.infer_s / attempt.made / max(1, attempt.facts.devices)
            about = f" (about {show_minutes(attempt.facts.load_s + everything * prompts * each_s)} here)"
        which = "every shipped claim" if not options.claims else f"all {everything:,} claims of the file"
        steps.append((_command(f"{same}--all"), which + about))
    if not options.model or not options.claims:
        steps.append((_command("--model PATH --claims FILE"), "your model, your claims"))
    if not options.prompts:
        steps.append((_command(f"{same}--prompts FILE"), "your templates; see --help"))
    if options.awareness is Awareness.FULL and attempt.made and not options.claims:
        steps.append((_command(f"{same}--awareness none --limit 32"), "the same without contexts"))
    return columns(steps)
