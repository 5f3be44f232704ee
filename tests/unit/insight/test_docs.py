"""`envbuild docs`: blocks of documents, filled from locks; nothing is written where anything is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from envbuild.attest import community
from envbuild.insight import tables
from envbuild.plan import choice, lock, sources
from envbuild.plan.lock import Lock
from unit.support import PROFILE, envbuild, lock_for, plan_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def locked(project: Path) -> Lock:
    made = lock_for(plan_of(project, PROFILE))
    lock.write(made, project / "profiles" / "sample.lock.yaml", "sample")
    return made


def page(folder: Path, kind: str, names: str = "sample", name: str = "page.md") -> Path:
    file = folder / name
    file.write_text(f"before\n<!-- envbuild:{kind} {names} -->\n<!-- envbuild:end -->\nafter\n")
    return file


def test_a_table_holds_the_locked_versions(locked: Lock, project: Path) -> None:
    file = page(project, "table", "sample,h20")
    assert envbuild("docs", "page.md").code == 0
    _, _, head, _, own, h20, _, _ = file.read_text().splitlines()
    assert own.startswith("| sample | CPU | - | 2.13.0+cpu | - | - | - | 3.11 | - | - | never |")
    shipped = lock.read(ROOT / "profiles" / "h20.lock.yaml")
    assert shipped is not None
    assert f"| {shipped.versions['torch']} | {shipped.versions['nvidia-cublas-cu12']} |" in h20
    assert head.split(" | ")[1:5] == ["GPU", "CUDA", "torch", "cuBLAS"]


def test_proved_is_what_counts_of_the_evidence_on_this_lock(locked: Lock) -> None:
    counts = community.Row("NVIDIA H20", "sample", "alice", "2026-11-21", locked.id, f"sha256:{'a' * 64}", ())
    others = [replace(counts, lock="sha256:0"), replace(counts, profile="h20"), replace(counts, objections=("old",))]
    row = tables.Row("sample", choice.choose(sources.load("sample")), locked, others)
    assert tables.versions([row]).endswith("| never |")
    row = replace(row, evidence=[*others, counts])
    assert tables.versions([row]).endswith("| NVIDIA H20, 2026-11-21, sha256:aaaaaaaaaaaa |")


def test_the_minimum_is_what_advisories_ask_for_on_the_card(project: Path) -> None:
    file = page(project, "minimum", "h20")
    envbuild("docs", "page.md")
    assert "| cuBLAS | >=12.4.5.8 | cuBLAS before 12.4.5.8 divides by zero on Hopper" in file.read_text()
    page(project, "minimum", "a100")
    envbuild("docs", "page.md")
    assert "divides by zero on Hopper" not in file.read_text()


@pytest.mark.parametrize("kind", ["requirements", "constraints"])
def test_a_listing_is_the_exported_one(locked: Lock, project: Path, kind: str) -> None:
    file = page(project, kind)
    envbuild("docs", "page.md")
    envbuild("export", kind, "sample", "-o", "exported.txt")
    assert f"```\n{(project / 'exported.txt').read_text()}```\n" in file.read_text()


def test_check_names_each_block_that_drifted_and_writes_nothing(locked: Lock, project: Path) -> None:
    file = page(project, "table")
    before = file.read_text()
    done = envbuild("docs", "--check", "page.md")
    assert (done.code, file.read_text()) == (8, before)
    assert "page.md:2: envbuild:table sample is not what the profiles and locks give" in done.stderr
    envbuild("docs", "page.md")
    assert envbuild("docs", "--check", "page.md", "--json").document == {
        "files": [{"file": "page.md", "blocks": 1, "changed": 0}]
    }


def test_one_faulty_file_keeps_all_as_they_are(locked: Lock, project: Path) -> None:
    file, broken = page(project, "table"), page(project, "tabel", name="broken.md")
    before = file.read_text(), broken.read_text()
    done = envbuild("docs", "page.md", "broken.md")
    assert done.code == 3
    assert "broken.md:2: there is no block 'tabel'" in done.stderr
    assert (file.read_text(), broken.read_text()) == before


def test_an_unknown_profile_or_a_stale_lock_leaves_all_files_as_they_are(locked: Lock, project: Path) -> None:
    file, other = page(project, "table"), page(project, "table", "nosuch", name="other.md")
    before = file.read_text(), other.read_text()
    assert envbuild("docs", "page.md", "other.md").code == 3
    plan_of(project, {**PROFILE, "packages": ["numpy", "einops"]})
    assert envbuild("docs", "page.md").code == 8
    assert (file.read_text(), other.read_text()) == before


@pytest.mark.parametrize(("name", "content"), [("nosuch.md", None), ("binary.md", b"\xff\xfe\x00")])
def test_what_cannot_be_read_is_said(project: Path, name: str, content: bytes | None) -> None:
    if content:
        (project / name).write_bytes(content)
    done = envbuild("docs", name)
    assert done.code == 3
    assert name in done.stderr


def test_the_hooks_that_ship_are_commands() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert {hook["id"] for hook in hooks} == {f"envbuild-{name}" for name in ("docs", "lock", "render", "pin")}
    for hook in hooks:
        program, command, option = hook["entry"].split()
        assert (program, option) == ("envbuild", "--check")
        assert "--check" in envbuild(command, "--help").stdout
