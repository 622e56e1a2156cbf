"""A process in which Triton interprets kernels on the CPU: its switch is read at import."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

Call = Callable[..., Any]


@contextmanager
def process(**environment: str) -> Iterator[Call]:
    """Yield a function that calls another in a fresh process with that environment.

    What is called must be importable (tests/support), its arguments and result picklable.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        with mock.patch.dict(os.environ, environment):
            pool.submit(os.getpid).result()  # it starts now, with this environment
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()
