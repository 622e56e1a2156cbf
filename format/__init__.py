"""Range's bytes on disk: pure functions and dataclasses, no I/O, no threads (see SPEC.md)."""
