import json
import math

import msgspec
import pytest
from lazily import lazily

from stoker.contexts import payloads
from stoker.contexts.ambient import Evicted
from stoker.errors import ConfigError
from stoker.site import Duration
from stoker.tuning.encoding import EncodedSample, encode_prompt, encode_samples
from stoker.tuning.job import Metric, Optimizer, Prompt, Sample
from stoker.tuning.order import EvaluationPoint, TuningEnd, write_tuned

torch, peft, tiny, passes, tuner = lazily("torch", "peft", "tuning.tiny", "stoker.tuning.passes", "stoker.tuning.tune")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def context():
    return tiny.context()


def weights(adapter):
    import safetensors.torch

    return safetensors.torch.load(adapter)["prompt_embeddings"]


def rows_of(context, samples=None):
    return encode_samples(context.tokenizer, samples or tiny.samples(), template=tiny.job().data.template)


def prompt_of(context, text="say yes or no"):
    return encode_prompt(context.tokenizer, Prompt(text), longest=0)


# ---- computed values


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_initial_soft_prompt_gives_the_same_loss_as_its_text(kind):
    context = tiny.context(kind=kind)
    rows, prompt = rows_of(context), prompt_of(context)
    with passes.attach_soft_prompt(context.model, passes.embed_tokens(context.model, prompt)) as soft:
        found = passes.measure_prompt(soft, rows, metric=Metric.LOSS, tokenizer=context.tokenizer, batch=7)
    total = 0.0
    for row in rows:
        whole = torch.tensor([prompt + row.source + row.target])
        with torch.no_grad():
            steps = torch.log_softmax(context.model(whole).logits[0], dim=-1)
        start = len(prompt) + len(row.source)
        total -= sum(float(steps[start - 1 + at, token]) for at, token in enumerate(row.target))
    assert found.loss == pytest.approx(total, rel=1e-5)
    assert found.tokens == sum(len(row.target) for row in rows)
    assert found.samples == len(rows)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradient_equals_the_reference_for_any_micro_batch_size(kind):
    context = tiny.context(kind=kind)
    rows = rows_of(context)[:7]
    vectors = passes.embed_tokens(context.model, prompt_of(context))
    with passes.attach_soft_prompt(context.model, vectors) as soft:
        whole, loss, tokens = passes.compute_gradient(soft, rows, micro_batch=0)
        pieces = passes.compute_gradient(soft, rows, micro_batch=2)
        nothing = passes.compute_gradient(soft, [], micro_batch=0)
    plain = vectors.clone().requires_grad_(True)
    table = context.model.get_input_embeddings()
    for row in rows:
        inputs = torch.cat([plain, table(torch.tensor(row.source + row.target))])
        logits = context.model(inputs_embeds=inputs[None]).logits[0, -len(row.target) - 1 : -1]
        torch.nn.functional.cross_entropy(logits, torch.tensor(row.target), reduction="sum").backward()
    assert plain.grad is not None
    scale = float(plain.grad.abs().max())
    assert torch.allclose(whole, plain.grad, rtol=0, atol=1e-5 * scale)
    assert torch.allclose(whole, pieces[0], rtol=0, atol=1e-5 * scale)
    assert (loss, tokens) == (pytest.approx(pieces[1]), pieces[2])
    assert (float(nothing[0].abs().sum()), *nothing[1:]) == (0.0, 0.0, 0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_accuracy_counts_targets_that_the_model_writes(kind):
    context = tiny.context(kind=kind)
    vectors = passes.embed_tokens(context.model, prompt_of(context))
    table = context.model.get_input_embeddings()
    right = []
    for row in rows_of(context)[:6]:
        written = ()
        for _ in range(4):
            inputs = torch.cat([vectors, table(torch.tensor(row.source + written))])
            with torch.no_grad():
                written += (int(context.model(inputs_embeds=inputs[None]).logits[0, -1].argmax()),)
        right.append(EncodedSample(row.source, written, context.tokenizer.decode(written).strip()))
    wrong = [EncodedSample(row.source, (*row.target[:-1], (row.target[-1] + 1) % 256), "") for row in right]
    with passes.attach_soft_prompt(context.model, vectors) as soft:
        found = passes.measure_prompt(soft, right + wrong, metric=Metric.ACCURACY, tokenizer=context.tokenizer, batch=5)
        texts = passes.generate_texts(soft, right, tokenizer=context.tokenizer)
        alone = [passes.generate_texts(soft, [row], tokenizer=context.tokenizer)[0] for row in right]
    assert (found.correct, found.samples) == (6.0, 12.0)
    assert texts == alone
    for row, text in zip(right, texts, strict=True):
        raw = context.tokenizer.decode(row.target, skip_special_tokens=True).strip()
        assert text.startswith(raw) or tiny.END in row.text


def test_job_stops_at_its_target_and_is_measured_on_held_out_data(context):
    same = [Sample(f"{'x' * (1 + number % 5)}{number}", "ok") for number in range(30)]
    job = tiny.job(iterations=200, metric=Metric.ACCURACY, reach=1.0, evaluate_every=5)
    seen = []
    tuned = tuner.tune(context, job, same, report=seen.append)
    assert tuned.end is TuningEnd.REACHED
    assert tuned.iterations == tuned.iterations_to_accuracy == tuned.best.iteration < 200
    assert tuned.best.metric == 1.0
    assert tuned.held_out.metric == 1.0
    assert tuned.points[0].iteration == 0
    assert tuned.points[0].metric < 1.0
    assert [point.iteration for point in tuned.points] == list(range(0, tuned.iterations + 1, 5))
    assert [one.iteration for one in seen] == list(range(1, tuned.iterations + 1))
    assert seen[-1].loss < seen[0].loss
    assert seen[-1].left_s == 0.0
    assert seen[0].left_s is None
    assert all(one.left_s is not None and one.left_s > 0 for one in seen[1:-1])
    assert tuned.spent_s["compute"] > 0
    assert tuned.communication_share < 0.1
    assert tuned.text == context.tokenizer.decode(passes.nearest_tokens(context.model, weights(tuned.adapter)))


def test_job_without_a_target_returns_its_best_prompt(context):
    # The learning rate is so high that the loss rises again after the best iteration.
    steep = {"learning_rate": 0.5, "optimizer": Optimizer.SGD}
    tuned = tuner.tune(context, tiny.job(iterations=4, **steep), tiny.samples())
    assert tuned.end is TuningEnd.ITERATIONS
    assert tuned.iterations == 4
    assert tuned.iterations_to_accuracy is None
    assert [point.iteration for point in tuned.points] == [0, 2, 4]
    assert tuned.best == tuned.points[1] == min(tuned.points, key=lambda point: point.metric)
    shorter = tuner.tune(context, tiny.job(iterations=2, **steep), tiny.samples())
    assert (shorter.adapter, shorter.held_out, shorter.text) == (tuned.adapter, tuned.held_out, tuned.text)
    uneven = tuner.tune(context, tiny.job(iterations=3), tiny.samples())
    assert [point.iteration for point in uneven.points] == [0, 2, 3]


@pytest.mark.parametrize("metric", [Metric.ROUGE, Metric.BLEU])
def test_rouge_and_bleu_metrics_are_between_0_and_1(context, metric):
    longer = [Sample(one.input, f"it is {one.target} for me", one.place) for one in tiny.samples(12)]
    tuned = tuner.tune(context, tiny.job(iterations=2, metric=metric), longer)
    assert all(0 <= point.metric <= 1 for point in (*tuned.points, tuned.held_out))
    assert math.isfinite(tuned.held_out.loss)


def test_nan_loss_ends_the_job_with_its_best_prompt():
    context = tiny.context()
    good = tuner.tune(context, tiny.job(iterations=2), tiny.samples())

    def break_it(progress):
        if progress.iteration == 3:
            context.model.get_input_embeddings().weight.mul_(float("inf"))

    tuned = tuner.tune(context, tiny.job(), tiny.samples(), report=break_it)
    assert tuned.end is TuningEnd.DIVERGED
    assert tuned.iterations == 4
    assert (tuned.adapter, tuned.best) == (good.adapter, good.best)


# ---- leftovers


def test_model_is_left_unchanged_and_jobs_are_independent(context):
    ids = torch.tensor([[1, 2, 3]])
    names, config = sorted(vars(context.model)), context.model.config.to_dict()
    parameters = {name: (value.data_ptr(), value.requires_grad) for name, value in context.model.named_parameters()}
    before, chance = context.model(ids).logits, torch.random.get_rng_state()
    first = tuner.tune(context, tiny.job(), tiny.samples())
    other = tuner.tune(context, tiny.job(initial="something else", batch=4, optimizer=Optimizer.SGD), tiny.samples())
    again = tuner.tune(context, tiny.job(), tiny.samples())
    assert (again.adapter, again.points) == (first.adapter, first.points)
    assert other.points[0] != first.points[0]
    assert sorted(vars(context.model)) == names
    assert context.model.config.to_dict() == config
    assert {
        name: (value.data_ptr(), value.requires_grad) for name, value in context.model.named_parameters()
    } == parameters
    assert torch.equal(context.model(ids).logits, before)
    assert torch.equal(torch.random.get_rng_state(), chance)
    assert not context.model.training


def test_saved_tuned_prompt_can_be_loaded_as_a_peft_adapter(context, tmp_path):
    tuned = tuner.tune(context, tiny.job(), tiny.samples())
    said = json.loads(write_tuned(tuned, tmp_path / "tuned").read_text())
    assert said["metric"] == "loss"
    assert said["held_out"]["loss"] == tuned.held_out.loss
    assert "adapter" not in said
    ids = torch.tensor([[1, 2, 3]])
    loaded = peft.PeftModel.from_pretrained(tiny.context().model, tmp_path / "tuned")
    with torch.no_grad():
        found = loaded(input_ids=ids).logits
        table = context.model.get_input_embeddings()
        wanted = context.model(inputs_embeds=torch.cat([weights(tuned.adapter), table(ids[0])])[None]).logits
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.gpu
def test_tuning_losses_on_gpu_and_cpu_agree(context):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    there = tiny.context()
    there.model.to("cuda")
    here, found = (tuner.tune(one, tiny.job(iterations=2), tiny.samples()) for one in (context, there))
    assert [point.loss for point in found.points] == pytest.approx([point.loss for point in here.points], rel=1e-3)


# ---- checkpoints


def test_evicted_tuning_job_resumes_with_identical_results(context):
    whole = tuner.tune(context, tiny.job(), tiny.samples())

    def leave(progress):
        if progress.iteration == 3:
            raise Evicted(b"not what comes out")

    with pytest.raises(Evicted) as caught:
        tuner.tune(context, tiny.job(), tiny.samples(), report=leave)
    seen = []
    rest = tuner.tune(context, tiny.job(), tiny.samples(), start=payloads.loads(caught.value.state), report=seen.append)
    assert [one.iteration for one in seen] == [5, 6]
    assert (rest.adapter, rest.points, rest.held_out) == (whole.adapter, whole.points, whole.held_out)


def test_tuning_resumes_from_a_reported_checkpoint(context):
    kept = {}
    tuner.tune(context, tiny.job(), tiny.samples(), report=lambda one: kept.update({one.iteration: one.checkpoint}))
    assert all(kept.values())
    seen = []
    tuner.tune(context, tiny.job(), tiny.samples(), start=kept[4], report=seen.append)
    assert seen[0].iteration == 5
    rare = tiny.job(checkpoint_every_s=Duration(3600.0))
    tuner.tune(context, rare, tiny.samples(), report=lambda one: kept.update({one.iteration: one.checkpoint}))
    assert not any(kept.values())


def test_job_starts_again_if_its_checkpoint_is_damaged(context):
    kept = []
    tuned = tuner.tune(context, tiny.job(), tiny.samples(), start=b"half", report=kept.append)
    assert tuned.points == tuner.tune(context, tiny.job(), tiny.samples()).points
    with pytest.raises(ConfigError, match="another job or other data"):
        tuner.tune(context, tiny.job(), tiny.samples(30), start=kept[0].checkpoint)


POINT = EvaluationPoint(10, 0.5, 2.5)


def state(job="job"):
    header = tuner.CheckpointHeader(job, 12, points=(POINT,), best=POINT, spent_s={"compute": 2.0})
    prompt = torch.arange(6.0).view(2, 3)
    return tuner.TuningState(header, prompt, prompt, {"step": torch.tensor(12.0), "exp_avg": prompt + 1})


def test_unpacked_checkpoint_equals_the_packed_state():
    found = tuner.unpack_state(tuner.pack_state(state()), job="job")
    assert found is not None
    assert found.header == state().header
    assert torch.equal(found.prompt, state().prompt)
    assert torch.equal(found.best, state().best)
    assert {name: value.tolist() for name, value in found.optimizer.items()} == {
        name: value.tolist() for name, value in state().optimizer.items()
    }


def test_damaged_checkpoint_is_ignored_with_a_warning(caplog):
    data = tuner.pack_state(state())
    assert tuner.unpack_state(b"", job="job") is None
    assert not caplog.records
    for damaged in (data[:-1], data[: len(data) // 2], data[:7], b"\0" * 100, b"{}", data[:8] + b"x" + data[9:]):
        caplog.clear()
        assert tuner.unpack_state(damaged, job="job") is None
        assert "cannot be read" in caplog.text


def test_checkpoint_of_another_job_is_refused():
    with pytest.raises(ConfigError, match=r"another job or other data \(job; this job is new\)"):
        tuner.unpack_state(tuner.pack_state(state()), job="new")


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_restored_optimizer_continues_exactly(kind):
    def steps(parameter, optimizer, count):
        for _ in range(count):
            parameter.grad = parameter.detach() + 1
            optimizer.step()

    def fresh(values):
        parameter = torch.nn.Parameter(values.clone())
        more = {"momentum": 0.9} if kind == "SGD" else {}
        return parameter, getattr(torch.optim, kind)([parameter], lr=0.1, **more)

    whole, optimizer = fresh(torch.ones(3))
    steps(whole, optimizer, 5)
    first, before = fresh(torch.ones(3))
    steps(first, before, 2)
    second, after = fresh(first.detach())
    tuner.restore_optimizer(after, tuner.optimizer_tensors(before))
    steps(second, after, 3)
    assert torch.equal(second, whole)


# ---- refusals


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        ({"initial": " "}, "initial", "initial is empty"),
        ({"initial": "word " * 60}, "initial", "initial has 300 tokens, and the model accepts at most 256 tokens"),
        ({"virtual_tokens": 250}, "input", r"pairs\.jsonl: line \d+: input and target have \d+ tokens, which with the"),
        ({"metric": Metric.BLEU}, "metric", "is 0 for every prompt"),
    ],
)
def test_untunable_job_is_refused_before_it_begins(context, change, key, said):
    prompt = {name: change.pop(name) for name in ("initial", "virtual_tokens") if name in change}
    job = tiny.job(**change)
    job = msgspec.structs.replace(job, prompt=msgspec.structs.replace(job.prompt, **prompt))
    with pytest.raises(ConfigError, match=said) as caught:
        tuner.tune(context, job, tiny.samples())
    assert caught.value.key == key


def test_prompt_is_cut_or_repeated_to_its_virtual_token_count(context):
    def tokens(text, count=0):
        return encode_prompt(context.tokenizer, Prompt(text, count), longest=1000)

    assert context.tokenizer.decode(tokens("abc", 7)) == "abcabca"
    assert context.tokenizer.decode(tokens("abc", 2)) == "ab"
    assert context.tokenizer.decode(tokens("abc")) == "abc"
    assert len(tokens("x" * 999)) == 64


# ---- a real model
