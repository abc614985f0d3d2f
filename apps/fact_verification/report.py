"""The report at the end of a run, as lines of text: only numbers that were measured in it."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.apps.common.command_line import count
from stoker.apps.common.runner import Attempt
from stoker.apps.fact_verification.claims import LABELS, PromptTemplate
from stoker.apps.fact_verification.results import PromptFigures, ResultRow, best_of, compare, figures
from stoker.units import show_seconds

SHORT = ("supports", "refutes", "not enough")


def results_table(made: Sequence[PromptFigures]) -> list[str]:
    """Accuracy with its interval, the share right of the claims with each label (recall), speed; one line a prompt."""
    wide = max(len("prompt"), *(len(one.name) for one in made))
    best = best_of(made)
    heads = "".join(f"{name:>12}" for name in SHORT)
    lines = [
        f"  {'':{wide}}   {'':22}{'right, in % of the claims that are':>{12 * len(SHORT)}}",
        f"  {'prompt':{wide}}   {'accuracy (95 %)':22}{heads}   claims/s a device",
    ]
    for one in made:
        shares = "".join(f"{'–':>12}" if share is None else f"{share * 100:12.1f}" for share in one.recalls)
        accuracy = f"{one.accuracy * 100:5.1f} %  ({one.low * 100:.1f}-{one.high * 100:.1f})"
        mark = "   best" if one is best and len(made) > 1 else ""
        lines.append(f"  {one.name:{wide}}   {accuracy:22}{shares}   {one.rate:17.1f}{mark}")
    return lines


def confusion_tables(made: Sequence[PromptFigures]) -> list[str]:
    """The matrix of each prompt: a line a true label, a column an answer, in claims."""
    lines: list[str] = []
    for one in made:
        lines.append(f"  {'answers of ' + one.name:28}" + "  ".join(f"{'said ' + name:>15}" for name in SHORT))
        for label, row in zip(LABELS, one.matrix, strict=True):
            lines.append(f"    {'is ' + label.value.lower():26}" + "  ".join(f"{count:15d}" for count in row))
    return lines


def verdict(
    rows: Sequence[ResultRow], made: Sequence[PromptFigures], *, calibrated: bool, demo: bool = False
) -> list[str]:
    """What the table does and does not show, in sentences. `demo`: the shipped model on the shipped claims."""
    best, total = best_of(made), made[0].claims
    lines = []
    others = [one for one in made if one is not best]
    if others:
        second = best_of(others)
        chance = compare(rows, best.name, second.name)
        if best.right == second.right:
            lines.append(f"best: {best.name}, but {second.name} got as many right")
        elif chance < 0.05:
            lines.append(f"best: {best.name}; ahead of {second.name} by more than chance (McNemar p = {_p(chance)})")
        else:
            lines.append(
                f"best: {best.name}, but its lead over {second.name} may be chance (McNemar p = {_p(chance)});"
                " more claims tell more"
            )
    common = max(sum(row) for row in best.matrix)
    constant = LABELS[[sum(row) for row in best.matrix].index(common)].value
    if best.low <= common / total:
        lines.append(f"not shown to be better than always saying {constant} ({common / total * 100:.1f} %)")
        if demo:
            lines.append("claims without evidence are beyond so small a model: its accuracy is a check of the plumbing")
    if calibrated:
        raw = ", ".join(f"{one.raw_right / total * 100:.1f}" for one in made)
        lines.append(f"answers are calibrated per prompt (batch calibration); uncalibrated {raw} %")
    return lines


def cost_lines(attempt: Attempt) -> list[str]:
    """Clock time, inferring against loading, what reuse saved."""
    facts = attempt.facts
    kept = f" ({attempt.kept} more were there from before)" if attempt.kept else ""
    if not attempt.made:
        return [f"nothing was left to infer{kept}"]
    hot = f", {count(facts.found_hot, 'call')} found it hot" if facts.found_hot else ""
    lines = [
        f"{attempt.made} inferences{kept} in {show_seconds(attempt.wall_s)}, {attempt.rate:.1f}/s on"
        f" {count(facts.devices, 'device')}: device time {show_seconds(attempt.infer_s)} inferring,"
        f" {show_seconds(facts.load_total_s)} loading ({count(facts.loads, 'load')}{hot})"
    ]
    if attempt.origin:
        lines.append(f"the model was loaded from: {attempt.origin}")
    if facts.loads and facts.found_hot:
        alone = facts.load_s * attempt.calls
        lines.append(
            f"had each of the {attempt.calls} calls loaded its context, the loads would have been"
            f" {show_seconds(alone)} of device time"
        )
    return lines


def summary(
    rows: Sequence[ResultRow], attempt: Attempt, *, prompts: Sequence[PromptTemplate], calibrated: bool
) -> dict[str, object]:
    """The same facts for programs (`--json`, summary.json). Seconds, shares of 1."""
    made = figures(rows)
    texts = {prompt.name: prompt for prompt in prompts}
    return {
        "inferences": len(rows),
        "calibrated": calibrated,
        "best": best_of(made).name,
        "prompts": [
            {
                "name": one.name,
                "digest": texts[one.name].digest,
                "claims": one.claims,
                "right": one.right,
                "accuracy": one.accuracy,
                "accuracy_low": one.low,
                "accuracy_high": one.high,
                "accuracy_uncalibrated": one.raw_right / one.claims,
                "labels": [label.value for label in LABELS],
                "confusion": one.matrix,
                "infer_s": one.infer_s,
                "claims_per_device_s": one.rate,
            }
            for one in made
        ],
        "attempt": {
            "wall_s": attempt.wall_s,
            "inferences": attempt.made,
            "kept": attempt.kept,
            "calls": attempt.calls,
            "inferences_per_s": attempt.rate,
            "infer_device_s": attempt.infer_s,
            "load_device_s": attempt.facts.load_total_s,
            "loads": attempt.facts.loads,
            "origin": attempt.origin,
            "calls_found_hot": attempt.facts.found_hot,
            "devices": attempt.facts.devices,
            "pilots": attempt.facts.pilots,
        },
    }


def _p(chance: float) -> str:
    return f"{chance:.2g}" if chance >= 0.001 else "less than 0.001"
