"""One process of little memory that looks at a store whose files claim to be enormous.

    python -m support.hungry STORE

prints the reason that inspection finds, then the one that an open finds.
"""

from __future__ import annotations

import sys

from rangekv.engine.inspection import read_store

from support.fuzz import limit_memory
from support.stores import AnyFiles, open_store


def main(path: str) -> None:
    limit_memory()
    print(read_store(path, AnyFiles()).reason)
    store = open_store(path)
    print(store.open_result.reason)
    store.abandon()


if __name__ == "__main__":
    main(sys.argv[1])
