"""How bad a line of a log looks, from its words alone.

The words are those of severity ("error", "failed", "refused"), whatever program wrote them. What only looks bad is
taken out first: the names of metrics (`val_error=0.2`), settings (`timeout=60`), counts of none (`0 errors`). A line
that tells of another try, or of a warning, is a notice: it stands in the context of a failure, and begins none.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable

from stoker.manager.advice.logs.caseless import caseless


class Gravity(enum.IntEnum):
    """How bad a line looks."""

    PLAIN = 0
    NOTICE = 1
    ERROR = 2
    FATAL = 3


_STEMS = (
    b"err",
    b"exception",
    b"fail",
    b"critical",
    b"abort",
    b"panic",
    b"cannot",
    b"can't",
    b"denied",
    b"refused",
    b"unreachable",
    b"timed",
    b"timeout",
    b"kill",
    b"corrupt",
    b"lost",
    b"invalid",
    b"unhandled",
    b"segfault",
    b"segmentation",
    b"terminat",
    b"broken",
    b"exceed",
    b"stale",
    b"lockup",
    b"lock-up",
    b"stall",
    b"dead",
    b"crash",
    b"evict",
    b"preempt",
    b"held",
    b"shutdown",
    b"down",
    b"expire",
    b"mismatch",
    b"incompatible",
    b"undefined",
    b"missing",
    b"unsupported",
    b"disconnect",
    b"reboot",
    b"full",
    b"degraded",
    b"unexpected",
    b"rejected",
    b"fatal",
    b"emerg",
    b"dumped",
    b"oom",
    b"uncorrectable",
    b"unrecoverable",
    b"cancelled",
    b"node_fail",
    b"***",
    b"traceback",
    b"interrupt",
    b"warn",
    b"deprecat",
    b"nvrm",
    b"could not",
    b"unable to",
    b"time out",
    b"time-out",
    b"no such",
    b"reset by",
    b"out of memory",
    b"not found",
    b"not responding",
    b"not available",
    b"not ready",
    b"not valid",
    b"not enough",
    b"giving up",
    b"improper",
)
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
