import pytest

from stoker.apps.fact_verification.options import (
    SHIPPED,
    SHIPPED_EVIDENCE,
    AnswerWords,
    Claim,
    ClaimLabel,
    PromptTemplate,
    read_prompts,
)
from stoker.errors import ConfigError

VALID = "[[prompts]]\nname = 'a'\ntext = '{claim}'\n"


def test_shipped_prompt_templates_end_without_trailing_space():
    plain = read_prompts(SHIPPED)
    assert [one.name for one in plain] == ["plain", "definitions", "question"]
    assert not any(one.has_evidence_placeholder for one in plain)
    assert all(one.has_evidence_placeholder for one in read_prompts(SHIPPED_EVIDENCE))
    # Each prompt ends where the answer begins. A space or line break at the end of a prompt would split the first token
    # of the answer.
    assert all(one.text == one.text.rstrip() for one in plain)


def test_filled_template_keeps_braces_in_claims_unchanged():
    prompt = PromptTemplate(name="a", text="{ {evidence}|{claim}|{")
    claim = Claim(id="1", claim="say {evidence}", label=ClaimLabel.SUPPORTS, evidence="{claim}", place="")
    assert (prompt.prefix, prompt.fill(claim)) == ("{ ", "{claim}|say {evidence}|{")


def test_prompt_digest_changes_with_text_and_answers(tmp_path):
    one = PromptTemplate(name="a", text="x {claim}")
    assert one.digest == PromptTemplate(name="b", text="x {claim}").digest
    assert one.digest != PromptTemplate(name="a", text="y {claim}").digest
    assert one.digest != PromptTemplate(name="a", text="x {claim}", answers=AnswerWords(" a", " b", " c")).digest


def test_jsonl_templates_are_read(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"name": "a", "text": "{claim}?"}\n{"name": "b", "text": "{claim}!"}\n')
    assert [one.words for one in read_prompts(path)] == [(" True", " False", " Unknown")] * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[prompt]]\n", "prompt is not a setting; did you mean prompts?"),
        ("[[prompts]]\nname = 'a'\ntxt = 'x'\n", "[prompts.a] txt is not a setting; did you mean text?"),
        ("[[prompts]]\nname = 'a'\ntext = 'x'\n", "[prompts.a] text has no {claim}"),
        ("[[prompts]]\nname = 'a'\ntext = '{claim} {evidnce}'\n", "{evidnce} is not a place"),
        (f"{VALID}[[prompts]]\nname = 'b'\ntext = '{{claim}}'\n", "b and a are the same"),
        (f"{VALID}answers = {{ SUPPORT = ' x' }}\n", "did you mean SUPPORTS"),
        (f"{VALID}answers = [1]\n", "answers is a table"),
        (
            f"{VALID}answers = {{ SUPPORTS = ' x', REFUTES = ' x', 'NOT ENOUGH INFO' = ' y' }}\n",
            "two labels have the same answer",
        ),
        ("prompts = [\n", "line 2: not TOML"),
        ("", "has no templates"),
    ],
)
def test_invalid_template_error_names_the_file_and_the_fault(tmp_path, text, says):
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
