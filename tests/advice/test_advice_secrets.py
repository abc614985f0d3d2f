from __future__ import annotations

import pytest

from stoker.manager.advice.secrets import mask_secrets


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("wget https://bob:hunter22@host/x", "hunter22"),
        ("git clone https://ghp_abcdefghijklmnopqrstuvwx@github.com/x", "ghp_abcdefghijklmnop"),
        ("GET https://x.s3.amazonaws.com/a?X-Amz-Signature=abcdef0123&a=1", "abcdef0123"),
        ("key AKIAIOSFODNN7EXAMPLE was refused", "IOSFODNN7EXAMPLE"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCY", "wJalrXUtnFEMI"),
        ("HF_TOKEN=hf_abcdefghijklmnopqrstuv", "abcdefghijklmnopqrstuv"),
        ("login(token='hf_abcdefghijklmnopqrstuv')", "abcdefghijklmnopqrstuv"),
        ("{'api_key': 'zzz-123'}", "zzz-123"),
        ("train.py --password hunter22 --lr 1", "hunter22"),
        ("Authorization: Bearer abc.def.ghi-jkl", "abc.def.ghi-jkl"),
        ("OPENAI sk-proj-abcdefghijklmnop1234", "abcdefghijklmnop1234"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIB\n-----END RSA PRIVATE KEY-----", "MIIEpAIB"),
        ("password: 1234", "1234"),
    ],
)
def test_secret_is_masked_and_other_text_is_kept(line: str, secret: str):
    shown = mask_secrets(line)
    assert secret not in shown
    assert "***" in shown
    assert shown[:3] == line[:3]


@pytest.mark.parametrize(
    "line",
    [
        "max_token: 512 tokens/s=33.2 pad_token=<pad>",
        "KeyError: 'token'",
        "unexpected token in JSON at 3",
        "tokenizer: gpt2-medium, design: nice",
        "step 3 loss 0.3 https://host/path?page=2",
    ],
)
def test_text_that_only_resembles_a_secret_is_not_masked(line: str):
    assert mask_secrets(line) == line
