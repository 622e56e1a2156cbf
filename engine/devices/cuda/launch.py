"""Owns the order of kernel launches in this process: one at a time, whatever thread they come from.

It launches nothing itself and says nothing of streams: work on the device runs as it did.
"""

from __future__ import annotations

import threading

# Triton publishes a compiled kernel before its binary is loaded, and loading it lets other threads
# run: a second worker would launch what is not there yet. A launch takes microseconds.
LAUNCH = threading.Lock()
