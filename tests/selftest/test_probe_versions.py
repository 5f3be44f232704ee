"""A changed probe gets a new version, and evidence of the previous version does not count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from envbuild.facts import probe_catalogue_reader
from selftest import probe_versions
from selftest.probe_versions import CODE, ROOT, code

pytestmark = pytest.mark.slow


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the self-test's sources."""
    shutil.copytree(ROOT / "envbuild" / "selftest", tmp_path / "envbuild" / "selftest")
    return tmp_path


def edit(tree: Path, file: str, old: str, new: str) -> None:
    path = tree / "envbuild" / "selftest" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def differing(tree: Path) -> set[str]:
    before, after = code(), code(tree)
    return {name for name in before if before[name] != after[name]}


def test_every_probe_has_the_code_of_its_version() -> None:
    recorded = json.loads(CODE.read_text(encoding="utf-8"))
    found = probe_versions.changed(probe_catalogue_reader.versions(), recorded)
    assert not found, f"changed, with their version as before: {', '.join(found)}; run `make probe-versions`"
    assert (
        set(recorded)
        == set(probe_catalogue_reader.versions())
        == {*probe_catalogue_reader.known_probes(), probe_catalogue_reader.HARNESS}
    )


def test_a_changed_number_is_a_change_of_the_probes_that_use_it(tree: Path) -> None:
    edit(tree, "probes/hardware/transfer.py", "1", "2")
    assert differing(tree) == {"transfer"}
    edit(tree, "harness/process_ending_verdict.py", "status is None", "status is not None")
    assert differing(tree) == {"transfer", "harness"}
    edit(tree, "numerics/element_comparison.py", "0.999", "0.9")
    assert {"gemm.crash", "operations", "conv"} < differing(tree)
    assert "env.driver" not in differing(tree)


def test_comments_and_docstrings_do_not_count_as_a_change(tree: Path) -> None:
    edit(tree, "probes/hardware/transfer.py", '"""', '"""Another sentence. ')
    edit(tree, "numerics/element_comparison.py", "from __future__", "# a comment\n\nfrom __future__")
    assert differing(tree) == set()


def test_only_what_changed_gets_another_version() -> None:
    now = code()
    before = {name: {"version": 3, "code": digest} for name, digest in now.items()}
    versions = dict.fromkeys(now, 3)
    assert probe_versions.raised(versions, before) == versions
    before["conv"]["code"] = "another"
    assert probe_versions.raised(versions, before) == {**versions, "conv": 4}
    assert probe_versions.changed({**versions, "conv": 4}, before) == ["conv"], "recorded with the new version only"
    assert probe_versions.raised({**versions, "conv": 4}, before) == {**versions, "conv": 4}, "raised by hand already"
    del before["conv"]
    assert probe_versions.raised({k: v for k, v in versions.items() if k != "conv"}, before)["conv"] == 1
