"""How bad a line of a log looks, from its words alone.

The words are those of severity ("error", "failed", "refused"), whatever program wrote them. Names of metrics
(`val_error=0.2`), settings (`timeout=60`) and counts of none (`0 errors`) are removed first. A line that announces
another try, or a warning, is a notice: it stands in the context of a failure, and begins none.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable

_LETTERS = re.compile(r"\\.|[A-Z]+", re.DOTALL)


def caseless(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """The pattern in lower case (not its classes, such as `\\S`), to be searched in `line.lower()`."""
    return re.compile(_LETTERS.sub(lambda hit: hit[0] if hit[0].startswith("\\") else hit[0].lower(), pattern), flags)


class Gravity(enum.IntEnum):
    """How bad a line looks."""

    PLAIN = 0
    NOTICE = 1
    ERROR = 2
    FATAL = 3


_STEMS = (
    b"err|exception|fail|critical|abort|panic|cannot|can't|denied|refused|unreachable|timed|timeout|kill|corrupt|"
    b"lost|invalid|unhandled|segfault|segmentation|terminat|broken|exceed|stale|lockup|lock-up|stall|dead|crash|"
    b"evict|preempt|held|shutdown|down|expire|mismatch|incompatible|undefined|missing|unsupported|disconnect|reboot|"
    b"full|degraded|unexpected|rejected|fatal|emerg|dumped|oom|uncorrectable|unrecoverable|cancelled|node_fail|***|"
    b"traceback|interrupt|warn|deprecat|nvrm|could not|unable to|time out|time-out|no such|reset by|out of memory|"
    b"not found|not responding|not available|not ready|not valid|not enough|giving up|improper"
).split(b"|")
"""Each pattern below has one of these, in lower case: a look for them is ten times as fast as one at the patterns."""

TRACEBACK = "Traceback (most recent call last)"

_HARMLESS = caseless(
    r"""
      (?:error|err|fail(?:ed|ures?)?|timeout|lost|abort(?:ed)?|invalid|exception)s?[\w/.-]{0,60}+['"]?\s*+[=:]\s*+
          (?:[-+]?[\d.]+(?:e[-+]?\d+)?(?:\s?(?:%|s|ms|seconds))?|none|null|false|true|''|"")(?![\w:.])
    | \b(?:0|no|zero|without(?:\ any)?)\s+(?:\w+\s+)?(?:errors?|failures?|failed|exceptions?|timeouts?)\b
    | \berrors?\ (?:by|per)\ \w+
    | \b(?:mean|absolute|squared|word|character|reconstruction|error|failure)[\s_-]
          (?:absolute\ |squared\ )?(?:error|failure|rate|analysis|handling)s?\b(?:\s+rate\b)?
    | \bon[_-](?:error|failure)\b | \berror[_-]?(?:bars?|handler|correct\w*)\b | \bfail[-_]?(?:fast|over|safe)\b
    | (?:set|raise|use|disable|enable|ignore)[\w_-]*(?:_|-)errors?\b
    """,
    re.VERBOSE,
)
_FATAL = caseless(
    r"""
      Traceback\ \(most\ recent\ call\ last\) | \b(?:FATAL|CRITICAL|PANIC|EMERG)\b | \bfatal(?:\ \w+)?\ error | \bfatal:
    | \bSegmentation\ fault | core\ dumped | \bBus\ error | ^(?:\S+:\s|\S+\[\d+\]:\s)?(?:Killed|Aborted|Terminated)\b
    | \boom[-_ ]kill | \bout\ of\ memory\b | terminate\ called | \buncorrectable\b | \bunrecoverable\b
    | \bCANCELLED\b | \bNODE_FAIL\b | \b(?:kernel|hardware|machine\ check)\b.*\berror\b | \*\*\*.*\*\*\*
    | ^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?::\s|$)
    """,
    re.VERBOSE,
)
_ERROR = caseless(
    r"""
      error | \berr\b | \berrno | exception | \bfail(?:ed|ure|s|ing)?\b | \bcritical\b | abort | \bpanic
    | \bcan(?:not|'t)\b | \bcould\ not\b | \bunable\ to\b | \bdenied\b | \brefused\b | \bunreachable\b
    | \btimed?[\s-]?out\b
    | \bkill(?:ed|ing)\b | \bcorrupt | \blost\b | \binvalid\b | \bnot\ (?:found|responding|available|ready|valid)\b
    | \bno\ such\b | \bnot\ enough\b | \bgiving\ up\b | \bimproper
    | \bunhandled\b | \bsegfault | \bterminat(?:ed|ing)\b | \breset\ by\b | \bbroken\b | \bexceed(?:ed|s)\b
    | \bstale\b | \block-?up\b | \bstall(?:ed)?\b | \bdead\b | \bcrash | \bevict | \bpreempt | \bheld\b | \bshutdown\b
    | \bdown\b | \bexpired?\b | \bmismatch | \bincompatible\b | \bundefined\b | \bmissing\b | \bunsupported\b
    | \bNVRM: | \bdisconnect | \breboot | \bfull\b | \bdegraded\b | \bunexpected | \brejected\b
    """,
    re.VERBOSE,
)
_WARNING = caseless(r"\bwarn(?:ing)?s?\b|\wWarning\b|\bdeprecat")
_CALM_LEVEL = re.compile(r"\b(?:DEBUG|INFO|NOTICE|TRACE)\b")
_OVERCOME = caseless(
    r"""
      \b(?:will\ (?:retry|try\ again)|retry(?:ing)?|retries\ left|retried|attempt\ \#?\d+|trying\
      again|recovered|resolved|resuming|succeeded)\b
    | \bfall(?:ing|s)?\ ?back\b | \bignor(?:ed|ing)\b | \bskipp(?:ed|ing)\b | \bcontinu(?:e|ing)\b
    | \breconnect(?:ed|ing)\b
    | \bcorrected\b | \bnon-?fatal\b | \bbacking\ off\b | \bnot\ critical\b | \bharmless\b
    """,
    re.VERBOSE,
)
_GIVEN_UP = caseless(
    r"retries\ exceeded|max(?:imum)?\ (?:number\ of\ )?retries|giv(?:ing|en)\ up|no\ more\ retries"
    r"|after\ \d+\ (?:attempts|retries)|retries\ exhausted|retry (?:count|limit) exceeded",
)  # fmt: skip


def _prefix_tree(words: Iterable[bytes]) -> bytes:
    """A pattern for any of the words, in which common beginnings are looked at once."""
    tails: dict[bytes, list[bytes]] = {}
    for word in words:
        tails.setdefault(word[:1], []).append(word[1:])
    branches = [
        re.escape(first) + (b"" if b"" in rest else _prefix_tree(rest)) for first, rest in sorted(tails.items())
    ]
    return branches[0] if len(branches) == 1 else b"(?:" + b"|".join(branches) + b")"


_ANY_STEM = re.compile(_prefix_tree(_STEMS))


def may_be_bad(line: bytes) -> bool:
    """False if `gravity` is PLAIN for certain; many times as fast."""
    return _ANY_STEM.search(line.lower()) is not None


def hasty_gravity(line: bytes) -> Gravity:
    """How bad a line looks at a glance, for logs that have more kinds of bad lines than can be looked at."""
    if TRACEBACK.encode() in line:
        return Gravity.FATAL
    return Gravity.ERROR if b"error" in line.lower() else Gravity.PLAIN


def gravity(line: str) -> Gravity:
    """How bad a line looks."""
    lower = line.lower()
    if not _ERROR.search(lower) and not _FATAL.search(lower):
        return Gravity.NOTICE if _WARNING.search(lower) else Gravity.PLAIN
    lower = _HARMLESS.sub(" ", lower)
    if _is_overcome(lower):
        return Gravity.NOTICE
    if _FATAL.search(lower):
        return Gravity.FATAL
    if not _ERROR.search(lower):
        return Gravity.NOTICE if _WARNING.search(lower) else Gravity.PLAIN
    return Gravity.NOTICE if _WARNING.search(lower) or _CALM_LEVEL.search(line) else Gravity.ERROR


def overcome(line: str) -> bool:
    """True if the line tells that the program goes on in spite of a failure: another try, another way."""
    return _is_overcome(line.lower())


def _is_overcome(lower: str) -> bool:
    return _OVERCOME.search(lower) is not None and _GIVEN_UP.search(lower) is None
