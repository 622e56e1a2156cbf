"""The PATH of a verb: a store, or a directory above stores.

Owns the rule that finds the store which is meant; never opens one.
"""

from __future__ import annotations

import os
from glob import escape, glob

from rangekv.engine.stores import find_stores
from rangekv.format.errors import EnvironmentFault, StoreMissing, UsageError


def stores_at(path: str) -> list[str]:
    """Return the stores that `path` is or stands above, at least one; raises StoreMissing."""
    found = find_stores(path)
    if found:
        return found
    if not os.path.exists(path):
        raise StoreMissing("no-store", "there is no such directory", path=path)
    if not os.path.isdir(path):
        raise UsageError(
            "not-a-directory", "found a file, expected the directory of a store", path=path
        )
    if os.path.islink(path) and find_stores(os.path.realpath(path)):
        raise EnvironmentFault(
            "symlink", "the store directory is a symbolic link; give its real path", path=path
        )
    for place in (path, *glob(f"{escape(path)}/*"), *glob(f"{escape(path)}/*/*")):
        if os.path.isdir(place) and not os.access(place, os.R_OK | os.X_OK):
            raise EnvironmentFault("permission", "this user may not list the directory", path=place)
    raise StoreMissing(
        "no-store",
        "no store here and none below; create one with rangectl init",
        path=path,
    )


def one_store(path: str) -> str:
    """Return the one store that `path` means; raises StoreMissing, or UsageError for several."""
    found = stores_at(path)
    if len(found) > 1:
        names = ", ".join(os.path.relpath(one, path) for one in found)
        raise UsageError(
            "several-stores", f"{len(found)} stores lie below; name one: {names}", path=path
        )
    return found[0]
