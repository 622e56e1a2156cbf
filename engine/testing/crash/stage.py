"""The ways in which a store comes to be and is found again, for one exploration.

Owns creation and opening; what sessions then do is for scenarios and recovery.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rangekv.engine import stores
from rangekv.engine.files import Files
from rangekv.engine.store import Store, create, reformat
from rangekv.engine.testing.crash.operations import Closed, Created, Log
from rangekv.format.errors import OtherNamespace, RangeError, StoreMissing, UsageError
from rangekv.format.geometry import ModelGeometry, stripe_bytes_floor
from rangekv.format.namespace import Namespace

MODEL = ModelGeometry(layer_count=2, token_bytes=256, block_tokens=16)
UNALIGNED_MODEL = ModelGeometry(layer_count=3, token_bytes=1152, block_tokens=16)
NAMESPACE = Namespace({"model": "crash-model"})
OTHER_NAMESPACE = Namespace({"model": "crash-model", "tags": "other"})
PACK_COUNT = 4


class Placing(Enum):
    """How a store comes to be."""

    BOUND = "bound"
    BLANK = "blank"
    """Without a namespace, in its own place; the first session binds it."""
    BELOW_BLANK = "below blank/"
    """Without a namespace, in a directory of stores; it is adopted and moved."""


class Lost(Exception):
    """A store that was made is not there any more."""


@dataclass(slots=True)
class Stage:
    """One store below `root`. `created` once its creation has returned."""

    root: str
    log: Log
    model: ModelGeometry = MODEL
    placing: Placing = Placing.BOUND
    reformats: bool = False
    """Whether a process that finds the store reformats it before it opens it."""
    recovers: bool = False
    """Whether a process that finds the store keeps what its journal proves, and keeps one."""
    created: bool = False

    @property
    def capacity_bytes(self) -> int:
        """Four packs of two stripe widths."""
        return PACK_COUNT * self.model.layer_count * 2 * stripe_bytes_floor(self.model.block_bytes)

    def create(self, files: Files) -> None:
        """Make the store; note that it is there for good, and that it is warm and empty now."""
        alone = True
        if self.placing is Placing.BELOW_BLANK:
            # What a killed removal has left can come back in a power cut, cold, and is found first.
            alone = not files.exists(f"{self.root}/kv/{NAMESPACE.folder}")
            stores.create_ranks(self.root + "/kv", capacity_bytes=self.capacity_bytes, files=files)
        else:
            bound = self.placing is Placing.BOUND
            create(
                self.root + "/store",
                capacity_bytes=self.capacity_bytes,
                model=self.model if bound else None,
                namespace=NAMESPACE if bound else None,
                files=files,
            )
        self.created = True
        self.log.note(Created())
        if alone:
            self.log.note(Closed(frozenset()))

    def locate(self, files: Files, namespace: Namespace = NAMESPACE) -> str:
        """Return the path of the store; a blank one below blank/ is adopted."""
        if self.placing is not Placing.BELOW_BLANK:
            return self.root + "/store"
        return stores.resolve(
            self.root + "/kv",
            namespace=namespace,
            geometry=self.model,
            files=files,
            lock_wait_s=0,
        )

    def open(self, files: Files) -> Store:
        """Open the store as a new process would; one that was never made whole is made again.

        Raises Lost, and whatever the store raises.
        """
        try:
            if self.reformats and self.created:
                reformat(self.root + "/store", files=files, lock_wait_s=0)
                self.log.note(Closed(frozenset()))
            return self._open(files)
        except (StoreMissing, UsageError) as error:
            if self.created or not _missing(error):
                raise Lost(error.line()) if _missing(error) else error from None
        self.create(files)
        return self._open(files)

    def _open(self, files: Files) -> Store:
        try:
            return self._open_as(files, NAMESPACE)
        except OtherNamespace:
            # A reformat may have given it another one.
            return self._open_as(files, OTHER_NAMESPACE)

    def _open_as(self, files: Files, namespace: Namespace) -> Store:
        return Store.open(
            self.locate(files, namespace),
            namespace=namespace,
            model=self.model,
            files=files,
            lock_wait_s=0,
            allow_buffered=True,
            recover=self.recovers,
        )


def _missing(error: RangeError) -> bool:
    """Whether an error says that there is no store, and not that one is refused."""
    return isinstance(error, StoreMissing) or error.code == "capacity-required"
