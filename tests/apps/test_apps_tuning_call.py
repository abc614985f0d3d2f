import math

import msgspec
import pytest
from lazily import lazily

from stoker.apps.prompt_tuning import functions
from stoker.contexts import ambient, payloads
from stoker.contexts.ambient import Evicted
from stoker.errors import ConfigError
from stoker.tuning import order as tuning_order
from stoker.tuning import pace as tuning_pace
from stoker.tuning.bank import build, candidates
from stoker.tuning.bank.candidates import Candidate, hash_prompt, read_candidates
from stoker.tuning.bank.store import open_bank
from stoker.tuning.encoding import encode_prompt, encode_samples
from stoker.tuning.job import PLACE, Metric, Prompt, Sample, split
from stoker.tuning.order import BankPlace, InitialPrompt, Order, Saved

torch, tiny, passes, tuner = lazily("torch", "tuning.tiny", "stoker.tuning.passes", "stoker.tuning.tune", needs="peft")
tune_prompt, build_bank = functions.tune_prompt.function, functions.build_bank.function
SHIPPED = "stoker.tuning.call.SHIPPED_PROMPTS"
FEW = 12


@pytest.fixture(scope="module")
def context():
    torch.set_num_threads(1)
    return tiny.context()


@pytest.fixture(scope="module", autouse=True)
def few_prompts(tmp_path_factory):
    """Use only a few of the shipped prompts, because a lookup scores each prompt."""
    file = tmp_path_factory.mktemp("few") / "prompts.jsonl"
    file.write_text("".join(candidates.SHIPPED_PROMPTS.read_text().splitlines(keepends=True)[:FEW]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SHIPPED, file)
        yield


def bank_of(folder):
    return open_bank(folder, model="tiny").layers


def order_of(folder=None, *, slo_s=0.0, start=b"", virtual_tokens=0, **job):
    bank = None if folder is None else BankPlace(str(folder), "tiny")
    made = tiny.job(**job)
    prompt = msgspec.structs.replace(made.prompt, virtual_tokens=virtual_tokens)
    made = msgspec.structs.replace(made, prompt=prompt)
    return Order(made, tiny.samples(), bank=bank, slo_s=slo_s, start=start)


def test_initial_prompt_of_the_job_is_used_without_a_bank_lookup(context, tmp_path):
    tuned = tune_prompt(context, order_of(tmp_path / "bank"))
    assert (tuned.initial, tuned.initial_from) == ("say yes or no", "the job")
    assert tuned.first_step_at > 0
    assert not (tmp_path / "bank" / "bank").exists()
    assert (tmp_path / "bank" / "readings").exists(), "the tuned prompt waits for the bank"


def test_bank_provides_the_initial_prompt_and_stores_the_tuned_prompt(context, tmp_path, monkeypatch):
    monkeypatch.setattr(SHIPPED, candidates.SHIPPED_PROMPTS)
    tuned = tune_prompt(context, order_of(tmp_path, initial="", iterations=2))
    shipped = {one.text: one for one in read_candidates(candidates.SHIPPED_PROMPTS)}
    assert tuned.initial in shipped
    assert tuned.initial_from.startswith("the bank (loss ")
    assert f"{len(shipped)} of {len(shipped)} scored" in tuned.initial_from
    assert tuned.spent_s["bank"] > 0
    held = bank_of(tmp_path)
    mine = held.candidates[hash_prompt(tuned.text)]
    assert (mine.source, mine.task, mine.metric, mine.value) == ("tuned", "tiny", "loss", tuned.held_out.metric)
    assert len(held) == len(shipped) + (tuned.text not in shipped)
    assert tuning_pace.read_paces(tmp_path)["cpu"].lookup_s > 0


def begun_with(context, text, samples, job):
    """Return the mean loss over the samples before the first step of a tuning that starts from this text."""
    rows = encode_samples(context.tokenizer, samples, template=job.data.template)
    prompt = encode_prompt(context.tokenizer, msgspec.structs.replace(job.prompt, initial=text), longest=0)
    with passes.attach_soft_prompt(context.model, passes.embed_tokens(context.model, prompt)) as soft:
        of = [
            passes.measure_prompt(soft, [row], metric=Metric.LOSS, tokenizer=context.tokenizer, batch=1) for row in rows
        ]
    return sum(tally.value(Metric.LOSS) for tally in of) / len(of)


@pytest.mark.parametrize("virtual_tokens", [0, 9, 40])  # with 40 tokens, tuning repeats the shorter text
def test_score_of_a_prompt_equals_the_first_loss_of_tuning(context, virtual_tokens):
    alike = [msgspec.structs.replace(one, target=one.target.replace("no", "not")) for one in tiny.samples()]
    job = tiny.job(iterations=1)
    evaluated = split(alike, data=job.data, seed=job.training.seed).evaluation
    pairs = [(job.data.template.replace(PLACE, one.input), one.target) for one in evaluated]
    texts = ["say yes or no", "Answer with one of these: not, yes. " * 3]
    scores = build.scorer(context, pairs, virtual_tokens=virtual_tokens)(texts)
    for text, score in zip(texts, scores, strict=True):
        begins = msgspec.structs.replace(job, prompt=Prompt(text, virtual_tokens))
        assert score == pytest.approx(tuner.tune(context, begins, alike).points[0].loss, rel=1e-5)


@pytest.mark.parametrize("virtual_tokens", [0, 100])  # every shipped prompt has fewer than 100 tokens
def test_tuning_begins_with_the_loss_of_the_prompt_found(context, tmp_path, virtual_tokens):
    order = order_of(tmp_path, initial="", iterations=1, virtual_tokens=virtual_tokens)
    job, samples = order.job, order.samples
    tuned = tune_prompt(context, order)
    training = split(samples, data=job.data, seed=job.training.seed).training
    drawn = build.evaluation_samples([(one.input, one.target) for one in training], seed=job.training.seed)
    scored = [Sample(*pair) for pair in drawn]
    assert len({sample.target for sample in scored}) == 2, "of two lengths"
    expected = begun_with(context, tuned.initial, scored, job)
    assert tuned.initial_from.startswith(f"the bank (loss {expected:.3g}, ")


def test_text_that_cannot_be_tuned_has_the_score_nan(context):
    pairs = [(one.input, one.target) for one in tiny.samples(4)]
    first, long, empty, last = build.scorer(context, pairs)(["yes", "no " * 100, " ", "no"])
    assert math.isnan(long)
    assert math.isnan(empty)
    assert [first, last] == pytest.approx(build.scorer(context, pairs)(["yes", "no"]))


def test_bank_lookup_too_long_for_the_deadline_is_skipped(context, tmp_path):
    # No lookup of this bank has been timed: a few scores show that a lookup takes longer than a millisecond.
    short = tune_prompt(context, order_of(tmp_path, initial="", iterations=1, slo_s=0.001))
    assert short.initial == "Answer with one of these: no, yes."
    assert "the targets (a lookup takes" in short.initial_from
    assert "over 20% of the 1.0 ms until the deadline" in short.initial_from
    # A stored pace is used instead of a new measurement.
    tuning_pace.store_pace(tmp_path, "cpu", tuning_pace.ScoringPace(1.0, 100.0))
    assert "takes 1 min 40 s" in tune_prompt(context, order_of(tmp_path, initial="", slo_s=499.0)).initial_from
    assert "the bank" in tune_prompt(context, order_of(tmp_path, initial="", slo_s=501.0)).initial_from


def test_scoring_times_are_stored_by_device_and_virtual_token_count(tmp_path):
    (tmp_path / "pace.json").write_text('{"cpu":{"score_s":0.1,"lookup_s":7.0}}')
    assert tuning_pace.read_paces(tmp_path) == {}, "from before virtual tokens were kept"
    short, long, other = (
        tuning_pace.ScoringPace(0.1, 6.0),
        tuning_pace.ScoringPace(0.5, 30.0, 1000),
        tuning_pace.ScoringPace(0.2, 12.0),
    )
    for kind, pace in (("cpu", tuning_pace.ScoringPace(0.3, 9.0)), ("cpu", long), ("cpu", short), ("gpu", other)):
        tuning_pace.store_pace(tmp_path, kind, pace)
    assert tuning_pace.read_paces(tmp_path) == {"cpu": short, "gpu": other}
    assert tuning_pace.read_paces(tmp_path, virtual_tokens=1000) == {"cpu": long}
    assert tuning_pace.read_paces(tmp_path, virtual_tokens=64) == {}


def test_job_runs_without_lookup_if_its_bank_is_unusable(context, tmp_path):
    (tmp_path / "bank").mkdir()
    tune_prompt(context, order_of(tmp_path / "bank", initial="", iterations=1))
    other = msgspec.structs.replace(order_of(initial="", iterations=1), bank=BankPlace(str(tmp_path / "bank"), "else"))
    tuned = tune_prompt(context, other)
    assert tuned.initial_from.startswith("the targets (the bank cannot be used: ")
    assert "is a bank of tiny" in tuned.initial_from
    (tmp_path / "file").write_text("")
    tuned = tune_prompt(context, order_of(tmp_path / "file", initial="", iterations=1))
    assert "the bank cannot be used" in tuned.initial_from


def test_continued_call_needs_no_lookup(context, tmp_path, monkeypatch):
    whole = tune_prompt(context, order_of(tmp_path, initial=""))
    reports = []

    def hook(done, total, metric, state):
        reports.append((done, total, metric, state))
        return done == 3

    ambient.enter_call_scope(hook=hook)
    # Without this value a fast job reports only its first and last iteration.
    monkeypatch.setattr("stoker.tuning.call._REPORT_EVERY_S", 0.0)
    with pytest.raises(Evicted) as caught:
        tune_prompt(context, order_of(tmp_path, initial=""))
    assert [one[:2] for one in reports] == [(0, 6), (1, 6), (2, 6), (3, 6)]
    kept = tuning_order.unpack(payloads.loads(caught.value.state))
    assert kept.initial.text == whole.initial
    assert kept.metric is not None
    ambient.enter_call_scope(hook=None, state=caught.value.state)
    tuning_pace.store_pace(tmp_path, "cpu", tuning_pace.ScoringPace(1.0, 100.0))
    rest = tune_prompt(context, order_of(tmp_path, initial="", slo_s=1.0))
    ambient.leave_call_scope()
    assert (rest.adapter, rest.points, rest.initial) == (whole.adapter, whole.points, whole.initial)
    assert rest.initial_from.startswith("the bank (loss ")


def test_tuning_resumes_from_a_checkpoint_of_another_session(context):
    reports = []
    ambient.enter_call_scope(hook=lambda done, total, metric, state: reports.append((done, state)))
    whole = tune_prompt(context, order_of())
    ambient.leave_call_scope()
    start = next(payloads.loads(state) for done, state in reports if state)
    assert isinstance(tuning_order.unpack(start), Saved)
    rest = tune_prompt(context, order_of(start=start))
    assert (rest.adapter, rest.points) == (whole.adapter, whole.points)
    # A job with an unreadable checkpoint starts from the beginning. A checkpoint of another job is refused.
    assert tune_prompt(context, order_of(start=start[: len(start) // 2])).points == whole.points
    with pytest.raises(ConfigError, match="another job"):
        tune_prompt(
            context,
            order_of(start=tuning_order.pack(Saved(InitialPrompt("other"), tuning_order.unpack(start).checkpoint))),
        )


def test_unimproved_prompt_is_not_put_into_the_bank(context, tmp_path):
    tuned = tune_prompt(context, order_of(tmp_path, initial="", metric=Metric.LOSS, reach=100.0))
    assert tuned.best.iteration == 0
    assert len(bank_of(tmp_path)) == FEW


def test_prompts_are_added_to_those_of_a_bank(context, tmp_path):
    place = BankPlace(str(tmp_path / "bank"), "tiny")
    first, second, third = (Candidate(text=f"{word} prompt") for word in ("first", "second", "third"))
    assert build_bank(context, place, [first, second]) == 2
    assert build_bank(context, place, [second, third]) == 3
