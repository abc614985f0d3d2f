from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lazily import lazily

from stoker.contexts import EncoderProfile, keep_encoder_profile, kept_encoder_profile, lengths_that_pay
from stoker.contexts.length_profiles import MIN_GAIN, LengthTime, lengths_to_measure
from stoker.errors import RecipeError

profiling = lazily("stoker.contexts.encoding", needs="torch transformers")


def profile(
    seconds: Callable[[int], float], lengths: Iterable[int] = range(16, 257, 16), **more: Any
) -> EncoderProfile:
    given: dict[str, Any] = {
        "name": "", "dtype": "auto", "computed_dtype": "float32", "compiled": "auto", "is_compiled": True,
        "device": "NVIDIA H100", "threads": 1, "torch": "2.13.0", "repeats": 30, "measured_at": 1e9,
    }  # fmt: skip
    times = tuple(LengthTime(tokens, seconds(tokens), 1e-5) for tokens in lengths)
    return EncoderProfile(lengths=times, **given | more)


def stairs(tokens: int) -> float:
    """Latency rises every 64 tokens, as in Figure 2 of the Arlo paper."""
    return 0.001 * math.ceil(tokens / 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}')
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("longest", "step", "expected"),
    [
        (64, 0, (16, 32, 48, 64)),
        (40, 0, (16, 32, 40)),
        (9, 0, (9,)),
        (0, 128, (128, 256, 384, 512)),
    ],
)
def test_measured_lengths_are_step_multiples_and_the_longest(
    longest: int, step: int, expected: tuple[int, ...]
) -> None:
    assert lengths_to_measure(longest, step=step) == expected
    assert [len(lengths_to_measure(longest)) for longest in (512, 8192)] == [32, 32]
    assert len(lengths_to_measure(8194)) <= 33


def test_runtime_lengths_are_at_the_ends_of_latency_steps() -> None:
    assert lengths_that_pay(profile(stairs)).tokens == (64, 128, 192, 256)
    assert lengths_that_pay(profile(lambda tokens: 0.005)).tokens == (256,), "without steps one length is enough"


def test_expected_texts_select_the_runtime_lengths() -> None:
    counts = [50] * 90 + [200] * 10
    assert lengths_that_pay(profile(stairs), counts).tokens == (64, 256)
    assert lengths_that_pay(profile(stairs), [200] * 9 + [300]).tokens == (256,), "one length is too long"
    assert lengths_that_pay(profile(stairs), [64] * 50 + [65] * 50).tokens == (64, 80, 256)
    with pytest.raises(RecipeError, match=r"every expected text has more tokens than the longest .* measured, 256"):
        lengths_that_pay(profile(stairs), [257, 1000])


def test_profile_is_found_by_the_model_and_its_options(folder: Path, state: Path) -> None:
    file = keep_encoder_profile(folder, profile(stairs))
    found = kept_encoder_profile(str(folder))
    assert file.parent == state / "encoder-lengths"
    assert found is not None
    assert (found.name, found.lengths) == ("model", profile(stairs).lengths)
    assert found.model.startswith("folder-")
    assert kept_encoder_profile(folder, dtype="float16") is None
    assert kept_encoder_profile(folder, compiled=True) is None
    (folder / "config.json").write_text('{"model_type": "roberta"}')
    assert kept_encoder_profile(folder) is None, "a changed file is another model"
    for at, device in enumerate(["NVIDIA H100", "cpu"]):
        keep_encoder_profile(folder, profile(stairs, device=device, measured_at=at))
    last = kept_encoder_profile(folder)
    assert last is not None
    assert last.device == "cpu", "the last profile is used for any device"
    with pytest.raises(RecipeError, match="there is no model at"):
        kept_encoder_profile(folder / "nowhere")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace(b'"format": 1', b'"format": 99'),
        lambda text: text.replace(b'"seconds": 0.001', b'"seconds": -1.0'),
        lambda text: text.replace(b'"tokens": 32', b'"tokens": 8'),
        lambda text: text.replace(b'"threads"', b'"fibres"'),
    ],
)
def test_damaged_or_foreign_profile_is_ignored_with_one_warning(folder, damage, caplog):
    file = keep_encoder_profile(folder, profile(stairs))
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    with caplog.at_level(logging.WARNING):
        assert kept_encoder_profile(folder) is None
    [record] = caplog.records
    assert str(file) in record.getMessage()
    assert "is ignored" in record.getMessage()
    file.write_bytes(whole)
    assert kept_encoder_profile(folder) is not None


