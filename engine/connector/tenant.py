"""Which token tree a request belongs to: the digest of what separates it from all others.

User text goes into a digest and nowhere else; never decides whether a request is eligible.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack
from rangekv.format.records import NO_SALT


def root_digest(request: Any) -> bytes:
    """Return the digest of a request's root: 32 bytes, all zero for a request without a salt.

    What separates requests is tagged by its kind, so that a salt never equals another kind's name.
    """
    salt = request.cache_salt
    if salt is None:
        return NO_SALT
    # JSON may carry lone surrogates, which are text to vLLM as well.
    tagged = msgpack.packb(["cache_salt", salt.encode("utf-8", "surrogatepass")])
    return hashlib.sha256(tagged).digest()
