"""Create sessions that outlive programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.config import format_site_toml, load_sites, read_sites, write_sites
from stoker.contexts.folders import state_folder
from stoker.errors import ConfigError, SessionError
from stoker.folders import working_folder
from stoker.manager.environment.carrying import prepare_packed_environments
from stoker.manager.executor import detached, engines
from stoker.manager.executor.processes import (
    create_session_folder,
    manager_command_options,
    new_session_id,
    register_session,
)
from stoker.manager.factory.pilot_command import reject_invalid_import_paths
from stoker.manager.live.session_policies import copy_policies_into_session, create_policies_for_sites
from stoker.protocol.session import SessionFolder, is_session_folder
from stoker.site import Site


def load_listed_sites(files: Sequence[str | os.PathLike[str]]) -> tuple[Site, ...]:
    """Return the sites in these files, and the sites that the files refer to."""
    found: dict[str, Site] = {}
    for file in files or (None,):
        for site in load_sites(file):
            if found.setdefault(site.name, site) != site:
                raise ConfigError(
                    f"two sites are called {site.name}; change `name` in one of the site files", key="name"
                )
    sites = tuple(found.values())
    engines.refuse_invalid_taskvine_sites(sites)
    create_policies_for_sites(sites)
    return sites


def create_session(sites: Sequence[Site], *, place: str = "", idle_s: float = 0.0) -> SessionFolder:
    """Create a session folder with keys and site files at `place`; by default in the state folder."""
    engines.require_taskvine_programs(sites)
    name = new_session_id()
    folder = SessionFolder(place or default_session_folder(name))
    if folder.file.exists() or folder.journal.exists():
        raise SessionError(f"{folder.path} already has a session; name another folder, or leave --folder out")
    create_session_folder(folder, elsewhere="stoker up --folder DIR, or the environment variable STOKER_HOME")
    copy_policies_into_session(folder, sites, search_path=build_session_python_path())
    idle = ("--idle", f"{idle_s:g}") if idle_s else ()
    launch = detached.LaunchOptions(name, (*manager_command_options(sites), *idle))
    try:
        write_sites(folder.sites, sites, python_path=build_session_python_path())
        prepare_packed_environments(folder, sites)
        engines.write_taskvine_plans(folder, sites, session=name, python_path=build_session_python_path(), kept=True)
        folder.launch.write_bytes(msgspec.json.encode(launch))
    except OSError as error:
        raise SessionError(f"the session folder {folder.path} cannot be written: {error}") from error
    register_session(folder, name=name)  # register now, because session processes may outlive this process
    return folder


def default_session_folder(session: str) -> Path:
    return state_folder() / "sessions.d" / session


def build_session_python_path() -> str:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = list(dict.fromkeys([str(working_folder()), *filter(None, given)]))
    reject_invalid_import_paths(paths)
    return os.pathsep.join(paths)


class KeptSession(msgspec.Struct, frozen=True):
    """A session of `stoker up`. `started` is True if `kept_session` started the session."""

    session: str
    folder: Path
    started: bool


def kept_session(
    site: str | os.PathLike[str] | None = None, *, before: str = "", waiting: Callable[[str], None] = lambda _said: None
) -> KeptSession:
    """Return a site file's running session for `stoker.load(session=...)`, or start a session like `stoker up SITE`.

    Args:
        site: A site file; None for this machine.
        before: The id of a session to prefer if it has the same sites.
        waiting: Called with a message if the start takes long.

    Raises:
        SessionError: The session cannot start.
        ConfigError: The site file is invalid.
    """
    sites = load_listed_sites([site] if site is not None else [])
    texts = {each.name: format_site_toml(each) for each in sites}
    links = [link for link in (state_folder() / "sessions").glob("*") if is_session_folder(link)]
    for link in sorted(links, key=lambda link: (link.name != before, -link.lstat().st_mtime)):
        folder = SessionFolder(link.resolve())
        if not detached.is_detached(folder) or folder.end_reason():
            continue
        with suppress(SessionError, ConfigError):  # skip a damaged session
            name = detached.session_name(folder)
            there = {key: format_site_toml(one) for key, one in read_sites(folder.sites).items()}
            if there == texts and (name == before or detached.is_manager_up(folder)):
                return KeptSession(name, folder.path, started=False)
    made = create_session(sites)
    try:
        detached.start_session_manager(made, on_wait=waiting)
    except BaseException:
        if not made.file.exists():  # the manager was never reachable
            detached.delete_session(made)
        raise
    return KeptSession(made.read().session, made.path, started=True)
