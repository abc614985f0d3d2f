"""The key pairs of blocks: each is made when its block is asked for, and removed when the block is over.

A node has the key of its own block and no other, so what leaks there opens no more than that block's place: the manager
lets a block's key speak for pilots of that block alone (`manager.live.admission`).
"""

from __future__ import annotations

from zmq import curve_keypair

from stoker.errors import SessionError
from stoker.protocol.session import KeyPair, SessionFolder


def issue(folder: SessionFolder, block: str) -> None:
    """Make a block's key pair, unless it has one. Raises SessionError."""
    file = folder.block_key_file(block)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            public, secret = curve_keypair()
            folder.write_block_key(block, KeyPair(public=public.decode(), secret=secret.decode()))
    except OSError as error:
        raise SessionError(
            f"the key of block {block} cannot be written: {error}; make room at {file.parent}"
        ) from error


def issued(folder: SessionFolder, block: str) -> bool:
    """Whether a block has a key pair: its submission has begun, and it is not over."""
    try:
        return folder.block_key_file(block).exists()
    except (OSError, SessionError):
        return False


def revoke(folder: SessionFolder, block: str) -> None:
    """Remove a block's key pair: who still has it is let in no more. No-op if there is none."""
    try:
        folder.block_key_file(block).unlink(missing_ok=True)
    except (OSError, SessionError):  # the file system is away: the key is of a block without a pilot
        return
