"""MkDocs hooks: add the linked files outside docs/, and check that the site loads nothing from other hosts.

Links in the pages are relative to the repository, so they work on GitHub, but MkDocs copies only docs/. These hooks
follow the links, add each file under repository/ and rewrite the site's links. A Markdown file or a text file becomes a
page, a folder becomes a page with its list of files, and a JSON or binary file is copied.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
_COPIED = {".json", ".svg"}
"""Suffixes of text files that are copied and get no page."""
_OTHER_HOST = re.compile(
    r"""(<(link|script|img|iframe)\b[^>]*?(href|src)=|url\(|@import\s)["']?(https?:)?//[^\s"')>]*"""
)

_WRAPPED_CELLS = ".rst-content .wy-table-responsive table td { white-space: normal; }"
"""The theme would keep each cell on one line."""

_sources: dict[str, Path] = {}
"""The repository file of each page of the site."""


def on_files(files: Any, config: Any) -> Any:
    """Add every file that links from docs/ reach."""
    _sources.clear()
    ahead = [DOCS / file.src_uri for file in files.documentation_pages()]
    seen = set(ahead)
    for path in ahead:
        address = _address(path)
        _sources[address] = path
        if files.get_file_from_path(address) is None:
            files.append(_file(path, address, config))
        if path.suffix == ".md":
            found = {target for link, _ in _links(path.read_text()) if (target := _target(path, link))}
        elif path.is_dir():
            found = set(path.glob("*.md"))
        else:
            continue
        ahead += sorted(found - seen)
        seen |= found
    style = HtmlFormatter(style="default").get_style_defs(".highlight")
    files.append(File.generated(config, "generated.css", content=f"{style}\n{_WRAPPED_CELLS}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Make links to repository files point to their pages."""
    here = page.file.src_uri
    path = _sources.get(here)
    if path is None or path.suffix != ".md":
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        target = _target(path, match[1])
        if target is None:
            return match[0]
        return f"]({os.path.relpath(_address(target), Path(here).parent)}{match[2] or ''})"

    return _outside_fences(markdown, lambda text: _LINK.sub(rewritten, text))


def on_post_build(config: Any) -> None:
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css") and (match := _OTHER_HOST.search(path.read_text())):
            raise PluginError(f"{path.relative_to(config.site_dir)} loads from another host: {match[0]}")


def _address(path: Path) -> str:
    """Return the path within the site of this file or folder."""
    if path.is_dir():
        path = path / "index.md"
    elif path.suffix != ".md" and not path.is_relative_to(DOCS) and _is_shown(path):
        path = path.with_name(f"{path.name}.md")
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(ROOT).as_posix()}"


def _target(page: Path, link: str) -> Path | None:
    """Return the linked file, or the folder or its README. None for links outside the repository."""
    path = (page.parent / link).resolve()
    if ":" in link or not path.is_relative_to(ROOT) or not path.exists():
        return None
    readme = path / "README.md"
    return readme if readme.exists() else path


def _is_shown(path: Path) -> bool:
    return path.suffix not in _COPIED and b"\0" not in path.read_bytes()


def _file(path: Path, address: str, config: Any) -> File:
    if path.suffix == ".md" or not address.endswith(".md"):
        return File.generated(config, address, abs_src_path=str(path))
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        entries = [entry for entry in sorted(path.iterdir()) if entry.name != "__pycache__"]
        lines = [
            f"- [{_title(entry)}]({entry.name})" if entry.suffix == ".md" else f"- `{entry.name}`" for entry in entries
        ]
        return File.generated(config, address, content="\n".join([f"# {name}", "", *lines, ""]))
    language = {".py": "python", ".toml": "toml", ".sh": "bash"}.get(path.suffix, "text")
    return File.generated(config, address, content=f"# {name}\n\n~~~~~~{language}\n{path.read_text()}\n~~~~~~\n")


def _title(page: Path) -> str:
    return page.read_text().partition("\n")[0].lstrip("# ")


def _links(text: str) -> list[tuple[str, str]]:
    return _LINK.findall(_FENCE.sub("", text))


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])
