"""Run one batch. Each request is one call; the engine of a model batches concurrent calls.

If a gateway started the batch, the limits of the user's API key apply: each call needs a permit from the gateway
(`PermitFile`).
"""

from __future__ import annotations

import hashlib
import queue
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.batch_inference import APP
from stoker.apps.batch_inference.functions import BatchAnswer, answer, embed
from stoker.apps.batch_inference.options import EXAMPLE, BatchOptions, ModelPaths, read_models
from stoker.apps.batch_inference.request_file import CheckedFile, check_file, read_requests
from stoker.apps.batch_inference.results import (
    KEY,
    BatchTotals,
    Failures,
    count_totals,
    make_call_failed_error,
    make_error_lines,
    make_log_record,
    write_responses,
)
from stoker.apps.common.batch_state import BatchUse, PermitFile, write_lines
from stoker.apps.common.calls import FailedCall, Job, run_calls
from stoker.apps.common.command_line import RunChoice, align_next_steps, format_count
from stoker.apps.common.models_file import apply_parser_settings, model_digest_or_name
from stoker.apps.common.openai_requests import ApiError, ApiRequest, Endpoint
from stoker.apps.common.runner import ApplicationOutcome, OpenRun, RunAttempt, RunSpec, execute_run
from stoker.console import Screen
from stoker.contexts import EngineSettings, Recipe, default_model
from stoker.errors import CallCancelledError, CallError, ConfigError, ContextError, SerializationError, StokerError
from stoker.sessions import StokerApp

RESPONSES, ERRORS = "responses.jsonl", "errors.jsonl"
_SHOWN_ERRORS = 5
Recipes = Mapping[tuple[Endpoint, str], Recipe]


def check_batch(options: BatchOptions, *, json: bool) -> int:
    """Check the request file without running calls. Return 1 if requests are refused, else 0."""
    screen = Screen(json_only=json)
    checked, _ = _check_file_and_models(options)
    for line in _format_headline(checked):
        screen.line(line)
    for one in checked.refused:
        screen.line(f"  {one.error.message}")
    if json:
        refused = [{"line": one.line, "custom_id": one.custom_id, **one.error.body} for one in checked.refused]
        screen.json({"requests": checked.line_count, "models": checked.model_counts, "refused": refused})
    return 1 if checked.refused else 0


def run_batch(options: BatchOptions, *, json: bool) -> int:
    """Run the batch. Return the exit status: 0, 1 if a request has no answer, 130 after Ctrl-C. Raises StokerError."""
    checked, models = _check_file_and_models(options)
    recipes = {(endpoint, name): models.make_recipe(name, endpoint) for endpoint, name in checked.counts}
    identities = {
        f"{name} for {endpoint.value}": _describe_model_identity(models, name, recipe)
        for (endpoint, name), recipe in recipes.items()
    }
    unasked = [
        f"  note  no request asks for the model {name}" for name in models.named if name not in checked.model_counts
    ]
    spec = RunSpec(
        app=APP, prefix="batch", options=options, key=KEY, total=len(checked.custom_ids), noun="answer",
        parameters={
            "requests": checked.digest, "models": identities, "max_tokens": options.max_tokens,
            "engine": options.engine,
        },
        site=options.site, session=options.session, headline=[*_format_headline(checked), *unasked],
        again=options.format_command(),
    )  # fmt: skip

    def complete_run(work: OpenRun) -> ApplicationOutcome:
        failed = _run_missing_calls(work, options, checked, models=models, recipes=recipes)
        return _write_results(work, options, checked, failed)

    return execute_run(
        spec, complete_run, RunChoice(Path(options.out) if options.out else None, fresh=options.fresh, json=json)
    )


