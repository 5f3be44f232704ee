"""Newer patch releases, by the real uv from a small index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.lock import lock_file, outdated_pins
from envbuild.lock.lock_file import Lock
from envbuild.lock.outdated_pins import Outdated
from envbuild.resolve.plan_resolver import Plan
from envbuild.util.errors import NetworkError
from unit.support import PROFILE, Index, envbuild, lock_for, plan_of, quick_pip, serving, wheel, write_wheel

# torch 2.1.0 requires cuBLAS 12.1.3.1 and NCCL 2.18.1; some of the advisories about these versions apply to an A100
OLD: dict[str, Any] = {**PROFILE, "torch": "2.1.0", "gpus": ["a100"], "packages": ["numpy<2"]}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    quick_pip(monkeypatch)
    (tmp_path / "served").mkdir()
    with serving(Index(tmp_path / "served")) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.address)
        yield found.folder


def offer(folder: Path, **versions: str) -> None:
    for name, listed in versions.items():
        for version in listed.split():
            write_wheel(folder, name.replace("_", "-"), version)


def holding(plan: Plan, **versions: str) -> Lock:
    made = lock_for(plan)
    wheels = tuple(LockedWheel(wheel(name.replace("_", "-"), v), 1, "python") for name, v in versions.items())
    return Lock(**{**vars(made), "wheels": wheels})


def found(folder: Path, project: Path, data: dict[str, Any] | None = None, **locked: str) -> dict[str, Outdated]:
    plan = plan_of(project, data or PROFILE)
    return {item.name: item for item in outdated_pins.find_outdated(plan, holding(plan, **locked))}


@pytest.mark.parametrize(
    ("name", "version", "requirement"),
    [
        ("numpy", "2.4.6", "numpy>=2.4.6,==2.4.*"),
        ("cublas", "12.6.4.1", "cublas>=12.6.4.1,==12.6.*"),
        ("pip", "26", "pip>=26,==26.0.*"),
        ("a", "1!2.3.4", "a>=1!2.3.4,==1!2.3.*"),
        ("torch", "2.13.0+cpu", "torch>=2.13.0,==2.13.*"),
        ("nccl", "2.25.1.post1", "nccl>=2.25.1.post1,==2.25.*"),
    ],
)
def test_a_patch_release_has_the_same_first_two_numbers(name: str, version: str, requirement: str) -> None:
    assert outdated_pins.patches_of(name, version) == requirement


def test_only_the_newest_patch_release_is_reported(served: Path, project: Path) -> None:
    offer(served, alpha="1.0.0 1.0.1 1.0.7 1.1.0 2.0", beta="3.1 3.2", gamma="1.0 1.0.post1")
    items = found(served, project, alpha="1.0.0", beta="3.1", gamma="1.0")
    assert items == {
        "alpha": Outdated("alpha", "1.0.0", "1.0.7"),
        "gamma": Outdated("gamma", "1.0", "1.0.post1"),
    }


def test_a_version_that_torch_requires_exactly_is_not_outdated(served: Path, project: Path) -> None:
    """torch 2.1.0 requires NCCL 2.18.1. A version that replaces it is a pin of the profile, and can be changed."""
    offer(served, nvidia_nccl_cu12="2.18.1 2.18.3 2.18.5", torch="2.1.0")
    assert found(served, project, OLD, torch="2.1.0", nvidia_nccl_cu12="2.18.1").keys() <= {"torch"}
    replaced = found(served, project, OLD, torch="2.1.0", nvidia_nccl_cu12="2.18.3")
    assert replaced["nvidia-nccl-cu12"].newest == "2.18.5"


def test_a_removed_file_of_the_index_hides_no_other(served: Path, project: Path) -> None:
    offer(served, alpha="1.0.0 1.0.1", beta="4.0")
    assert found(served, project, alpha="1.0.0", beta="3.1") == {"alpha": Outdated("alpha", "1.0.0", "1.0.1")}


def test_another_build_is_not_a_newer_release(served: Path, project: Path) -> None:
    offer(served, torch="2.13.0 2.13.1 2.13.0+cpu")
    assert found(served, project, torch="2.13.0+cpu") == {}
    offer(served, torch="2.13.2+cpu")
    assert found(served, project, torch="2.13.0+cpu")["torch"].newest == "2.13.2+cpu"
    assert found(served, project, torch="2.13.0") == {}


def advised(item: Outdated) -> tuple[tuple[str, str, str], ...]:
    return tuple((row.id, row.state, row.version) for row in item.advisories)


def test_an_advisory_asks_for_a_cuda_library_of_the_same_major(served: Path, project: Path) -> None:
    """int-mm-cuda121u1 asks for any newer cuBLAS, cublas-k0-fpe for 12.6.0.22: the nearest are listed."""
    offer(served, nvidia_cublas_cu12="12.1.3.1 12.2.1.16 12.4.5.8 12.6.0.22 12.9.3.13 13.0.0.19")
    item = found(served, project, OLD, nvidia_cublas_cu12="12.1.3.1")["nvidia-cublas-cu12"]
    assert item.newest is None
    assert advised(item) == (
        ("cublas-k0-fpe", "noted", "12.6.0.22"),
        ("int-mm-cuda121u1", "noted", "12.2.1.16"),
    )


def test_a_fix_that_no_index_has_is_not_reported(served: Path, project: Path) -> None:
    offer(served, nvidia_cublas_cu12="12.1.3.1 13.0.0.19")
    assert found(served, project, OLD, nvidia_cublas_cu12="12.1.3.1") == {}


def test_an_accepted_advisory_asks_too(served: Path, project: Path) -> None:
    offer(served, nvidia_nccl_cu12="2.18.1 2.18.3 2.19.3 2.26.2")
    data = {**OLD, "gpu_count": 4, "accept": [{"advisory": name, "reason": "r"} for name in ("nccl-2.18.1",)]}
    item = found(served, project, data, nvidia_nccl_cu12="2.18.1")["nvidia-nccl-cu12"]
    assert item.newest == "2.18.3"
    assert ("nccl-2.18.1", "accepted", "2.18.3") in advised(item)
    assert ("nccl-abort-hang", "warned", "2.26.2") in advised(item)


def test_other_packages_move_by_a_patch_release_at_most(served: Path, project: Path) -> None:
    """numpy2-old-torch requires numpy before 2, which is not newer; torch moves by a patch release at most."""
    offer(served, numpy="1.26.4 2.0.0 2.0.1", torch="2.5.0 2.5.1 2.6.0")
    data = {**OLD, "torch": "2.5.0", "gpus": ["h100"]}
    item = found(served, project, data, torch="2.5.0")["torch"]
    assert (item.newest, advised(item)) == ("2.5.1", (("cudnn-sdpa-2.5.0", "warned", "2.5.1"),))
    old = found(served, project, {**OLD, "packages": ["numpy"]}, numpy="2.0.0")["numpy"]
    assert (old.newest, old.advisories) == ("2.0.1", ())


def test_an_index_that_does_not_answer_is_an_error(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_pip(monkeypatch)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    plan = plan_of(project, PROFILE)
    with pytest.raises(NetworkError):
        outdated_pins.find_outdated(plan, holding(plan, alpha="1.0.0"))
    lock_file.write(holding(plan, alpha="1.0.0"), project / "profiles" / "sample.lock.yaml", "sample")
    assert envbuild("status", "sample", "--outdated", "--json").code == 7


def test_status_outdated_reports_one_profile_or_all(
    served: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")
    monkeypatch.setattr("envbuild.profile.profile_and_lock_name_lookup.profile_names", lambda: ["never", "sample"])
    offer(served, alpha="1.0.0 1.0.1")
    plan = plan_of(project, PROFILE)
    lock_file.write(holding(plan, alpha="1.0.0"), project / "profiles" / "sample.lock.yaml", "sample")
    (project / "profiles" / "never.yaml").write_text("extends: sample\n", encoding="utf-8")
    done = envbuild("status", "sample", "--outdated", "--json")
    row = {"name": "alpha", "version": "1.0.0", "newest": "1.0.1", "advisories": []}
    assert (done.code, done.document) == (
        0,
        {
            "profile": "sample",
            "state": "outdated",
            "lock": holding(plan, alpha="1.0.0").id,
            "reason": None,
            "pins": [row],
        },
    )
    rows = envbuild("status", "--outdated", "--json").document["profiles"]
    assert [(r["profile"], len(r["pins"]), "missing" in (r["reason"] or "")) for r in rows] == [
        ("never", 0, True),
        ("sample", 1, False),
    ]
    table = envbuild("status", "--outdated")
    assert (table.code, table.stdout.splitlines()[2].split()) == (0, ["sample", "alpha", "1.0.0", "1.0.1"])
    assert table.stdout.splitlines()[-1] == "1 of 2 profiles have pins with newer versions"
    assert envbuild("status", "never", "--outdated").code == 8
