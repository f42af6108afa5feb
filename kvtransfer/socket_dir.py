"""The directory of the unix sockets over which descriptors and handles move: the same for all workers of a user, and closed to everybody else."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from kvtransfer.errors import NoTransportError

MAX_SOCKET_NAME_BYTES = 40
"""Longest file name of a socket in it."""
_MAX_PATH_BYTES = 107  # sockaddr_un, without the closing zero


def open_socket_dir(configured: Path | None = None) -> Path:
    """The directory, made with mode 0700 if it is not there. Default: $XDG_RUNTIME_DIR/tandem, else /run/tandem, else tandem-<uid> in the temporary directory.

    Raises NoTransportError for one that others own or can enter, or whose path is too long for a socket.
    """
    if configured is not None:
        return _opened(configured.absolute())
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return _opened(Path(runtime).absolute() / "tandem")
    if os.access("/run", os.W_OK) or os.access("/run/tandem", os.W_OK):
        return _opened(Path("/run/tandem"))
    return _opened(Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}")


def _opened(directory: Path) -> Path:
    if len(os.fsencode(directory)) + 1 + MAX_SOCKET_NAME_BYTES > _MAX_PATH_BYTES:
        raise NoTransportError(f"the path of the socket directory {directory} is too long for a unix socket")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()  # a link leads to where somebody else wants
    except OSError as error:
        raise NoTransportError(f"the socket directory {directory} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise NoTransportError(f"the socket directory {directory} is no directory")
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NoTransportError(f"the socket directory {directory} must belong to this user and be closed to all others (mode 0700)")
    return directory
