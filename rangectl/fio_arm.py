"""A ceiling by another hand: fio reads the same spans, as many at once, into memory like ours.

Owns the command, the list of offsets and the reading of fio's answer; never judges it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from rangekv.format.errors import EnvironmentFault, UsageError

from rangectl.ceiling_arm import CeilingArm
from rangectl.measure import Sample, drop_residency, physical_read_bytes
from rangectl.raw_spans import SPAN_BYTES


def require_fio() -> str:
    """Return the path of fio; raises UsageError where there is none."""
    found = shutil.which("fio")
    if found is None:
        raise UsageError("no-fio", "--fio: fio is not installed; install it or leave --fio out")
    return found


class FioArm:
    """Replays the spans of a ceiling from a list in `folder`, `depth` at once."""

    def __init__(self, fio: str, folder: Path, ceiling: CeilingArm, depth: int) -> None:
        self._pack = ceiling.pack
        self._span_count = len(ceiling.spans)
        spans = folder / "fio-spans"
        reads = [f"{ceiling.pack} read {span.offset} {span.length_bytes}" for span in ceiling.spans]
        lines = ["fio version 2 iolog", *(f"{ceiling.pack} {step}" for step in ("add", "open"))]
        spans.write_text("\n".join([*lines, *reads, f"{ceiling.pack} close"]) + "\n")
        self._command = [
            *(fio, "--name=ceiling", "--ioengine=libaio", f"--direct={int(ceiling.direct)}"),
            *(f"--iodepth={depth}", f"--bs={SPAN_BYTES}", f"--read_iolog={spans}"),
            *("--replay_no_stall=1", "--zero_buffers=1", "--output-format=json"),
        ]

    def restore(self) -> tuple[Sample, Counter[str]]:
        """Read every span once; return cost and counts as fio tells them."""
        drop_residency(str(self._pack))
        before = physical_read_bytes()
        # Huge pages, as our banks have them: into scattered pages this would be no ceiling.
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        done = subprocess.run(
            self._command, capture_output=True, text=True, check=False, env=environment
        )
        after = physical_read_bytes()
        try:
            job = json.loads(done.stdout)["jobs"][0]
            reads, milliseconds = job["read"]["total_ios"], job["job_runtime"]
            cpu_percent = job["usr_cpu"] + job["sys_cpu"]
        except (ValueError, KeyError, IndexError) as error:
            raise _failed(done.stderr) from error
        if done.returncode or job["error"] or reads != self._span_count:
            raise _failed(done.stderr)
        seconds = milliseconds / 1000
        physical = None if before is None or after is None else after - before
        sample = Sample(seconds, seconds * cpu_percent / 100, (), physical)
        return sample, Counter(reads=reads)


def _failed(said: str) -> EnvironmentFault:
    line = said.strip().splitlines()[-1:] or ["no answer"]
    return EnvironmentFault("fio-failed", f"fio did not read the spans: {line[0]}; leave --fio out")