def _run_missing_calls(
    work: OpenRun, options: BatchOptions, checked: CheckedFile, *, models: ModelPaths, recipes: Recipes
) -> Failures:
    failed: Failures = {}
    if len(work.log) == len(checked.custom_ids):
        return failed
    each = {recipe.key: recipe for recipe in recipes.values()}  # two model names may share a recipe
    sent: list[list[str]] = [[] for _ in each]  # the `custom_id` of each sent request, by job

    def make_missing_requests(names: Collection[tuple[Endpoint, str]], ids: list[str]) -> Iterator[ApiRequest]:
        for request in read_requests(checked, max_tokens=options.max_tokens):
            if (request.endpoint, request.model) in names and (request.custom_id,) not in work.log:
                ids.append(request.custom_id)
                yield apply_parser_settings(request, models.settings.get(request.model))

    jobs: list[Job] = []
    for recipe, ids in zip(each.values(), sent, strict=True):
        names = {name for name, one in recipes.items() if one.key == recipe.key}
        embeds = any(endpoint is Endpoint.EMBEDDINGS for endpoint, _ in names)
        jobs.append(((embed if embeds else answer).with_options(context=recipe), make_missing_requests(names, ids)))

    def store_answer(found: BatchAnswer | FailedCall) -> int:
        if isinstance(found, FailedCall):
            if found.item < 0:
                raise found.error
            custom_id = sent[found.job][found.item]
            failed[custom_id] = convert_error_unless_fatal(found.error, line=checked.custom_ids[custom_id])
            return 1
        work.log.append([make_log_record(found, digest=checked.digest)])
        work.attempt.infer_s += found.infer_s
        work.attempt.tokens += found.embedding_token_count + sum(choice.completion_tokens for choice in found.choices)
        return 1

    def run_calls_of_jobs(jobs: Sequence[Job]) -> Iterator[BatchAnswer | FailedCall]:
        permits = options.permits
        return run_with_permits(jobs, BatchPermits(Path(permits))) if permits else run_calls(jobs, keep_errors=True)

    work.run_jobs(jobs, contexts=each, take=store_answer, noun="requests", also="tokens", results=run_calls_of_jobs)
    return failed


def _write_results(work: OpenRun, options: BatchOptions, checked: CheckedFile, failed: Failures) -> ApplicationOutcome:
    log, folder = work.log, work.folder
    totals = count_totals(log)
    summary = _make_summary(checked, totals, work.attempt, failed)
    lines = make_error_lines(checked, log, totals, failed)
    errors = folder.write(ERRORS, lambda path: write_lines(path, lines))
    folder.write_json("summary.json", summary)
    responses = folder.finish(
        name=RESPONSES, write=lambda path: write_responses(path, checked, log, totals), complete=not failed
    )
    report = _format_report(options, summary, work.attempt, lines[:_SHOWN_ERRORS], responses=responses, errors=errors)
    return ApplicationOutcome(
        summary=summary, files={"responses": responses, "errors_file": errors}, report=report,
        errors=summary["errors"],
    )  # fmt: skip


def _make_summary(checked: CheckedFile, totals: BatchTotals, attempt: RunAttempt, failed: Failures) -> dict[str, Any]:
    refused = len(checked.refused) + len(totals.refused)
    return {
        "requests": checked.line_count, "answered": totals.answered, "errors": refused + len(failed),
        "refused": refused,
        "failed": len(failed), "prompt_tokens": totals.prompt_tokens, "completion_tokens": totals.completion_tokens,
        "total_tokens": totals.prompt_tokens + totals.completion_tokens, "models": checked.model_counts,
        "attempt": {
            "requests": attempt.made, "failed": len(failed), "tokens": attempt.tokens,
            "tokens_per_s": attempt.tokens / attempt.wall_s if attempt.wall_s else 0.0, **attempt.summary_fields,
        },
    }  # fmt: skip


def _format_report(
    options: BatchOptions, summary: dict[str, Any], attempt: RunAttempt, shown: Sequence[dict[str, Any]], *,
    responses: Path, errors: Path,
) -> Iterator[str]:  # fmt: skip
    yield ""
    yield (
        f"  {format_count(summary['answered'], 'answer')}: {summary['prompt_tokens']:,} tokens read,"
        f" {summary['completion_tokens']:,} written"
    )
    if attempt.made:
        yield attempt.format_throughput_line("request")
    yield f"  {responses}  {summary['answered']:,}    {errors}  {summary['errors']:,}"
    if shown:
        yield ""
        all_requests = format_count(summary["requests"], "request")
        yield f"no answer: {summary['errors']:,} of {all_requests}; {errors} has the reasons:"
        yield from (f"  {line['response']['body']['error']['message']}" for line in shown)
        if summary["errors"] > len(shown):
            yield "  …"
    if summary["failed"]:
        yield f"  retry the {summary['failed']:,} failed calls:  {options.format_command()}"
    if not options.file:
        yield ""
        yield from align_next_steps(
            [("stoker batch FILE --model PATH", f"answer your own requests; the example is {EXAMPLE}")]
        )


