"""What `stoker up --dry-run` shows: the exact submit script of a site, and the command that would submit it."""

from __future__ import annotations

from stoker.manager.executor import detached
from stoker.manager.protocol.session import SessionFolder
from stoker.site import Site

_EXAMPLE = "k3v9"
"""Stands for the id of the session, which a dry run does not have."""


def show(site: Site, *, place: str = "") -> list[str]:
    """The lines for one site. Raises ConfigError for settings that its batch system cannot have."""
    from stoker.manager.factory.batches import SUBMIT_COMMANDS, dry_run  # imports Parsl, which takes a while

    folder = SessionFolder(place or detached.default_place(_EXAMPLE))
    text = dry_run(site, session=_EXAMPLE, folder=folder, block="b1", python_path=detached.python_path())
    blocks = f"{site.pilot.init_blocks} at first, up to {site.pilot.max_blocks}"
    how = f"submitted with {SUBMIT_COMMANDS.get(site.provider.kind, 'kubectl')}" if not site.is_local else "run here"
    head = f"# site {site.name}: block b1 of session {_EXAMPLE} (the real one has an id of its own); {how}, {blocks}"
    return [head, *text.rstrip("\n").split("\n")]
