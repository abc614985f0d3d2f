"""The inferences of a fact verification run alone: its very calls, over contexts that are hot on every slot already.

`python -m benchmarks.awareness_side --limit 300 [--no-snapshot]` prints as JSON how long the calls took on the clock.
The calls are made by the application's own code, in its order, through the same `stoker.map`. Before the clock starts
each slot has answered texts that share nothing with them.
"""

from __future__ import annotations

import argparse
import json
import time

import stoker
from stoker.apps.common.calls import run_calls
from stoker.apps.fact_verification.functions import Question, verify
from stoker.apps.fact_verification.options import VerificationOptions, choose_prompts, read_claims, sample_claims
from stoker.apps.fact_verification.run import make_recipe, plan
from stoker.sessions import facts_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, required=True)
    parser.add_argument("--no-snapshot", action="store_true")
    asked = parser.parse_args()
    options = VerificationOptions(limit=asked.limit, snapshot=not asked.no_snapshot)
    claims = sample_claims(read_claims(options.claims_path), limit=options.limit, seed=options.seed)
    calls = plan(choose_prompts(options, claims), claims, {}, batch_size=options.batch_size)  # type: ignore[arg-type]
    questions = [
        Question(
            number=number,
            prefix=call.prompt.prefix,
            texts=tuple(call.prompt.fill(claim) for claim in call.claims),
            words=call.prompt.answers,
            tensor_batch=options.tensor_batch,
        )
        for number, call in enumerate(calls)
    ]
    recipe, _ = make_recipe(options)
    scored = verify.with_options(context=recipe)
    with stoker.load() as session:
        ask = facts_of(session, {recipe.key})
        warm = Question(number=0, prefix="", texts=("Is water wet? It is",) * 4, words=(" true", " false"))
        until = time.monotonic() + 600
        while not 0 < ask().devices == ask().hot:
            list(run_calls([(scored, [warm] * 8)]))
            if time.monotonic() > until:
                raise RuntimeError(f"not every slot became hot: {ask()}")
        list(run_calls([(scored, [warm] * 8)]))
        begun = time.perf_counter()
        made = list(run_calls([(scored, questions)]))
        seconds = time.perf_counter() - begun
        facts = ask()
    if sorted(scores.number for scores in made) != list(range(len(questions))):
        raise RuntimeError(f"{len(made)} results for {len(questions)} calls")
    if len({scores.worker for scores in made}) != facts.devices:
        raise RuntimeError(f"only {len({scores.worker for scores in made})} of {facts.devices} slots were used")
    print(json.dumps({
        "inferences_s": seconds,
        "infer_device_s": sum(scores.infer_s for scores in made),
        "load_s": facts.load_s,
        "calls": len(questions),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