def _check_file_and_models(options: BatchOptions) -> tuple[CheckedFile, ModelPaths]:
    models = read_models(options.models, file=options.models_file, engine=options.engine)
    if not models.named and not models.every:
        if options.file:
            how = "--model PATH for all requests, --model NAME=PATH for the requests that name NAME"
            raise ConfigError(f"{options.file}: name a model: {how}", key="model")
        models = msgspec.structs.replace(models, every=default_model())
    return check_file(options.file_path, admit=models.check_model, max_tokens=options.max_tokens), models


def _describe_model_identity(models: ModelPaths, name: str, recipe: Recipe) -> str:
    files = model_digest_or_name(recipe, models.path_for_name(name))
    said = models.settings.get(name)
    named = (said.engine, said.dtype, said.tool_parser, said.reasoning_parser) if said is not None else ()
    how = [each for each in named if each != "auto"]
    if said is not None and said.engine_settings != EngineSettings():
        how.append(hashlib.sha256(msgspec.json.encode(said.engine_settings)).hexdigest()[:12])
    return " ".join([files, *how])


def _format_headline(checked: CheckedFile) -> list[str]:
    kinds = ", ".join(f"{number:,} of {endpoint.value}" for endpoint, number in checked.endpoint_counts.items())
    lines = [
        f"batch · {checked.path.name} · {format_count(checked.line_count, 'request')}"
        + (f" · {kinds}" if kinds else "")
    ]
    if checked.refused:
        lines.append(f"  {format_count(len(checked.refused), 'line')} cannot be answered; the other lines run")
    if checked.ignored:
        lines.append(f"  note  fields that do not change answers are ignored: {', '.join(checked.ignored)}")
    return lines


def convert_error_unless_fatal(error: Exception, *, line: int) -> ApiError:
    """Return the API error of a failed call, or raise `error` if it must stop the run."""
    own = isinstance(error, CallError | SerializationError) or not isinstance(error, StokerError)
    if not own or isinstance(error, ContextError | CallCancelledError):
        raise error
    return make_call_failed_error(error, line=line)


_LOOK_S = 0.1


class BatchPermits:
    def __init__(self, path: Path) -> None:
        self._file = PermitFile(path)
        self._looked_at = float("-inf")
        self._allowed = self._begun_calls = 0
        self._use = BatchUse()

    def take_permit(self) -> bool:
        now = time.monotonic()
        if self._begun_calls >= self._allowed and now >= self._looked_at + _LOOK_S:
            self._looked_at = now
            self._allowed = self._file.read_permits(default=self._allowed)
        if self._begun_calls >= self._allowed:
            return False
        self._begun_calls += 1
        return True

    def count_ended_call(self, tokens: int) -> None:
        self._use = BatchUse(self._use.ended + 1, self._use.tokens + tokens)
        self._file.write_batch_use(self._use)


def run_with_permits(jobs: Sequence[Job], permits: BatchPermits) -> Iterator[BatchAnswer | FailedCall]:
    """Run the calls of all jobs in order, like `run_calls` with `keep_errors`. Each call waits for a permit."""
    done: queue.SimpleQueue[tuple[int, int, Future[BatchAnswer]]] = queue.SimpleQueue()
    left = ((job, item, app, each) for job, (app, items) in enumerate(jobs) for item, each in enumerate(items))
    following, running = next(left, None), 0
    while following is not None or running:
        while following is not None and permits.take_permit():
            _start_call(*following, done)
            following, running = next(left, None), running + 1
        try:
            job, item, future = done.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        running -= 1
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        found = future.result() if error is None else FailedCall(job, item, error)
        permits.count_ended_call(found.token_count if isinstance(found, BatchAnswer) else 0)
        yield found


def _start_call(
    job: int, item: int, app: StokerApp, request: Any, done: queue.SimpleQueue[tuple[int, int, Future[BatchAnswer]]]
) -> None:
    future: Future[BatchAnswer] = app(request)
    future.add_done_callback(lambda ended: done.put((job, item, ended)))
