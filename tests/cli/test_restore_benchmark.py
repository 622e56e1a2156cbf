"""The benchmark's counts do not depend on the object size, and the assertion can fail."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from rangekv.format.errors import UsageError
from rangekv.format.geometry import ModelGeometry

from rangectl.ablations import ABLATIONS, CLAIMED_LATER
from rangectl.benchmark import run_benchmark
from rangectl.benchmark_plan import Setup
from rangectl.benchmark_plot import draw
from rangectl.benchmark_report import Report
from rangectl.benchmark_tables import human
from rangectl.concurrency import ALONE, BESIDE, RESTORES, SAVES
from rangectl.work_units import work_units

MIB = 1 << 20
MODEL = ModelGeometry(layer_count=32, token_bytes=4096, block_tokens=8)


def setup_at(folder: Path, **changes: object) -> Setup:
    """The default geometry with 128 MiB of payload: a store of eight packs of 2 MiB stripes."""
    values = {
        "folder": folder,
        "model": MODEL,
        "payload_bytes": 128 * MIB,
        "repeat": 1,
        "seed": 3,
        "allow_buffered": True,
        "thread_count": 2,
        "bank_count": 4,
        **changes,
    }
    return Setup(**values)


def run_quietly(setup: Setup) -> Report:
    return run_benchmark(setup, lambda done_bytes: None)


@pytest.fixture(scope="module")
def report(module_path: Path) -> Report:
    """One run with everything that can be asked for, but fio."""
    return run_quietly(
        setup_at(
            module_path,
            compute_seconds=0.001,
            ablations=tuple(ABLATIONS),
            claim_delay_seconds=0.01,
            concurrency=(4, 1),
        )
    )


def test_the_default_points_are_those_of_the_paper(tmp_path: Path) -> None:
    points = setup_at(tmp_path, payload_bytes=2048 * MIB).points()
    assert [(p.object_bytes // MIB, p.objects, p.layerwise) for p in points] == [
        (32, 64, False),
        (8, 256, False),
        (2, 1024, False),
        (1, 2048, False),
        (1, 2048, True),
    ]


def test_counts_are_equal_at_every_granularity_on_32_layers(report: Report) -> None:
    counts = [point.arms["range"].counts for point in report.points]
    assert len(counts) == 5
    for name in ("reads", "scatters", "layer_events", "payload_allocations", "leases_taken"):
        assert len({count[name] for count in counts}) == 1, name
    assert report.faults() == []
    first = counts[0]
    assert first["records_selected"] == 2
    assert first["leases_taken"] == 1
    assert first["scatters"] == 2 * 32, "one copy per record and layer"
    assert first["layer_events"] == 32
    assert first["payload_allocations"] == 0
    assert first["checksum_pages"] == 128 * MIB // (256 << 10)
    assert first["writes"] == 2 * 32


def test_direct_placement_reads_into_the_blocks_and_copies_nothing(report: Report) -> None:
    if report.path != "posix-direct":
        pytest.skip("no direct I/O here")
    for point in report.points:
        counts = point.arms["range_direct"].counts
        assert (counts["scatters"], counts["payload_allocations"]) == (0, 0)
        assert counts["direct_spans"] == counts["reads"] == 2 * 32, "one per record and layer"
        assert counts["read_calls"] == counts["reads"]
        assert (counts["layer_events"], counts["leases_taken"]) == (32, 1)


def test_the_control_pays_for_every_object(report: Report) -> None:
    for point in report.points:
        counts = point.arms["control"].counts
        for name in ("hashes", "opens", "reads", "scatters", "writes"):
            assert counts[name] == point.point.objects, name


def test_the_same_assertion_fails_when_pieces_do_not_join(tmp_path: Path) -> None:
    split = run_quietly(setup_at(tmp_path, payload_bytes=64 * MIB, join_pieces=False))
    faults = split.faults()
    for name in ("records_selected", "checksum_pages"):
        assert any(name in fault for fault in faults), faults


def test_json_is_what_the_contract_says(rangectl, tmp_path: Path) -> None:
    done = rangectl(
        *("restore-benchmark", "--dir", tmp_path, "--payload", "32MiB", "--repeat", 3),
        *("--allow-buffered", "--json"),
    )
    assert (done.status, done.err) == (0, "")
    fields = done.json
    assert list(fields)[:9] == [
        *("schema", "ok", "payload_bytes", "layers", "block_tokens", "token_bytes"),
        *("seed", "path", "filesystem"),
    ]
    assert fields["read_workers"] == 8
    assert fields["schema"] == "rangectl.restore-benchmark/1"
    assert fields["path"] in ("posix-direct", "posix-buffered")
    assert [point["object_bytes"] for point in fields["points"]] == [
        *(32 * MIB, 8 * MIB, 2 * MIB, MIB),
        MIB,
    ]
    for point in fields["points"]:
        assert list(point)[:4] == ["objects", "object_bytes", "layerwise", "arms"]
        in_place = {"range_direct", "scattered"}
        assert set(point["arms"]) - in_place == {"ceiling", "range", "control"}
        assert (in_place <= set(point["arms"])) == (fields["path"] == "posix-direct")
        for arm in point["arms"].values():
            for samples in ("seconds", "cpu_seconds", "first_layer_seconds"):
                assert len(arm[samples]) == 3
            assert all(s > 0 for s in arm["seconds"])
            assert arm["ratio_interval"] is None, "three pairs carry no interval"
        assert point["arms"]["ceiling"]["ratio_to_ceiling"] == 1.0
    assert os.listdir(tmp_path) == [], "everything temporary is gone"


def test_direct_reads_are_proved_by_the_kernel(report: Report) -> None:
    samples = [s for point in report.points for arm in point.arms.values() for s in arm.samples]
    if report.path != "posix-direct" or samples[0].physical_read_bytes is None:
        pytest.skip("no direct I/O here, or a kernel that does not count it")
    assert all(s.physical_read_bytes >= 128 * MIB for s in samples)


def test_a_payload_of_no_whole_objects_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a whole number"):
        setup_at(tmp_path, payload_bytes=MIB + 4096).points()


def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def interrupted(self: object, *args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rangectl.control_arm.PerObjectStore.restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_quietly(setup_at(tmp_path, payload_bytes=64 * MIB))
    assert os.listdir(tmp_path) == []


def test_each_ablation_pays_its_cost_and_no_other(report: Report) -> None:
    for result in report.points:
        objects, arm = result.point.objects, result.arms["range"].counts
        assert set(result.ablated) == {*ABLATIONS, CLAIMED_LATER}
        named = result.ablated["scalar-index"].counts
        assert (arm["hashes"], named["hashes"]) == (0, objects)
        issued = result.ablated["object-issue"].counts
        assert issued["syscalls"] == max(objects, arm["reads"]), "one native read an object"
        for name, ablated in result.ablated.items():
            for count in ("reads", "scatters", "checksum_pages", "leases_taken", "lookups"):
                assert ablated.counts[count] == arm[count], (name, count)


def test_what_is_claimed_later_is_read_ahead_and_without_prefetch_is_not(report: Report) -> None:
    for result in report.points:
        ahead = result.ablated[CLAIMED_LATER].counts["banks_ahead"]
        # How many depends on the disk: more are begun as some return.
        assert 1 <= ahead <= min(3, result.arms["range"].counts["reads"]), "all banks but one"
        assert result.ablated["no-prefetch"].counts["banks_ahead"] == 0


def test_saves_write_as_often_whatever_the_object_size(report: Report) -> None:
    for result in report.points:
        assert set(result.saves) == {"raw", "range", "control"}
        counts = result.saves["range"].counts
        assert (counts["writes"], counts["syscalls"]) == (64, 64), "one a record and layer"
        assert counts["gathers"] == report.points[0].saves["range"].counts["gathers"]
        assert result.saves["control"].counts["writes"] == result.point.objects
        assert result.arms["range"].counts["writes"] == counts["writes"]
        assert result.saves["raw"].counts["writes"] == result.arms["ceiling"].counts["reads"]


def test_work_units_are_those_of_the_paper(report: Report) -> None:
    for result in report.points:
        objects = result.point.objects
        units = work_units(result, "range")
        assert (units["lookups"], units["leases"], units["records"]) == (1, 1, 2)
        assert units["syscalls"] == units["reads"]
        control = work_units(result, "control")
        assert control["lookups"] == control["reads"] == control["copies"] == objects
        assert control["syscalls"] == 3 * objects
        assert control["leases"] is None, "the control has no such thing"


def test_many_at_once_take_one_lease_and_all_layers_each(report: Report) -> None:
    found = report.concurrency
    assert found is not None
    assert (found.requests, found.saves, found.request_bytes) == (4, 2, 16 * MIB)
    for arm in found.arms.values():
        assert list(arm.at_once) == [1, 4]
        beside = arm.together[RESTORES, BESIDE]
        for got in (*arm.at_once.values(), beside):
            leases = got.counts["leases_taken"] - got.counts["saves_published"]
            assert (leases, got.counts["layer_events"]) == (4, 4 * 32), "a save leases what it adds"
        assert arm.together[RESTORES, ALONE].counts["saves_published"] == 0
        for kind in (ALONE, BESIDE):
            assert arm.together[SAVES, kind].counts["saves_published"] == 2


def test_exposed_time_is_told_of_every_arm_that_has_layers(report: Report) -> None:
    for result in report.points:
        exposed = {arm: seconds for arm, seconds, _ in result.exposed(0.001)}
        assert set(exposed) == set(result.arms)
        assert result.exposed(0.0) == []


def test_the_report_has_every_table_and_json_every_figure(report: Report) -> None:
    lines = list(human(report))
    for head in (
        *("objects ", "ratio ", "work of ", "saved as ", "exposed at 1 ms a layer"),
        *("ablation, seconds added", "4 restores of 16 MiB"),
    ):
        assert sum(line.startswith(head) for line in lines) == 1, head
    fields = json.loads(json.dumps(report.as_json()))
    assert fields["concurrency"]["arms"]["range"]["at_once"]["4"]["rate_ratio"] > 0
    assert len(fields["work_units"]) == len(report.points) * len(report.points[0].arms)
    for point in fields["points"]:
        assert set(point["ablations"]) == set(ABLATIONS)
        assert point["ablations"]["no-prefetch"]["against"] == CLAIMED_LATER
        assert len(point["compute"]["range"]["exposed_seconds"]) == 1
        assert point["saves"]["raw"]["ratio_to_raw"]["median"] == 1.0


def test_an_unknown_ablation_is_refused(rangectl, tmp_path: Path) -> None:
    refused = rangectl("restore-benchmark", "--dir", tmp_path, "--ablate", "scalar-index,hope")
    assert refused.status == 2
    assert "hope" in refused.err


def test_requests_that_cannot_share_the_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="3 requests cannot share"):
        setup_at(tmp_path, concurrency=(3,)).points()


@pytest.mark.parametrize("name", ["picture.svg", "picture.png"])
def test_a_plot_is_drawn(report: Report, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    draw(report, tmp_path / name)
    assert (tmp_path / name).read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


def test_a_plot_without_matplotlib_names_the_extra(
    rangectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = rangectl("restore-benchmark", "--dir", tmp_path, "--plot", tmp_path / "a.svg")
    assert (refused.status, os.listdir(tmp_path)) == (2, [])
    assert "rangekv[plot]" in refused.err


def test_a_plot_of_no_known_kind_is_refused(rangectl, tmp_path: Path) -> None:
    refused = rangectl("restore-benchmark", "--dir", tmp_path, "--plot", tmp_path / "a.pdf")
    assert refused.status == 2
    assert ".svg or .png" in refused.err


def test_without_fio_the_ceiling_by_fio_is_refused(
    rangectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = rangectl("restore-benchmark", "--dir", tmp_path, "--fio")
    assert refused.status == 2
    assert "fio is not installed" in refused.err


@pytest.mark.skipif(shutil.which("fio") is None, reason="no fio here")
def test_fio_reads_the_same_spans(tmp_path: Path) -> None:
    report = run_quietly(setup_at(tmp_path, payload_bytes=32 * MIB, fio=True))
    for result in report.points:
        assert result.arms["fio"].counts["reads"] == result.arms["ceiling"].counts["reads"]
    assert report.faults() == [], "the kernel counted what fio read"
