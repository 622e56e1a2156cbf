"""Owns the translation of an OSError on a store into one clear line with an exit code.

It raises EnvironmentFault and nothing else; a call is never repeated here.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rangekv.format.errors import EnvironmentFault

CODES = {
    errno.ENOSPC: ("no-space", "free some space on this file system"),
    errno.EDQUOT: ("no-space", "raise the quota of this user"),
    errno.EFBIG: ("file-size-limit", "raise the file size limit (ulimit -f) or use a smaller size"),
    errno.EACCES: ("permission", "run as the owner of the store"),
    errno.EPERM: ("permission", "run as the owner of the store"),
    errno.EROFS: ("read-only", "mount the file system writable"),
    errno.ELOOP: ("symlink", "give the real path: a store is never reached through a link"),
    errno.ENOENT: ("missing", "it was never there, or somebody has removed it"),
    errno.ENOTDIR: ("not-a-directory", "give the path of a directory"),
    errno.ENAMETOOLONG: ("name-too-long", "give a shorter path"),
    errno.EISDIR: ("not-a-regular-file", "remove what stands in its place"),
    errno.ENXIO: ("not-a-regular-file", "remove what stands in its place"),
    errno.EMFILE: ("open-file-limit", "raise the limit of open files (ulimit -n)"),
    errno.ENOMEM: ("no-memory", "free some memory or use a smaller size"),
}


def environment_fault(error: OSError, path: str | None, doing: str) -> EnvironmentFault:
    """Return the fault for `error`, met while `doing` ("create the marker")."""
    code, remedy = CODES.get(error.errno or 0, ("io-error", "check the device and its kernel log"))
    found = os.strerror(error.errno) if error.errno else str(error)
    # A name inside the store's directory says which of its files is meant.
    name = error.filename
    if isinstance(name, str) and os.sep not in name and not (path or "").endswith(name):
        found += f" ({name})"
    return EnvironmentFault(code, f"cannot {doing}: {found}; {remedy}", path=path)


@contextmanager
def translated(path: str, doing: str) -> Iterator[None]:
    """Turn an OSError of the body into an EnvironmentFault about `path`."""
    try:
        yield
    except OSError as error:
        raise environment_fault(error, path, doing) from error
