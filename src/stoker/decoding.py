"""Messages about damaged bytes and wrong file formats, and exceptions of decoders.

msgspec and `json` raise more than DecodeError: ValueError for text that is not UTF-8, RecursionError for deep nesting,
MemoryError and OverflowError for impossible lengths.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.errors import ConfigError

__all__ = ["UNREADABLE", "read_text", "why_not_json"]

T = TypeVar("T")

UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError, MemoryError, OverflowError)
"""All exceptions that msgspec's decoders and `json` raise for damaged bytes."""
HEAD_BYTES = 256
"""Number of bytes at the start of a file that `describe_non_text_format` needs."""
_TO_UTF8 = "save it as UTF-8 (iconv -f {} -t UTF-8 OLD > NEW)"
_UTF16 = f"is UTF-16 text, and must be UTF-8; {_TO_UTF8.format('UTF-16')}"
_FORMATS = {
    b"\xff\xfe\x00\x00": (f"is UTF-32 text, and must be UTF-8; {_TO_UTF8.format('UTF-32')}", "", ""),
    b"\xff\xfe": (_UTF16, "", ""),
    b"\xfe\xff": (_UTF16, "", ""),
    b"\x1f\x8b": ("is compressed with gzip", "unpack it (gunzip)", ".gz"),
    b"\xfd7zXZ\x00": ("is compressed with xz", "unpack it (unxz)", ".xz"),
    b"BZh": ("is compressed with bzip2", "unpack it (bunzip2)", ""),
    b"\x28\xb5\x2f\xfd": ("is compressed with zstd", "unpack it (unzstd)", ""),
    b"PK\x03\x04": ("is a zip archive (perhaps an Excel workbook)", "unpack it, or export it as text", ""),
    b"PAR1": ("is a Parquet file", "text is needed", ".parquet"),
    b"ARROW1": ("is an Arrow file", "text is needed", ".arrow"),
    b"%PDF-": ("is a PDF", "give the data as text", ""),
    b"SQLite format 3\x00": ("is an SQLite database", "export it as text", ""),
}
"""Format, advice, and the file suffix with which Stoker can read the file, by the first bytes of a file."""


def describe_non_text_format(head: bytes, *, suggest_suffix: bool = False) -> str:
    """Return why a file is not UTF-8 text, with advice: `is UTF-16 text, …`. Return "" for UTF-8 text.

    Args:
        head: The first `HEAD_BYTES` of the file.
        suggest_suffix: True to advise a new suffix (`.gz`, `.parquet`) under which Stoker can read the file.
    """
    for magic, (what, advice, ending) in _FORMATS.items():
        if head.startswith(magic):
            advice = f"give its name the ending {ending}" if suggest_suffix and ending else advice
            return f"{what}; {advice}" if advice else what
    if head and not head.strip(b"\0"):
        return "is damaged: it begins with zero bytes, as after a crash of its host; restore it from a copy"
    pairs = len(head) // 2
    if pairs >= 2 and any(head[first : 2 * pairs : 2].count(0) > 0.8 * pairs for first in (0, 1)):
        return _UTF16
    return "contains binary data, but must be text" if head.count(0) > len(head) // 8 else ""


def describe_invalid_utf8(data: bytes) -> str:
    """Return the place of the first invalid byte in `data`, with advice; "" if all bytes are valid."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        place = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        return f"line {number}: {invalid_byte_message(place, data[error.start])}"
    return ""


def invalid_byte_message(place: int, byte: int) -> str:
    """Return the error text for a byte that is not UTF-8. `place`: the byte's column, from 1."""
    return f"byte {place} (0x{byte:02x}) is not UTF-8 text; if it is Latin-1, {_TO_UTF8.format('LATIN1')}"


def read_json(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE):
        return None


def why_not_json(data: bytes, error: BaseException) -> str:
    """Return why `data` is not JSON: `is UTF-16 text …`, or the decoder's message.

    Args:
        data: The bytes.
        error: The decoder's exception.
    """
    what = describe_non_text_format(data[:HEAD_BYTES])
    if not what and (where := describe_invalid_utf8(data)):
        what = where.removeprefix("line 1: ") if b"\n" not in data.strip() else where
    return what or str(error)


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file without its byte order mark.

    Args:
        path: The file.

    Raises:
        ConfigError: The file has another format, or is not UTF-8 at the named line.
        OSError: The file cannot be read.
    """
    data = path.read_bytes()
    if what := describe_non_text_format(data[:HEAD_BYTES]):
        raise ConfigError.in_file(path, what)
    if where := describe_invalid_utf8(data):
        line, _, what = where.removeprefix("line ").partition(": ")
        raise ConfigError.in_file(path, what, line=int(line))
    return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
