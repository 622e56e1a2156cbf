"""Where a rank's lookup socket lies: a private folder with one name per engine and rank.

Makes and checks that folder and sweeps what dead processes left; never opens a connection to ask.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
import struct

from rangekv.format.errors import EnvironmentFault

_PATH_BYTES_MAX = 107  # sun_path without its final zero byte
UNBORN_SUFFIX = "~"  # of a socket that does not listen yet
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def private_folder() -> str:
    """Return the folder of this user's lookup sockets, made with mode 0700 if it is not there.

    Raises EnvironmentFault when something of that name exists which others could have prepared.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = runtime if os.path.isdir(runtime) and len(runtime) < 60 else "/tmp"
    folder = os.path.join(base, f"rangekv-{os.geteuid()}")
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise EnvironmentFault(
            "socket-folder", f"cannot be made ({error.strerror}); set XDG_RUNTIME_DIR", path=folder
        ) from None
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise EnvironmentFault(
            "socket-folder",
            f"is not a private folder (mode {found.st_mode & 0o7777:04o}, owner {found.st_uid}), "
            f"expected a directory of uid {os.geteuid()} with mode 0700; remove it or set "
            "XDG_RUNTIME_DIR",
            path=folder,
        )
    return folder


def socket_path(folder: str, engine_id: str, rank: int) -> str:
    """Return the socket of one rank of one running engine.

    Both sides know `engine_id`, so the name is also the meeting point where vLLM does not carry
    the worker's handshake to the scheduler side.
    """
    name = hashlib.sha256(engine_id.encode()).hexdigest()[:16]
    path = os.path.join(folder, f"{name}-rank-{rank}.sock")
    if len(os.fsencode(path + UNBORN_SUFFIX)) > _PATH_BYTES_MAX:
        raise EnvironmentFault("socket-folder", "is too long for a socket name", path=folder)
    return path


def sockets(folder: str) -> list[str]:
    """Return the paths of all sockets in `folder`, dead ones included."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(".sock"))
    return [os.path.join(folder, name) for name in names]


def sweep(folder: str) -> None:
    """Remove the sockets in `folder` that no process listens on any more."""
    for path in sockets(folder):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            if probe.connect_ex(path) == errno.ECONNREFUSED:
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    continue  # another starting engine swept it


def is_same_user(connection: socket.socket) -> bool:
    """Say whether the process at the other end runs as this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return bool(_PEER_CREDENTIALS.unpack(raw)[1] == os.geteuid())
