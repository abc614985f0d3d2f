from __future__ import annotations

import pytest
from tiny_model import write_tiny_model

from stoker.contexts.prompts import PromptReader


@pytest.mark.slow
def test_call_markers_stay_and_other_special_tokens_are_removed(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_tiny_model(tmp_path / "tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tiny")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    text = "<|turn|>[TOOL_CALLS][]<|turn|>"
    for special, said in (([], "[TOOL_CALLS][]"), (["[TOOL_CALLS]"], "[TOOL_CALLS][]")):
        tokenizer.add_tokens(special, special_tokens=True)
        reader = PromptReader(tokenizer, ends=frozenset(), longest=0)
        assert reader.decode(tokenizer(text)["input_ids"]) == said
