"""Owns DROP of a namespace (D1 to D5): its folder goes with the stores of all its ranks.

It removes only what a store is made of, and only while it holds the lock of every store in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from rangekv.engine.faults import translated
from rangekv.engine.files import OS_FILES, Files
from rangekv.engine.folder import (
    JOURNAL,
    MARKER,
    PACK,
    SNAPSHOT,
    TEMP_PREFIX,
    TEMP_SUFFIX,
    Folder,
    remove_if_empty,
    sync_directory,
)
from rangekv.engine.pack import Pack
from rangekv.format.errors import NotAStore, OtherNamespace, StoreMissing, UsageError
from rangekv.format.namespace import FOLDER_DIGITS

_NAMESPACE = re.compile(rf"[0-9a-f]{{{FOLDER_DIGITS}}}", re.ASCII)
_RANK = re.compile(r"(dp-\d+-)?rank-\d+-of-\d+", re.ASCII)
_FILES = frozenset({PACK, SNAPSHOT, MARKER, JOURNAL})


@dataclass(frozen=True, slots=True)
class Removed:
    """One rank's folder that was removed, or would be."""

    path: str
    file_bytes: int
    """Of its pack file; 0 where a removal before this one has taken it already."""


def is_namespace_folder(path: str) -> bool:
    """Return whether the last part of a path is the name of a namespace's folder."""
    return _NAMESPACE.fullmatch(os.path.basename(os.path.abspath(path))) is not None


def remove_namespace(path: str, files: Files = OS_FILES, *, dry_run: bool = False) -> list[Removed]:
    """Remove the namespace's folder `path` and return the ranks that were in it.

    Nothing is removed unless every store in it can be locked and nothing else lies in it. A crash
    in the middle leaves stores that reopen cold and folders that the next call removes. Raises
    UsageError, StoreMissing, StoreLocked, OtherNamespace, UnsupportedVersion, EnvironmentFault.
    """
    path = os.path.abspath(path)
    if not is_namespace_folder(path):
        raise UsageError(
            "not-a-namespace",
            f"found {os.path.basename(path)!r}, expected the folder of a namespace, named with"
            f" {FOLDER_DIGITS} hex digits; rangectl inspect lists them",
            path=path,
        )
    if not files.exists(path):
        raise StoreMissing("no-store", "there is no such directory", path=path)
    with ExitStack() as stack:
        folders = [  # D1
            stack.enter_context(_held_folder(files, os.path.join(path, name)))
            for name in _ranks(files, path)
        ]
        removed = [
            Removed(folder.path, files.statx_at(folder.fd, PACK).size if held else 0)
            for folder, held in folders
        ]
        if not dry_run:
            with translated(path, "remove the namespace"):
                for folder, _ in folders:
                    _empty(folder)
    if not dry_run:
        with translated(path, "remove the namespace"):
            for one in removed:
                files.rmdir(one.path)  # D4
            sync_directory(files, path)  # D4
            # A rank that starts at this moment may have moved in: then the folder stays.
            remove_if_empty(files, path)  # D5
            sync_directory(files, os.path.dirname(path))  # D5
    return removed


def _ranks(files: Files, path: str) -> list[str]:
    """Return the names of the ranks' folders; raises UsageError for anything else in there."""
    with translated(path, "list the namespace"):
        fd = files.open_dir(path)
        try:
            names = sorted(files.listdir(fd))
        finally:
            files.close(fd)
    for name in names:
        if not _RANK.fullmatch(name):
            raise _foreign(os.path.join(path, name))
    return names


@contextmanager
def _held_folder(files: Files, path: str) -> Iterator[tuple[Folder, bool]]:
    """Hold one rank's folder, and its store's lock where there is a store: (folder, is one)."""
    with Folder.open(files, path) as folder:
        with translated(path, "list the store"):
            names = files.listdir(folder.fd)
        for name in sorted(names):
            if name not in _FILES and not _is_temp(name):
                raise _foreign(folder.place(name))
        if PACK not in names:
            yield folder, False
            return
        pack = Pack.open_to_write(folder, lock_wait_s=0.5, allow_buffered=True)
        try:
            _require_this_namespace(pack)
            yield folder, True
        finally:
            pack.close()


def _require_this_namespace(pack: Pack) -> None:
    """Refuse a store that says of itself that it belongs elsewhere; a destroyed one may go."""
    try:
        namespace = pack.choose(pack.read_slots()).namespace
    except NotAStore:
        return
    expected = os.path.basename(os.path.dirname(pack.folder.path))
    if namespace is not None and namespace.folder != expected:
        raise OtherNamespace(
            "other-namespace",
            f"the store belongs to namespace {namespace.folder}, expected {expected}; move it to"
            " where it belongs",
            path=pack.folder.path,
        )


def _empty(folder: Folder) -> None:
    """Remove a store's files: first the index with its prompts, then the pack file."""
    for names in ((SNAPSHOT, JOURNAL), (PACK, MARKER)):  # D2, D3
        for name in names:
            folder.unlink_if_there(name)
        folder.sync()
    for name in folder.files.listdir(folder.fd):  # D3
        if _is_temp(name):
            folder.unlink_if_there(name)
    folder.sync()


def _is_temp(name: str) -> bool:
    return name.startswith(TEMP_PREFIX) and name.endswith(TEMP_SUFFIX)


def _foreign(place: str) -> UsageError:
    return UsageError(
        "foreign-file",
        "this is no part of a store; move it away, nothing was removed",
        path=place,
    )
