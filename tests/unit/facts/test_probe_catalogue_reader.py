"""The probes as read from the self-test's sources, compared with the self-test's own catalogue."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.facts import probe_catalogue_reader
from envbuild.util.errors import UsageError
from unit.support import envbuild

ROOT = Path(probe_catalogue_reader.__file__).parents[2]


@pytest.mark.slow
def test_the_catalogue_is_the_one_of_the_selftest() -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "envbuild.selftest", "--list"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert done.stdout == envbuild("test", "--list").stdout


def test_every_probe_says_what_it_does_and_needs() -> None:
    assert len(probe_catalogue_reader.known_probes()) >= 10
    for name, probe in probe_catalogue_reader.known_probes().items():
        assert probe.name == name
        assert probe.level in (*probe_catalogue_reader.LEVELS, "on-request") and probe.needs in (
            "cpu",
            "cuda",
            "script",
        )
        assert len(probe.does) > 20 and not probe.does.startswith(name), probe
    assert len({probe.does for probe in probe_catalogue_reader.known_probes().values()}) == len(
        probe_catalogue_reader.known_probes()
    ), "each has its own sentence"


def test_the_page_on_probes_has_each_with_its_level_and_device() -> None:
    page = (ROOT / "docs" / "selftest.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in page.splitlines() if line.startswith("| ")]
    documented = {name: (level, device) for names, level, device in cells[1:] for name in names.split(", ")}
    levels = {"on-request": "on request"}
    assert documented == {
        p.name: (levels.get(p.level, p.level), "GPU" if p.needs == "cuda" else "any")
        for p in probe_catalogue_reader.known_probes().values()
    }


def test_the_page_names_the_probes_for_which_no_fault_is_seeded() -> None:
    """A probe without a row in the benchmark must be listed, so that nobody believes that the benchmark covers it."""
    results = (ROOT / "benchmarks" / "results" / "faults.md").read_text(encoding="utf-8")
    seeded = {line.split("|")[2].strip() for line in results.splitlines() if line.startswith("| ")}
    page = " ".join((ROOT / "docs" / "selftest.md").read_text(encoding="utf-8").split())
    documented = page.partition("has no row for ")[2].partition(":")[0].replace(" and ", ", ").split(", ")
    assert sorted(documented) == sorted(
        p.name for p in probe_catalogue_reader.known_probes().values() if p.needs != "cuda" and p.name not in seeded
    ), "name it in docs/selftest.md (That benchmark has no row for ...), or run `make faults`"


def test_a_level_holds_those_below_it() -> None:
    step = probe_catalogue_reader.known_probes()["train.step"]
    assert [step.within(level) for level in probe_catalogue_reader.LEVELS] == [False, True, True]
    assert not any(
        probe_catalogue_reader.known_probes()["fingerprint"].within(level) for level in probe_catalogue_reader.LEVELS
    )


def test_all_unknown_names_are_reported_at_once() -> None:
    probe_catalogue_reader.refuse_unknown(["env.libs"])
    with pytest.raises(UsageError, match=r"'gemm\.crsh' \(did you mean gemm\.crash\?\); unknown probe 'x'") as caught:
        probe_catalogue_reader.refuse_unknown(["gemm.crsh", "env.libs", "x"])
    assert caught.value.code == 2
