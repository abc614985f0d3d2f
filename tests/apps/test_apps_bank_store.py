from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from full_disk import full_disk

from stoker.errors import ConfigError, StokerError
from stoker.tuning.bank import store
from stoker.tuning.bank.build import ensure_bank, insert
from stoker.tuning.bank.candidates import Candidate, hash_prompt, read_candidates
from stoker.tuning.bank.layers import InsertionOutcome
from stoker.tuning.bank.store import BankStore, open_bank

OF = {"model": "model-a"}


class Letters:
    """A feature reader that counts letters and records all texts in `asked`."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, texts):
        self.asked.extend(texts)
        return np.array([[text.count(letter) + 0.1 for letter in "abcdefgh"] for text in texts], dtype=np.float32)


def prompts(count: int) -> list[Candidate]:
    rng = np.random.default_rng(5)
    return [Candidate(text=f"{number} " + "".join(rng.choice(list("abcdefgh"), 20))) for number in range(count)]


def made(folder: Path, count: int = 60, *, capacity: int = 3000, reader: Letters | None = None) -> BankStore:
    return ensure_bank(folder, prompts(count), read=reader or Letters(), k=6, capacity=capacity, **OF)


def same(one: BankStore, other: BankStore) -> bool:
    return (
        one.layers.candidates == other.layers.candidates
        and one.layers.clusters == other.layers.clusters
        and all((one.layers.vectors[key] == other.layers.vectors[key]).all() for key in one.layers.candidates)
    )


def test_reopened_bank_has_the_same_prompts_and_clusters(tmp_path):
    bank = made(tmp_path, capacity=63)
    for number in range(9):
        tuned = Candidate(text="ab" * number + "h", task="t", metric="accuracy", value=number / 10, tuned_at=1e9)
        insert(bank, tuned, read=Letters())
    again = open_bank(tmp_path, **OF)
    assert same(bank, again)
    assert len(again.layers) == 63
    assert len(again.layers.scale.centre) == 8


def test_features_of_each_prompt_are_computed_once(tmp_path):
    reader, told = Letters(), []
    bank = ensure_bank(tmp_path, prompts(150), read=reader, k=6, progress=lambda *done: told.append(done), **OF)
    assert sorted(reader.asked) == sorted(one.text for one in prompts(150))
    assert told == [(64, 150), (128, 150), (150, 150)]
    again = ensure_bank(tmp_path, prompts(160), read=reader, again=True, k=9, **OF)
    assert len(reader.asked) == 160
    assert len(again.layers.clusters) == 9
    assert same(bank.refresh(), again)
    insert(bank, prompts(3)[2], read=reader)
    assert len(reader.asked) == 160


def test_two_stores_see_each_others_insertions(tmp_path):
    one, other = made(tmp_path), open_bank(tmp_path, **OF)
    one.insert(Candidate(text="from one"), np.ones(8, dtype=np.float32))
    assert hash_prompt("from one") not in other.layers.candidates
    assert other.insert(Candidate(text="from one"), np.ones(8, dtype=np.float32)).did is InsertionOutcome.UPDATED
    other.insert(Candidate(text="from the other"), np.zeros(8, dtype=np.float32))
    assert same(one.refresh(), other)


def test_bank_of_another_model_is_refused(tmp_path, monkeypatch):
    made(tmp_path)
    with pytest.raises(StokerError, match=r"bank of model-a.*model-b.*another folder") as caught:
        open_bank(tmp_path, model="model-b")
    assert caught.value.model == "model-a"
    with monkeypatch.context() as patch:
        patch.setattr(store, "READING", "words")
        with pytest.raises(StokerError, match="words"):
            open_bank(tmp_path, model="model-a")
    with pytest.raises(StokerError, match="bank of model-a"):
        ensure_bank(tmp_path, prompts(3), model="model-b", read=Letters())
    os.unlink(tmp_path / "bank")
    with pytest.raises(StokerError, match="has features of model-a"):
        ensure_bank(tmp_path, prompts(3), model="model-b", read=Letters())


def test_truncated_bank_file_is_refused_and_can_be_rebuilt(tmp_path):
    bank = made(tmp_path)
    insert(bank, Candidate(text="tuned abba", task="t", value=0.7), read=Letters())
    whole = bank.path.read_bytes()
    bank.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StokerError, match=r"is damaged \(its checksum is wrong\); build the bank again"):
        open_bank(tmp_path, **OF)
    with pytest.raises(StokerError, match="is damaged"):
        bank.insert(Candidate(text="x"), np.ones(8, dtype=np.float32))
    reader = Letters()
    again = made(tmp_path, reader=reader)
    assert set(again.layers.candidates) == set(bank.layers.candidates)
    assert again.layers.candidates[hash_prompt("tuned abba")].value == 0.7
    assert reader.asked == []
    assert len(list(tmp_path.glob("bank.damaged-*"))) == 1


def test_corrupted_bank_byte_is_reported_and_no_prompt_is_lost(tmp_path):
    bank = made(tmp_path)
    insert(bank, Candidate(text="tuned abba"), read=Letters())
    first, *_ = sorted((tmp_path / "readings").iterdir())
    for file in (bank.path, first):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 255
        file.write_bytes(data)
    with pytest.raises(StokerError, match="is damaged"):
        open_bank(tmp_path, **OF)
    reader = Letters()
    again = made(tmp_path, reader=reader)
    assert set(again.layers.candidates) == set(bank.layers.candidates)
    assert len(reader.asked) == 60, "only the prompts of the damaged file are read again"
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {"bank", "readings", "lock", "bank.damaged"}
    assert first.with_name(f"damaged-{first.name}").exists()


def test_insertions_work_again_after_a_full_disk(tmp_path):
    bank = made(tmp_path)
    before = bank.path.read_bytes()
    with full_disk(len(before) + 20), pytest.raises(StokerError, match="cannot be written"):
        bank.insert(Candidate(text="too much"), np.ones(8, dtype=np.float32))
    assert bank.path.read_bytes() == before
    assert hash_prompt("too much") not in bank.layers.candidates
    assert bank.insert(Candidate(text="fits now"), np.ones(8, dtype=np.float32)).did is InsertionOutcome.ADDED


def test_prompts_are_read_from_a_file(tmp_path):
    import lzma

    lines = '{"text": "Say it.", "source": "s", "task": null}\n{"text": " Say it. "}\n{"text": "Now."}\n'
    file = tmp_path / "prompts.jsonl.xz"
    file.write_bytes(lzma.compress(lines.encode()))
    assert read_candidates(file) == [Candidate(text="Say it.", source="s"), Candidate(text="Now.")]
    file.write_bytes(lzma.compress(lines.encode())[:-30])
    with pytest.raises(ConfigError, match="is truncated after line 3"):
        read_candidates(file)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ""}\n')
    with pytest.raises(ConfigError, match=r"line 2: text must be text"):
        read_candidates(tmp_path / "bad.jsonl")
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        read_candidates(tmp_path / "none.jsonl")