class Stairs:
    """A model whose batch times rise in steps; every fifth batch takes ten times as long."""

    name, longest, device, model, labels, source, runtime = "stairs", 256, "cpu", None, list[str](), "", None
    is_compiled = False

    def __init__(self, length: int = 0) -> None:
        self.length, self.batches = length, 0
        self.model = type("Network", (), {"dtype": "torch.float32"})

    def as_runtime(self, length: int) -> Stairs:
        return Stairs(length)

    def time_batch(self) -> float:
        self.batches += 1
        return stairs(self.length) * (10 if self.batches % 5 == 0 else 1) + 1e-6 * (self.batches % 2)

    def compile(self, compiler: Any) -> None:
        self.is_compiled = True

    def close(self) -> None:
        self.is_compiled = False


@pytest.mark.parametrize("compiled", [False, True])
def test_profile_stores_median_latency_and_spread_of_each_length(compiled: bool) -> None:
    told: list[tuple[float, float]] = []
    found = profiling.EncoderModel.profile_lengths(
        Stairs(), compiled=compiled, repeats=21, told=lambda done, total: told.append((done, total))
    )
    assert [each.tokens for each in found.lengths] == list(range(16, 257, 16))
    for each in found.lengths:
        assert each.seconds == pytest.approx(stairs(each.tokens), abs=2e-6), "a few disturbed batches do not count"
        assert 0 < each.spread_s <= 2e-6
    assert (found.is_compiled, found.compiled) == (compiled, compiled)
    assert (found.repeats, found.computed_dtype) == (21, "float32")
    assert found.device.startswith("cpu ")
    assert told[-1][0] == told[-1][1]
    assert lengths_that_pay(found).tokens == (64, 128, 192, 256)
    assert msgspec.json.decode(msgspec.json.encode(found), type=EncoderProfile) == found


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ((64, 32), "ascending, 3 tokens or more"),
        ((2, 32), "ascending, 3 tokens or more"),
        ((32, 512), "512 tokens cannot be measured: the model accepts at most 256"),
    ],
)
def test_unmeasurable_lengths_are_refused(lengths: tuple[int, ...], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        profiling.EncoderModel.profile_lengths(Stairs(), lengths)


def test_steadily_rising_latency_selects_few_runtime_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    many = range(16, 513, 16)
    monkeypatch.setattr("stoker.contexts.length_profiles.MOST_RUNTIMES", 32)
    assert 3 <= len(lengths_that_pay(profile(lambda tokens: 0.001 + 0.0001 * tokens, many)).tokens) < 32
    monkeypatch.setattr("stoker.contexts.length_profiles.MOST_RUNTIMES", 3)
    assert len(lengths_that_pay(profile(lambda tokens: 0.0001 * tokens, many)).tokens) == 3
    noisy = profile({64: 0.009, 128: 0.002, 256: 0.004}.__getitem__, (64, 128, 256))
    assert lengths_that_pay(noisy).tokens == (128, 256), "a slower shorter runtime is not chosen"


def test_chosen_lengths_are_optimal_for_their_number() -> None:
    chance = random.Random(3)
    for _ in range(40):
        times = sorted(chance.uniform(0.001, 0.02) for _ in range(7))
        measured = profile(lambda tokens, times=times: times[tokens // 32 - 1], range(32, 225, 32))  # type: ignore[misc]
        given, texts = measured.lengths, [chance.randint(0, 50) for _ in range(7)]
        counts = [each.tokens for each, number in zip(given, texts, strict=True) for _ in range(number)]
        found = lengths_that_pay(measured, counts)

        def mean_s(chosen: tuple[int, ...], given: Any = given, texts: list[int] = texts) -> float:
            by_length = {each.tokens: each.seconds for each in given}
            padded = (min(length for length in chosen if length >= each.tokens) for each in given)
            return sum(n * by_length[length] for n, length in zip(texts, padded, strict=True)) / sum(texts)

        def best_of(count: int, given: Any = given) -> float:
            lengths = [each.tokens for each in given]
            ways = (way for way in itertools.combinations(lengths, count) if way[-1] == lengths[-1])
            return min(map(mean_s, ways))

        assert found.mean_s == pytest.approx(mean_s(found.tokens))
        assert found.mean_s == pytest.approx(best_of(len(found.tokens)))
        if len(found.tokens) < 7:
            assert found.mean_s <= best_of(len(found.tokens) + 1) * (1 + MIN_GAIN) + 1e-12
