"""`rangectl doctor`: will a directory work for stores, and how well.

Owns the order of the findings and the exit status; changes nothing and leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rangekv.engine.faults import translated
from rangekv.engine.files import OS_FILES
from rangekv.engine.inspection import read_store
from rangekv.engine.payload import requirements
from rangekv.engine.stores import find_stores
from rangekv.format.errors import ExitCode, RangeError, UsageError

from rangectl.describe import state_line
from rangectl.disk_probe import disk_findings
from rangectl.finding import Finding, judged
from rangectl.machine import available_memory, huge_pages
from rangectl.output import Output, counted, human_bytes, printable
from rangectl.scratch import scratch_directory
from rangectl.verb import Verb, json_option, path_argument

# The read and save banks of an engine with default settings, and as much again for its index.
MEMORY_FAIL_BYTES = 512 << 20
MEMORY_WARN_BYTES = 1 << 30
CORES_WARN = 4


@click.command(
    cls=Verb,
    help="Tell whether a directory will work for stores, and how well."
    " PATH is a directory that is there; a small file is written in it and removed again.",
    examples=("rangectl doctor /kv", "rangectl doctor /kv --json"),
    exits=(ExitCode.ENVIRONMENT,),
)
@path_argument
@json_option
def command(*, path: str, as_json: bool) -> int:
    """Look, print every finding with what to do, and fail if anything does."""
    if not os.path.isdir(path):
        found = "a file" if os.path.exists(path) else "nothing"
        raise UsageError("not-a-directory", f"found {found}, expected a directory", path=path)
    folder = Path(os.path.realpath(path))
    with translated(path, "try out the directory"):
        findings = [*disk_findings(folder), *_machine()]
        direct = all(one.verdict != "fail" for one in findings if one.name == "direct I/O")
        findings += [*_payload(folder, direct), _stores(path)]
    failed = any(one.verdict == "fail" for one in findings)
    fields = {"path": path, "findings": [asdict(one) for one in findings]}
    Output("doctor", as_json=as_json).result(not failed, fields, _as_text(findings))
    return ExitCode.ENVIRONMENT if failed else ExitCode.OK


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    few = "checksums and copies share them with the model; 4 or more keep up with a fast SSD"
    yield judged("cores", str(cores), warn=few if cores < CORES_WARN else None)
    free = available_memory()
    if free is not None:
        short = "the banks of an engine take 512 MiB by default; see read_banks and save_banks"
        yield judged(
            "memory",
            f"{human_bytes(free)} available",
            fail=short if free < MEMORY_FAIL_BYTES else None,
            warn=short if free < MEMORY_WARN_BYTES else None,
        )
    setting = huge_pages()
    slow = (
        "direct reads into small pages are several times slower; as root:"
        " echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    )
    yield judged("huge pages", setting, warn=slow if setting not in ("always", "madvise") else None)


def _payload(folder: Path, direct: bool) -> Iterator[Finding]:
    """Which ways payload could take here, and the proof for the one past the host."""
    there = {
        "GPU": requirements.has_gpu(OS_FILES),
        "driver": requirements.has_driver(),
        "nvidia-fs": requirements.has_nvidia_fs(OS_FILES),
        "/run/udev": requirements.has_udev(OS_FILES),
        "kvikio": requirements.importable("kvikio"),
    }
    told = ", ".join(f"{name} {'there' if found else 'missing'}" for name, found in there.items())
    yield Finding("GPU direct", "fact", told)
    for mode in ("compat", "gds"):
        lacking = requirements.missing(mode, direct=direct)
        if lacking:
            found = f"refused; missing: {', '.join(lacking)}"
        elif mode == "gds":
            found = _proof(folder)
        else:
            found = "nothing is missing"
        yield Finding(f"payload {mode}", "fact", found)


def _proof(folder: Path) -> str:
    from rangekv.engine.payload.gds_probe import PROBE_BYTES, probe

    with scratch_directory(folder, "doctor") as place:
        trial = place / "gds"
        trial.write_bytes(os.urandom(PROBE_BYTES))
        told = probe(str(trial))
    return f"{'proved' if told.proved else 'refused, unproved'}: {told.detail}"


def _stores(path: str) -> Finding:
    """What already lies there: a start is only as warm as its store."""
    states = []
    for store in find_stores(path):
        try:
            states.append(state_line(read_store(store)))
        except RangeError as error:
            states.append(error.code)
    found = counted(len(states), "store") + (f": {'; '.join(states)}" if states else "")
    bad = any(not state.startswith(("warm", "live")) for state in states)
    return judged("stores", found, warn="see rangectl inspect" if bad else None)


def _as_text(findings: Sequence[Finding]) -> Iterator[str]:
    for one in findings:
        yield f"{one.verdict:<4}  {one.name:<14}  {printable(one.found)}"
        if one.advice is not None:
            yield f"{'':22}→ {one.advice}"
    counts = {word: sum(one.verdict == word for one in findings) for word in ("ok", "warn", "fail")}
    yield ", ".join(f"{count} {word}" for word, count in counts.items())
