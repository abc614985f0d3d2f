"""Hide secrets in displayed texts: by their format (tokens, private keys), position (the password in a URL, an
Authorization header), or the name before them (`password=`, `--token `). Numbers after such names are not hidden
(`max_token: 512`).
"""

from __future__ import annotations

import re

HIDDEN = "***"

_SECRET_FORMATS = re.compile(
    r"""
      \b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}\b                       # AWS access key ids
    | \bhf_[A-Za-z0-9]{16,}                                         # Hugging Face
    | \bsk-[A-Za-z0-9_-]{16,}                                       # OpenAI and services that use its format
    | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_[A-Za-z0-9_]{20,} # GitHub
    | \bglpat-[A-Za-z0-9_-]{16,}                                    # GitLab
    | \bxox[abeoprs]-[A-Za-z0-9-]{10,}                              # Slack
    | \bAIza[A-Za-z0-9_-]{30,}                                      # Google
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*     # JSON web tokens
    """,
    re.VERBOSE,
)
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)(.*?)(-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL
)
_IN_URL = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{1,20}://)([^\s/@:'\"]{0,500}:)?[^\s/@'\"]{1,500}@")
_HEADER = re.compile(
    r"(\b(?:authorization|x-api-key|x-auth-token|cookie)\b['\"]?\s{0,4}[:=]\s{0,4}['\"]?"
    r"(?:(?:bearer|basic|token)\s{1,4})?)([^\s'\",;]{4,})",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(\bBearer\s{1,4})([A-Za-z0-9._~+/=-]{12,})")
_BY_NAME = re.compile(
    r"((?:passw(?:or)?d|passphrase|pwd|secret|api[_-]?key|access[_-]?key|account[_-]?key|private[_-]?key"
    r"|auth[_-]?key|token|credential|signature|\bsas|\bsig)"
    r"(?:[_-]?(?:id|key|value))?(?P<quote>['\"])?"
    r"(?:\s{0,4}[:=]\s{0,4}|\s{1,4}(?<=\s)))"
    r"(?P<open>['\"])?(?P<value>[^\s'\",;&)}\]]{1,4096})",
    re.IGNORECASE,
)
_OPTION = re.compile(r"(?:^|\s)--[\w.-]*$")
_SHORTEST_SECRET = 6
"""Minimum length of a value that is hidden after a command-line option or the name `token`."""
_HARMLESS = re.compile(r"[-+]?[\d.,]+(?:[eE][-+]?\d+)?%?|<.*|None|null|True|False|true|false|\*+", re.DOTALL)


_MAY_CONTAIN_SECRET = re.compile(
    r"pass|pwd|secret|key|token|credential|sign|sig|sas|auth|cookie|bearer|://|a(?:kia|sia|roa|ida)|hf_|sk-|gh[pousr]_"
    r"|github_|glpat|xox|aiza|eyj"
)


def mask_secrets(text: str) -> str:
    if not _MAY_CONTAIN_SECRET.search(text.lower()):
        return text
    text = _PRIVATE_KEY.sub(rf"\1{HIDDEN}\3", text)
    text = _SECRET_FORMATS.sub(lambda found: found[0][:4] + HIDDEN, text)
    text = _IN_URL.sub(rf"\1\2{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    return _BY_NAME.sub(_hide_value_after_name, text)


def _hide_value_after_name(found: re.Match[str]) -> str:
    value, opened = found["value"], found["open"] or ""
    name = found[1]
    if _HARMLESS.fullmatch(value) and "pass" not in name.lower():
        return found[0]
    if name[-1] not in ":=" and not name.rstrip().endswith((":", "=")):
        # Only a blank separates the name from the value: the name is a command-line option or an ordinary word.
        if (
            not _OPTION.search(found.string[max(0, found.start() - 40) : found.start()])
            or len(value) < _SHORTEST_SECRET
        ):
            return found[0]
    elif "token" in name.lower() and len(value) < _SHORTEST_SECRET:
        return found[0]
    return f"{name}{opened}{HIDDEN}"
