"""`envbuild docs`: blocks of documents, filled from locks; nothing is written if anything is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from envbuild.attest import community_evidence
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util import package_data
from unit.site import proved
from unit.support import PROFILE, envbuild, lock_for, plan_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def locked(project: Path) -> Lock:
    made = lock_for(plan_of(project, PROFILE))
    lock_file.write(made, project / "profiles" / "sample.lock.yaml", "sample")
    return made


def page(folder: Path, kind: str, names: str = "sample", name: str = "page.md") -> Path:
    file = folder / name
    file.write_text(f"before\n<!-- envbuild:{kind} {names} -->\n<!-- envbuild:end -->\nafter\n")
    return file


def test_a_table_holds_the_locked_versions(locked: Lock, project: Path) -> None:
    file = page(project, "table", "sample,h20-cu12")
    assert envbuild("docs", "page.md").code == 0
    _, _, head, _, own, h20, _, _ = file.read_text().splitlines()
    assert own.startswith("| sample | CPU | - | 2.13.0+cpu | - | - | - | 3.11 | - | - | unverified |")
    shipped = lock_file.read(ROOT / "profiles" / "h20-cu12.lock.yaml")
    assert shipped is not None
    assert f"| {shipped.versions['torch']} | {shipped.versions['nvidia-cublas-cu12']} |" in h20
    assert head.split(" | ")[1:5] == ["GPU", "CUDA", "torch", "cuBLAS"]


def test_the_table_and_show_have_one_source_of_proofs(
    locked: Lock, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = page(project, "table")
    envbuild("docs", "page.md")
    assert file.read_text().splitlines()[4].endswith("| unverified |")
    with proved(project, monkeypatch):
        line = envbuild("show", "sample").stdout.splitlines()[-1].strip()
        assert line.startswith("proved on the CPU, ")
        assert envbuild("docs", "page.md").code == 0
        assert file.read_text().splitlines()[4].endswith(f"| {line} |")


def test_the_table_has_what_the_folder_of_evidence_proves(
    locked: Lock, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = community_evidence.EvidenceRow("CPU", "sample", "alice", "2026-11-21", locked.id, "", ())
    monkeypatch.setattr(community_evidence, "read", lambda folder, now: [row] if folder == project / "evidence" else [])
    file = page(project, "table")
    envbuild("docs", str(file))
    assert file.read_text().splitlines()[4].endswith("| proved on the CPU, 2026-11-21 |")


def minimum(folder: Path, names: str) -> list[list[str]]:
    """Return the rows of the block, the header first."""
    file = page(folder, "minimum", names)
    assert envbuild("docs", file.name).code == 0
    lines = [line for line in file.read_text().splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines if not line.startswith("| ---")]


def test_the_minimum_is_what_advisories_ask_for_on_the_gpu(project: Path) -> None:
    head, *rows = minimum(project, "h20")
    assert head == ["Needs", "Where", "Known fault of other versions", "Source"]
    (cublas,) = [row for row in rows if "divides by zero on Hopper" in row[2]]
    assert cublas[:2] == ["cuBLAS >=12.4.5.8", "cuBLAS <12.4.5.8,>=11.11.3.6"]
    (conv,) = [row for row in rows if "bf16 conv3d" in row[2]]
    assert conv[1] == "cuDNN <9.11,>=9.8; or torch ==2.9.0, cuDNN >=8; or torch ==2.9.1, cuDNN <9.15"
    assert not any("divides by zero on Hopper" in row[2] for row in minimum(project, "a100"))


@pytest.mark.parametrize("names", ["h20,a100", "fleet"])
def test_the_minimum_of_several_gpus_has_a_column(project: Path, names: str) -> None:
    head, *rows = minimum(project, names)
    assert head[2] == "GPU"
    gpus = {row[3]: row[2] for row in rows}
    (hopper,) = [gpus[title] for title in gpus if "divides by zero on Hopper" in title]
    (every,) = [gpus[title] for title in gpus if "bf16 conv3d" in title]
    assert (hopper, set(every.split(", "))) == ("h20", {"h20", "a100"})


def test_the_minimum_has_no_escaped_comparison(project: Path) -> None:
    text = str(minimum(project, "h20,fleet,v100"))
    assert "&#" not in text and "torch <2.11" in text


SHIPPED = sorted(file.name.removesuffix(".lock.yaml") for file in package_data.PROFILES.rglob("*.lock.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_lock_meets_its_own_minimum(project: Path, name: str) -> None:
    """Each row is read as a person would read it. If a version is below the minimum, `show` must warn about this
    version, or the profile must accept it."""
    loaded = profile_reader_and_overrides.load(name)
    plan = plan_resolver.resolve(loaded)
    held = lock_file.required_lock(loaded).versions
    choice = plan_resolver.as_locked(plan, held)
    known = choice.situation
    versions = {"torch": known.torch, "driver": known.driver, **held, **known.libraries}

    def met(text: str) -> bool:
        """Whether a version meets a text such as "cuBLAS >=12,<12.4 or ==11.*"."""
        what, _, specifiers = text.partition(" ")
        version = known.gpu_count if what == "GPUs" else versions.get(what if what in versions else what.lower())
        return version is not None and any(
            SpecifierSet(part.replace("\\", "")).contains(str(version), prereleases=True)
            for part in specifiers.split(" or ")
        )

    def holds(text: str) -> bool:
        words = {
            "": True,  # unconditional
            "torch without a local label": "+" not in str(known.torch),
            "CUDA 13": str(known.cuda).startswith("13."),
            "without cuda-compat": "cuda-compat" not in known.environment,
            "with source-build": False,
            "with apex": "apex" in known.extensions,
            "GPUs of several compute capabilities": len({gpu.compute_capability for gpu in known.gpus}) > 1,
        }
        return words[text] if text in words else met(text)

    head, *rows = minimum(project, name)
    failed = {
        row[head.index("Known fault of other versions")]
        for row in rows
        if any(all(map(holds, where.split(", "))) for where in row[1].split("; or "))
        and not all(map(met, row[0].split(", ")))
    }
    taken = [item.advisory for item in choice.advice if item.state in ("accepted", "warned")]
    assert failed == {fact.title for fact in taken if fact.change.torch or fact.change.pins or fact.change.driver}


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
    assert "page.md:2: envbuild:table sample does not match the profiles and locks" in done.stderr
    envbuild("docs", "page.md")
    assert envbuild("docs", "--check", "page.md", "--json").document == {
        "files": [{"file": "page.md", "state": "current", "blocks": 1, "changed": 0}]
    }


def test_one_faulty_file_keeps_all_as_they_are(locked: Lock, project: Path) -> None:
    file, broken = page(project, "table"), page(project, "tabel", name="broken.md")
    before = file.read_text(), broken.read_text()
    done = envbuild("docs", "page.md", "broken.md")
    assert done.code == 3
    assert "broken.md:2: unknown block 'tabel'" in done.stderr
    assert (file.read_text(), broken.read_text()) == before


def test_an_unknown_profile_or_a_stale_lock_leaves_all_files_as_they_are(locked: Lock, project: Path) -> None:
    file, other = page(project, "table"), page(project, "table", "nosuch", name="other.md")
    before = file.read_text(), other.read_text()
    assert envbuild("docs", "page.md", "other.md").code == 3
    plan_of(project, {**PROFILE, "packages": ["numpy", "einops"]})
    assert envbuild("docs", "page.md").code == 8
    assert (file.read_text(), other.read_text()) == before


@pytest.mark.parametrize(("name", "content"), [("nosuch.md", None), ("binary.md", b"\xff\xfe\x00")])
def test_an_unreadable_file_is_reported(project: Path, name: str, content: bytes | None) -> None:
    if content:
        (project / name).write_bytes(content)
    done = envbuild("docs", name)
    assert done.code == 3
    assert name in done.stderr


def test_the_hooks_that_ship_are_commands() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert {hook["id"] for hook in hooks} == {f"envbuild-{name}" for name in ("docs", "lock", "pin-digests")}
    for hook in hooks:
        program, command, option = hook["entry"].split()
        assert (program, option) == ("envbuild", "--check")
        assert "--check" in envbuild(command, "--help").stdout
