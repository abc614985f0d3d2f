"""Check texts in a site file for options that Stoker sets itself, for job arrays, and for control characters.

Stoker identifies a job by its name, folder and output, and by the output of the submit command. If a site file changed
one of these, Stoker would lose jobs and submit them repeatedly.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# ---- options that Stoker sets itself


OPTION_PREFIXES = {"slurm": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB", "grid_engine": "#$"}
"""Prefix of an option line in a submit script, by batch system."""
_NAME = "Stoker finds jobs by the names that it sets"
_FOLDER = "Stoker finds jobs by their folder; [pilot] scratch sets the folder for files of pilots"
_OUTPUT = "Stoker reads what jobs print; `stoker logs` shows it"
_ANSWER = "Stoker reads the job's id from the output of the submit command"
_PROGRAM = "a job runs Stoker's script; `worker_init` runs before the script"
_ELSEWHERE = "Stoker would not find the job"
_CLUSTERS = f"{_ELSEWHERE}; set SLURM_CLUSTERS in the environment of `stoker` instead"

_SLURM_LONG = {
    "job-name": _NAME, "chdir": _FOLDER, "workdir": _FOLDER, "output": _OUTPUT, "error": _OUTPUT, "uid": _ELSEWHERE,
    "test-only": _ANSWER, "wait": _ANSWER, "parsable": _ANSWER, "quiet": _ANSWER, "wrap": _PROGRAM,
    "clusters": _CLUSTERS,
}  # fmt: skip
_SLURM_SHORT = {
    "J": _NAME, "D": _FOLDER, "o": _OUTPUT, "e": _OUTPUT, "W": _ANSWER, "Q": _ANSWER, "M": _CLUSTERS,
}  # fmt: skip
_PBS_SHORT = {
    "N": _NAME, "o": _OUTPUT, "e": _OUTPUT, "k": _OUTPUT, "R": _OUTPUT, "I": _ANSWER, "z": _ANSWER, "C": _PROGRAM,
    "u": _ELSEWHERE,
}  # fmt: skip
_FLAGS = {"slurm": "HIOQVWhksv", "pbs": "IVXfhz"}
"""Short options that take no value. More options may follow in the same word, as in `-HJname`."""
_WORD_OPTIONS = {
    "lsf": {
        "-J": _NAME, "-cwd": _FOLDER, "-outdir": _OUTPUT, "-o": _OUTPUT, "-oo": _OUTPUT, "-e": _OUTPUT, "-eo": _OUTPUT,
        "-K": _ANSWER, "-I": _ANSWER, "-Ip": _ANSWER, "-Is": _ANSWER, "-IS": _ANSWER, "-ISp": _ANSWER,
        "-ISs": _ANSWER, "-IX": _ANSWER,
    },
    "grid_engine": {
        "-N": _NAME, "-cwd": _FOLDER, "-wd": _FOLDER, "-o": _OUTPUT, "-e": _OUTPUT, "-sync": _ANSWER,
        "-verify": _ANSWER, "-terse": _ANSWER, "-clear": _NAME, "-C": _PROGRAM, "-@": _NAME,
    },
}  # fmt: skip
_LSF_ATTACHED_VALUE_OPTIONS = ("-J", "-cwd", "-outdir", "-oo", "-o", "-eo", "-e", "-Jd", "-env", "-eptl", "-ext")
"""LSF options that accept a value in the same word, as in `-Jname`. The last four are allowed, but begin like refused
options."""
_CONDOR = {
    "executable": _PROGRAM, "shell": _PROGRAM, "cmd": _PROGRAM, "initialdir": _FOLDER, "initial_dir": _FOLDER,
    "job_iwd": _FOLDER, "iwd": _FOLDER, "output": _OUTPUT, "out": _OUTPUT, "stdout": _OUTPUT, "error": _OUTPUT,
    "err": _OUTPUT, "stderr": _OUTPUT, "dry_run": _ANSWER,
}  # fmt: skip
_PBS_WAITS = re.compile(r"block\s*=\s*[t1y]", re.IGNORECASE)
_CONDOR_KEY = re.compile(r"\s*(?:\+|my\.)?(\w+)\s*=", re.IGNORECASE)


def explain_refused_option(kind: str, line: str) -> str:
    """Return why a line of `options` is refused, or an empty text."""
    if kind == "condor":
        key = _CONDOR_KEY.match(line)
        return _format_refusal(key[1], _CONDOR[key[1].lower()]) if key and key[1].lower() in _CONDOR else ""
    if kind not in OPTION_PREFIXES:
        return ""
    if line.startswith("#"):
        if not line.startswith(OPTION_PREFIXES[kind]):
            return ""  # the line is a comment
        line = line.removeprefix(OPTION_PREFIXES[kind])
    return next((_format_refusal(word, why) for word, why in _iter_refused_options(kind, _split_words(line))), "")


def find_refused_worker_init_line(kind: str, text: str) -> tuple[str, str]:
    """Return the first line of `worker_init` that sets an option which Stoker itself sets, and why this line is
    refused. (Slurm and PBS ignore options after the first command.)
    """
    for line in text.splitlines() if kind in OPTION_PREFIXES else ():
        if line.startswith(OPTION_PREFIXES[kind]) and (why := explain_refused_option(kind, line)):
            return line, why
        if kind in _FLAGS and line.strip() and not line.startswith("#"):
            break
    return "", ""


def split_worker_init(kind: str, text: str) -> tuple[tuple[str, ...], str]:
    """Return the option lines at the start of `worker_init`, and the text without these lines."""
    lines = text.splitlines(keepends=True)
    first = next((at for at, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    options = [line for line in lines[:first] if line.startswith(OPTION_PREFIXES[kind])]
    rest = [line for line in lines[:first] if not line.startswith(OPTION_PREFIXES[kind])]
    return tuple(line.strip() for line in options), "".join((*rest, *lines[first:]))


def slurm_excluded_nodes(options: Iterable[str]) -> str:
    """Return the value of the last `--exclude` or `-x` (empty: none)."""
    value = ""
    for line in options:
        if line.startswith("#") and not line.startswith(OPTION_PREFIXES["slurm"]):
            continue
        words = _split_words(line.removeprefix(OPTION_PREFIXES["slurm"]))
        for number, word in enumerate(words):
            name, sign, given = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
            # sbatch accepts any prefix of an option's name, but a prefix up to `--exclu` could also mean --exclusive.
            if name == "-x" or (len(name) > len("--exclu") and "--exclude".startswith(name)):
                value = given if sign else "".join(words[number + 1 : number + 2])
    return value


def _format_refusal(option: str, why: str) -> str:
    return f"{option} is not allowed in a site file: {why}; remove it"


def _iter_refused_options(kind: str, words: list[str]) -> Iterator[tuple[str, str]]:
    for number, word in enumerate(words):
        if kind in _WORD_OPTIONS:
            attached = [option for option in _LSF_ATTACHED_VALUE_OPTIONS if kind == "lsf" and word.startswith(option)]
            option = max(attached, key=len, default=word)
            if option in _WORD_OPTIONS[kind]:
                yield option, _WORD_OPTIONS[kind][option]
            if kind == "grid_engine" and words[number : number + 2] in (["-w", "v"], ["-w", "p"]):
                yield f"-w {words[number + 1]}", _ANSWER
            continue
        if kind == "slurm" and word.startswith("--"):
            name = word[2:].partition("=")[0]
            # sbatch accepts a prefix of an option's name, so refuse every prefix of a forbidden option.
            yield from ((f"--{name}", why) for long, why in _SLURM_LONG.items() if name and long.startswith(name))
        elif word.startswith("-"):
            own: Mapping[str, str] = _SLURM_SHORT if kind == "slurm" else _PBS_SHORT
            for letter in word[1:]:  # as in `-J`, `-Jname` or `-HJname`
                if letter in own:
                    yield f"-{letter}", own[letter]
                if letter not in _FLAGS[kind]:
                    break
            if kind == "pbs" and "W" in word[:2] and _PBS_WAITS.search("".join(words[number : number + 2])):
                yield "-W block", _ANSWER


def _split_words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # the line has an unclosed quote
        return line.split()


# ---- job arrays: with Slurm's `--array=0-3` a block is four jobs, and each job has pilots


_SLURM_ARRAY = re.compile(r"(?:^|\s)(?:--array(?:=|\s+)|-a\s*=?)([\d,:%-]+)")
_ARRAY_INDICES = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_OTHER_ARRAYS = re.compile(r"^(?:#\S+\s+)?(?:-J\s+\d|-J\s+\S*\[\d|-t\s+\d)")
"""Pattern for job arrays of PBS (`-J 0-3`), LSF (`-J "name[1-4]"`) and Grid Engine (`-t 1-4`)."""


def max_concurrent_array_tasks(options: Sequence[str]) -> int:
    """Return how many tasks of a job array may run at once; 1 without `--array`. The last `--array` counts."""
    given = [found for line in options for found in _SLURM_ARRAY.findall(line)]
    if not given:
        return 1
    indices, _, most = given[-1].partition("%")
    count = sum(_count_array_tasks(part) for part in indices.split(","))
    return max(1, min(count, int(most)) if most.isdecimal() and int(most) else count)


def is_array_option(option: str) -> bool:
    return _OTHER_ARRAYS.search(option.replace('"', "").replace("'", "")) is not None


def _count_array_tasks(part: str) -> int:
    """Return the number of tasks in `3`, `0-3` or `0-15:4`."""
    found = _ARRAY_INDICES.fullmatch(part)
    if found is None:
        return 0
    first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
    return max(0, last - first) // max(1, step) + 1


# ---- control characters: a line break would start a new line of a submit script


def refuse_control_characters(settings: Any, *, multiline_fields: Sequence[str] = ()) -> None:
    """Raise ValueError if a text in the struct `settings` contains a control character. Fields named in
    `multiline_fields` may contain line breaks and tabs."""
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        allowed = "\n\t" if name in multiline_fields else ""
        for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
            kinds = ((each, unicodedata.category(each)) for each in text if each not in allowed)
            found = next((each for each, kind in kinds if kind in ("Cc", "Cs", "Zl", "Zp")), "")
            if found:
                what = "a line break" if found in "\r\n" else f"the control character U+{ord(found):04X}"
                raise ValueError(f"{name} = {text!r} has {what} in it; remove it")
