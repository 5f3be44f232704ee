"""A lock is updated with as few changes as possible: wheels by the real uv, Debian packages by a fake mirror."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests

from envbuild.fetch import apt_resolution_and_download, file_download_and_range_reads, wheel_resolution_and_download
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import Archive
from envbuild.fetch.file_download_and_range_reads import Head, RemoteFile
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.lock import extension_source_fetcher, lock_changes, lock_creation_and_update, lock_file
from envbuild.lock.lock_entry_types import Nvcc, RecordedWheel
from envbuild.lock.lock_file import EVERYTHING, Lock, inputs
from envbuild.resolve.plan_resolver import Plan
from envbuild.util.errors import ProfileError, UsageError
from unit.conftest import forget
from unit.support import (
    PROFILE,
    Index,
    deb,
    envbuild,
    image_of,
    lock_for,
    plan_of,
    quick_pip,
    serving,
    wheel,
    write_profile,
    write_tar,
    write_wheel,
)

SMALL: dict[str, Any] = {**PROFILE, "torch": "2.13.0", "packages": ["alpha"], "apt": []}
IMAGE = {"image": f"registry.example/debian@{image_of().id}"}


class Mirror:
    """Stands in for `apt_resolution_and_download.resolve_debs`: the mirror has one newest version of every package, and
    older versions as long as the mirror keeps them."""

    def __init__(self, version: str = "1.0-1") -> None:
        self.version = version
        self.gone: set[str] = set()
        self.versions: dict[str, str] = {}  # where a package's newest version differs from the default
        self.requests: list[tuple[tuple[str, ...], tuple[str, ...]]] = []

    def resolve(
        self, suite: str, packages: Sequence[str], keep: Sequence[Deb] = (), components: Sequence[str] = ("main",)
    ) -> list[Deb]:
        if "nvidia-cuda-toolkit" in packages:
            assert "non-free" in components
        self.requests.append((tuple(packages), tuple(item.name for item in keep)))
        missing = sorted(item.name for item in keep if item.version in self.gone)
        if missing or "nosuch" in packages:
            raise ProfileError(f"Debian {suite} has no package {', '.join(missing) or 'nosuch'}")
        kept = {item.name: item for item in keep}
        names = {"libc6", *packages, *kept}
        return sorted(
            (kept.get(name, deb(name, self.versions.get(name, self.version))) for name in names),
            key=lambda item: item.name,
        )


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Mirror:
    found = Mirror()
    monkeypatch.setattr(apt_resolution_and_download, "resolve_debs", found.resolve)
    return found


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: Mirror) -> Iterator[Path]:
    """A folder with pip, torch, and alpha and beta in two versions; torch requires beta."""
    quick_pip(monkeypatch)
    folder = tmp_path / "links"
    write_wheel(folder, "pip", "26.0")
    write_wheel(folder, "torch", "2.13.0", ["beta"])
    for name in ("alpha", "beta", "gamma"):
        write_wheel(folder, name, "1.0")
    with serving(Index(folder)) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.address)
        yield folder


def newer(links: Path) -> None:
    for name in ("alpha", "beta", "gamma", "pip"):
        write_wheel(links, name, "27.0")


@pytest.fixture
def first(project: Path, links: Path, mirror: Mirror) -> Lock:
    """The first lock of SMALL. uv resolves this lock once for all tests, because all these folders of wheels are
    identical."""
    if not _FIRST:
        _FIRST.append(lock_creation_and_update.update_lock(plan_of(project, SMALL), None))
        mirror.requests.clear()
    return _FIRST[0]


_FIRST: list[Lock] = []


def test_a_first_lock_has_everything(project: Path, links: Path, first: Lock) -> None:
    plan = plan_of(project, SMALL)
    assert first.versions == {"pip": "26.0", "torch": "2.13.0", "beta": "1.0", "alpha": "1.0"}
    assert first.inputs == inputs(plan)
    assert re.fullmatch(r"\d{8}T\d{6}Z", first.made)
    assert [item.name for item in first.base] == sorted({"libc6", *plan.base_packages})
    assert first.apt == ()
    sizes = {item.wheel.file: item.bytes for item in first.wheels}
    assert sizes == {name: (links / name).stat().st_size for name in sizes}


def test_a_current_lock_is_left_unchanged(project: Path, links: Path, first: Lock, mirror: Mirror) -> None:
    plan = plan_of(project, SMALL)
    newer(links)
    mirror.requests.clear()
    assert lock_creation_and_update.update_lock(plan, first) is first
    assert mirror.requests == []


def test_sizes_and_listings_are_requested_only_once(
    project: Path, links: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    head = file_download_and_range_reads.head

    def counted(session: requests.Session, remote: RemoteFile) -> Head:
        asked.append(remote.name)
        return head(session, remote)

    monkeypatch.setattr(file_download_and_range_reads, "head", counted)
    with serving(Index(links, ranges=True)) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.address)
        made = lock_creation_and_update.update_lock(plan_of(project, SMALL), None)
        assert sorted(asked) == sorted(item.wheel.file for item in made.wheels)
        asked.clear()
        forget()  # as in another process
        again = lock_creation_and_update.update_lock(plan_of(project, SMALL), made, frozenset({EVERYTHING}))
    assert (again, asked) == (made, [])


def test_a_change_of_description_or_selftest_keeps_the_lock(project: Path, links: Path, first: Lock) -> None:
    newer(links)
    other = plan_of(project, {**SMALL, "description": "x", "selftest": {"level": "full"}})
    assert lock_creation_and_update.update_lock(other, first) is first


def test_records_of_compiled_wheels_are_kept(project: Path, links: Path, first: Lock) -> None:
    row = RecordedWheel("kernels", "a" * 64, "k-1-cp311-cp311-linux_x86_64.whl", "b" * 64, 1)
    before = dataclasses.replace(first, compiled=(row,))
    after = lock_creation_and_update.update_lock(plan_of(project, {**SMALL, "env": {"A": "1"}}), before)
    assert after is not before and after.compiled == (row,)


def test_adding_a_package_moves_no_other(project: Path, links: Path, first: Lock, mirror: Mirror) -> None:
    newer(links)
    mirror.version = "2.0-1"
    after = lock_creation_and_update.update_lock(plan_of(project, {**SMALL, "packages": ["alpha", "gamma"]}), first)
    assert after.versions == {**first.versions, "gamma": "27.0"}
    assert list(lock_changes.version_changes(first, after)) == ["gamma (new) -> 27.0"]
    assert (after.made, after.base, after.apt) == (first.made, first.base, first.apt)


def test_removing_a_package_moves_no_other(project: Path, links: Path, first: Lock) -> None:
    newer(links)
    after = lock_creation_and_update.update_lock(plan_of(project, {**SMALL, "packages": []}), first)
    assert list(lock_changes.version_changes(first, after)) == ["alpha 1.0 -> (gone)"]


def test_a_change_of_only_the_environment_contacts_no_server(
    project: Path, links: Path, first: Lock, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    mirror.requests.clear()
    after = lock_creation_and_update.update_lock(plan_of(project, {**SMALL, "env": {"A": "1"}}), first)
    assert list(lock_changes.version_changes(first, after)) == ["environment"]
    assert mirror.requests == []


@pytest.mark.parametrize("name", ["beta", "BETA"])
def test_an_upgrade_by_name_moves_only_that(project: Path, links: Path, first: Lock, mirror: Mirror, name: str) -> None:
    plan = plan_of(project, SMALL)
    newer(links)
    mirror.version = "2.0-1"
    after = lock_creation_and_update.update_lock(plan, first, frozenset({name}))
    assert list(lock_changes.version_changes(first, after)) == ["beta 1.0 -> 27.0"]


def test_an_upgrade_of_everything_moves_everything(project: Path, links: Path, first: Lock, mirror: Mirror) -> None:
    plan = plan_of(project, SMALL)
    newer(links)
    mirror.version = "2.0-1"
    after = lock_creation_and_update.update_lock(plan, first, frozenset({lock_file.EVERYTHING}))
    assert after.versions == {"pip": "27.0", "torch": "2.13.0", "beta": "27.0", "alpha": "27.0"}
    assert {item.version for item in after.base} == {"2.0-1"}


def test_an_upgrade_of_the_base_moves_no_wheel(project: Path, links: Path, first: Lock, mirror: Mirror) -> None:
    plan = plan_of(project, SMALL)
    newer(links)
    mirror.version = "2.0-1"
    after = lock_creation_and_update.update_lock(plan, first, frozenset({lock_creation_and_update.BASE}))
    assert after.wheels == first.wheels
    assert {item.version for item in after.base} == {"2.0-1"}


def test_an_upgrade_that_finds_nothing_newer_keeps_the_lock(project: Path, links: Path, first: Lock) -> None:
    plan = plan_of(project, SMALL)
    assert lock_creation_and_update.update_lock(plan, first, frozenset({lock_file.EVERYTHING})) is first


@pytest.mark.parametrize("name", ["numpyy", "", "--all", "$(id)"])
def test_an_unknown_name_is_refused(project: Path, name: str) -> None:
    plan = plan_of(project, SMALL)
    with pytest.raises(UsageError, match="nothing to upgrade"):
        lock_creation_and_update.update_lock(plan, lock_for(plan), frozenset({name}))


def test_a_name_is_known_as_pip_knows_it(project: Path) -> None:
    plan = plan_of(project, SMALL)
    sample = dataclasses.replace(lock_for(plan), wheels=(LockedWheel(wheel("typing-extensions"), 1, "python"),))
    lock_creation_and_update._refuse_unknown(["Typing_Extensions"], sample)


def test_a_fault_of_the_resolution_names_the_line(project: Path, links: Path) -> None:
    plan = plan_of(project, {**SMALL, "packages": ["alpha", "nosuch-thing"]})
    with pytest.raises(ProfileError) as caught:
        lock_creation_and_update.update_lock(plan, None)
    assert [(f.file, f.message) for f in caught.value.faults] == [("profiles/sample.yaml", "nosuch-thing")]


# Debian packages; the wheels are current, so uv is not called


def test_a_second_requirements_file_is_refused_and_not_used_instead_of_the_first(project: Path) -> None:
    write_profile(project, SMALL)
    done = envbuild("lock", "sample", "--requirements", "a.txt", "--requirements", "b.txt")
    assert done.code == 2 and "give one file, not a.txt, b.txt" in done.stderr


def test_a_check_of_several_locks_names_one_command_for_all_that_are_missing(project: Path) -> None:
    write_profile(project, SMALL, "one")
    write_profile(project, SMALL, "two")
    done = envbuild("lock", "--check", "one", "two")
    assert done.code == 8 and "hint: run: envbuild lock one two\n" in done.stderr
    (project / "requirements.txt").write_text("gamma\n", encoding="utf-8")
    done = envbuild("lock", "--check", "one", "--requirements", "requirements.txt")
    assert "hint: run: envbuild lock one --requirements requirements.txt\n" in done.stderr


def test_a_projects_requirements_are_locked_under_a_profiles_pins(project: Path, links: Path) -> None:
    """The lock is named as by `make`: <profile>-<folder of the file>. The profile's own lock is not changed."""
    write_profile(project, SMALL)
    (project / "requirements.txt").write_text("gamma  # and what it needs\n", encoding="utf-8")
    done = envbuild("lock", "sample", "--requirements", "requirements.txt", "--json")
    (row,) = done.document["profiles"]
    assert (row["profile"], row["lock_file"]) == ("sample-project", "profiles/sample-project.lock.yaml")
    made = lock_file.read(project / row["lock_file"])
    assert made and {"alpha", "beta", "gamma", "torch"} <= set(made.versions)
    assert not (project / "profiles" / "sample.lock.yaml").exists()
    (project / row["lock_file"]).unlink()
    written = envbuild("lock", "sample", "--requirements", "requirements.txt")
    assert (written.code, "next: envbuild make sample-project\n" in written.stderr) == (0, True)
    pinned = envbuild("lock", "sample-project", "--pin", "alpha=1.0")
    assert (pinned.code, "next: the same command with --write" in pinned.stderr) == (0, True), pinned.stderr
    assert envbuild("lock", "sample", "--requirements", "requirements.txt", "--check").code == 0
    (project / "requirements.txt").write_text("gamma\nnosuch\n", encoding="utf-8")
    assert envbuild("lock", "sample", "--requirements", "requirements.txt", "--check").code == 8
    (project / "requirements.txt").write_text("-r nosuch.txt\n-e git+https://a.example/x\ngam ma\n", encoding="utf-8")
    faults = envbuild("lock", "sample", "--requirements", "requirements.txt", "--json").document["error"]["faults"]
    assert [(fault["line"], fault["message"].partition(":")[0]) for fault in faults] == [
        (1, "nosuch.txt cannot be read"), (2, "option -e is not supported in this file"),
        (3, "'gam ma' is not a requirement (as in numpy>=2 or numpy==2.4.6)"),
    ]  # fmt: skip
    (project / "requirements.txt").write_text("gamma\nnosuch\n", encoding="utf-8")
    clash = envbuild("lock", "sample", "--requirements", "requirements.txt", "--json")
    assert clash.code == 3
    assert [(f["file"], f["line"]) for f in clash.document["error"]["faults"]] == [("requirements.txt", 2)]
    assert envbuild("lock", "--requirements", "requirements.txt").code == 2


def test_a_combination_refused_by_an_advisory_is_not_locked(project: Path, links: Path) -> None:
    """The facts have no row for torch 2.2.1; the lock shows that torch 2.2.1 requires a cuBLAS that fails on an H20."""
    write_wheel(links, "torch", "2.2.1", ["nvidia-cublas-cu12==12.1.3.1"])
    write_wheel(links, "nvidia-cublas-cu12", "12.1.3.1")
    profile = {**SMALL, "torch": "2.2.1", "gpus": ["h20"]}
    with pytest.raises(ProfileError, match="sample is refused") as caught:
        lock_creation_and_update.update_lock(plan_of(project, profile), None)
    assert "locked cublas 12.1.3.1: cublas-hopper-fpe" in caught.value.faults[0].message
    accepted = {**profile, "accept": [{"advisory": "cublas-hopper-fpe", "reason": "no products here"}]}
    made = lock_creation_and_update.update_lock(plan_of(project, accepted), None)
    with pytest.raises(ProfileError, match="sample is refused"):  # also if the lock exists already
        lock_file.current(made, plan_of(project, profile), project / "profiles" / "sample.lock.yaml")


@pytest.fixture
def before(project: Path, mirror: Mirror) -> Lock:
    return on_mirror(plan_of(project, SMALL), mirror)


def on_mirror(plan: Plan, mirror: Mirror) -> Lock:
    """Return a lock whose Debian packages are those of the mirror."""
    base = tuple(mirror.resolve("bookworm", plan.base_packages))
    late = tuple(item for item in mirror.resolve("bookworm", plan.apt, base) if item not in base) if plan.apt else ()
    mirror.requests.clear()
    return dataclasses.replace(lock_for(plan), base=base, apt=late)


def test_a_changed_apt_list_keeps_the_base(project: Path, before: Lock, mirror: Mirror) -> None:
    mirror.version = "2.0-1"
    after = lock_creation_and_update.update_lock(plan_of(project, {**SMALL, "apt": ["less"]}), before)
    assert after.base == before.base
    assert after.wheels == before.wheels
    assert after.apt == (deb("less", "2.0-1"),)


def test_a_base_that_the_mirror_removed_is_locked_again(project: Path, before: Lock, mirror: Mirror) -> None:
    mirror.version, mirror.gone = "2.0-1", {"1.0-1"}
    after = lock_creation_and_update.update_lock(plan_of(project, {**SMALL, "apt": ["less"]}), before)
    assert {item.version for item in (*after.base, *after.apt)} == {"2.0-1"}
    assert [item.name for item in after.apt] == ["less"]
    assert "libc6 1.0-1 -> 2.0-1" in list(lock_changes.version_changes(before, after))


def test_adding_a_debian_package_moves_no_other(project: Path, mirror: Mirror) -> None:
    before = on_mirror(plan_of(project, {**SMALL, "apt": ["less"]}), mirror)
    mirror.version = "2.0-1"
    after = lock_creation_and_update.update_lock(plan_of(project, {**SMALL, "apt": ["less", "zip"]}), before)
    assert after.apt == (deb("less", "1.0-1"), deb("zip", "2.0-1"))


def test_dropping_the_last_debian_package_contacts_no_server(project: Path, mirror: Mirror) -> None:
    before = on_mirror(plan_of(project, {**SMALL, "apt": ["less"]}), mirror)
    after = lock_creation_and_update.update_lock(plan_of(project, SMALL), before)
    assert after.apt == ()
    assert mirror.requests == []


@pytest.mark.parametrize("change", [{"env": {"A": "1"}}, {"selftest": {"level": "full"}, "env": {}}])
def test_the_time_stays_where_no_debian_package_moved(project: Path, mirror: Mirror, change: dict[str, Any]) -> None:
    """The time only tells a snapshot archive which Debian packages to serve."""
    before = on_mirror(plan_of(project, {**SMALL, "apt": ["less"]}), mirror)
    after = lock_creation_and_update.update_lock(plan_of(project, {**SMALL, "apt": ["less"], **change}), before)
    assert after.id != before.id
    assert (after.made, after.base, after.apt) == (before.made, before.base, before.apt)


def test_the_time_moves_with_the_debian_packages(project: Path, mirror: Mirror) -> None:
    before = on_mirror(plan_of(project, {**SMALL, "apt": ["less"]}), mirror)
    mirror.version = "2.0-1"
    for change, upgrade in (({"apt": ["less", "zip"]}, set()), ({}, {lock_creation_and_update.BASE})):
        after = lock_creation_and_update.update_lock(
            plan_of(project, {**SMALL, "apt": ["less"], **change}), before, frozenset(upgrade)
        )
        assert after.made > before.made


def test_the_time_stays_where_debian_packages_only_went_away(project: Path, mirror: Mirror) -> None:
    """The remaining packages existed at that time, and may be missing in a newer snapshot."""
    before = on_mirror(plan_of(project, {**SMALL, "apt": ["less"]}), mirror)
    after = lock_creation_and_update.update_lock(plan_of(project, SMALL), before)
    assert (after.apt, after.made) == ((), before.made)


def test_a_late_package_that_the_mirror_removed_moves_alone(project: Path, mirror: Mirror) -> None:
    before = on_mirror(plan_of(project, {**SMALL, "apt": ["less"]}), mirror)
    before = dataclasses.replace(before, apt=(deb("less", "0.9-1"),))
    mirror.version, mirror.gone = "2.0-1", {"0.9-1"}
    after = lock_creation_and_update.update_lock(plan_of(project, {**SMALL, "apt": ["less", "zip"]}), before)
    assert after.base == before.base
    assert after.apt == (deb("less", "2.0-1"), deb("zip", "2.0-1"))


def test_a_debian_package_that_is_not_there_is_a_fault_at_its_line(project: Path, before: Lock) -> None:
    with pytest.raises(ProfileError, match="has no package nosuch") as caught:
        lock_creation_and_update.update_lock(plan_of(project, {**SMALL, "apt": ["nosuch"]}), before)
    assert [fault.message for fault in caught.value.faults] == ["nosuch"]


def test_an_image_base_needs_no_debian_packages(project: Path, links: Path, mirror: Mirror) -> None:
    made = lock_creation_and_update.update_lock(plan_of(project, {**SMALL, "base": IMAGE}), None)
    assert (made.base, made.apt, mirror.requests) == ((), (), [])


# layers


def test_layers_go_from_what_is_shared_to_what_is_the_profiles() -> None:
    layers = ["packages", "torch", "nvidia-cublas", "python", "big-user-library"]
    wheels = [LockedWheel(wheel(f"w{number}"), 1, layer) for number, layer in enumerate(layers)]
    order = lock_creation_and_update._order(wheels)
    assert order[0] == "python"
    assert order[-2:] == ["torch", "packages"]
    assert sorted(order) == sorted(layers)


@pytest.mark.parametrize(
    ("name", "kind", "size", "layer"),
    [
        ("torch", "python", 10, "torch"),
        ("numpy", "python", 10, "python"),
        ("numpy", "packages", 10, "packages"),
        ("nvidia-cuda-crt", "toolchain", 10, "toolchain"),
        ("nvidia-cudnn-cu12", "python", lock_creation_and_update.OWN_LAYER_BYTES, "nvidia-cudnn-cu12"),
        ("nvidia-cuda-nvcc", "toolchain", lock_creation_and_update.OWN_LAYER_BYTES, "nvidia-cuda-nvcc"),
        ("scipy", "packages", lock_creation_and_update.OWN_LAYER_BYTES, "scipy"),
        ("scipy", "packages", lock_creation_and_update.OWN_LAYER_BYTES - 1, "packages"),
    ],
)
def test_a_large_wheel_has_a_layer_of_its_own(name: str, kind: str, size: int, layer: str) -> None:
    assert lock_creation_and_update._layer(name, kind, size) == layer


def test_nvccs_wheels_have_layers_of_their_own_and_move_no_other(
    project: Path, links: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A devel image then shares all layers with the runtime image except its last ones."""
    monkeypatch.setattr(lock_creation_and_update, "OWN_LAYER_BYTES", 1500)
    write_wheel(links, "torch", "2.11.0", ["cuda-toolkit==13.0.2", "beta"])
    needs = ["nvidia-cuda-nvcc==13.0.88; extra == 'nvcc'", "nvidia-cuda-crt==13.0.88; extra == 'crt'"]
    write_wheel(links, "cuda-toolkit", "13.0.2", needs, extras=["nvcc", "crt", "cccl", "nvvm", "profiler"])
    write_wheel(links, "nvidia-cuda-nvcc", "13.0.88", ["nvidia-cuda-crt", "beta"], content="#" * 3000)
    write_wheel(links, "nvidia-cuda-crt", "13.0.88")
    data = {**SMALL, "torch": "2.11.0", "gpus": ["h200"]}
    runtime = lock_creation_and_update.update_lock(plan_of(project, data), None)
    newer(links)
    monkeypatch.setattr(apt_resolution_and_download, "resolve_debs", lambda *_: list(runtime.base))
    devel = lock_creation_and_update.update_lock(plan_of(project, {**data, "variant": "devel"}), runtime)
    shared = [item for item in devel.wheels if item in runtime.wheels]
    assert shared == list(runtime.wheels)
    layers = [(item.wheel.name, item.layer) for item in devel.wheels]
    assert layers == [
        ("beta", "python"), ("cuda-toolkit", "python"), ("pip", "python"), ("torch", "torch"),
        ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc"), ("nvidia-cuda-crt", "toolchain"), ("alpha", "packages"),
    ]  # fmt: skip
    assert devel.nvcc == Nvcc("/opt/venv/lib/python3.11/site-packages/nvidia/cu13", "13.0")
    assert list(lock_changes.version_changes(runtime, devel)) == [
        "nvidia-cuda-crt (new) -> 13.0.88", "nvidia-cuda-nvcc (new) -> 13.0.88", "environment",
    ]  # fmt: skip
    again = lock_creation_and_update.update_lock(plan_of(project, {**data, "variant": "devel"}), devel)
    assert again is devel
    assert lock_creation_and_update.update_lock(plan_of(project, data), devel).content == runtime.content


def test_a_release_of_nvcc_that_the_index_lacks_is_a_fault_at_the_variants_line(project: Path, links: Path) -> None:
    write_wheel(links, "torch", "2.11.0")
    with pytest.raises(ProfileError, match="cannot be resolved") as caught:
        lock_creation_and_update.update_lock(
            plan_of(project, {**SMALL, "torch": "2.11.0", "gpus": ["h200"], "variant": "devel"}), None
        )
    assert "cuda-toolkit" in str(caught.value.hint)
    assert [fault.message.partition("[")[0] for fault in caught.value.faults] == ["cuda-toolkit"]


def compiled(links: Path) -> dict[str, Any]:
    """Return a profile with an extension from an sdist, and fill an index with the tools that compile it."""
    write_wheel(links, "torch", "2.11.0", ["beta"])
    needs = ["nvidia-cuda-nvcc==13.0.88; extra == 'nvcc'", "beta"]
    extras = ["nvcc", "crt", "cccl", "nvvm", "profiler", "cudart", "cublas", "cusparse", "cusolver", "curand", "nvrtc"]
    write_wheel(links, "cuda-toolkit", "13.0.2", needs, extras=[*extras, "nvtx"])
    write_wheel(links, "nvidia-cuda-nvcc", "13.0.88")
    for name in ("ninja", "setuptools", "wheel"):
        write_wheel(links, name, "1.0")
    file = links.parent / "kernels.tar.gz"
    sdist = {"sha256": write_tar(file, {"kernels-1/setup.py": b"KERNELS_CUDA"}), "url": file.as_uri()}
    build = {"env": {"KERNELS_CUDA": "1"}, "requires": ["alpha"]}
    entry = {"name": "kernels", "sdist": sdist, "build": build, "modules": ["kernels_cuda"]}
    return {**SMALL, "torch": "2.11.0", "gpus": ["h200"], "packages": ["alpha", "gamma"], "extensions": [entry]}


def tools(made: Lock) -> dict[str, str]:
    assert made.builder
    return {item.wheel.name: item.wheel.version for item in made.builder.wheels}


def test_the_compiler_of_an_extension_is_locked_with_the_image(project: Path, links: Path) -> None:
    """Of the profile's own packages, the build gets only those that it needs, because these packages are installed
    after the build. No package is listed twice."""
    data = compiled(links)
    plain = lock_creation_and_update.update_lock(plan_of(project, {**data, "extensions": []}), None)
    made = lock_creation_and_update.update_lock(plan_of(project, data), plain)
    assert made.wheels == plain.wheels
    wanted = {"ninja": "1.0", "setuptools": "1.0", "wheel": "1.0", "nvidia-cuda-nvcc": "13.0.88", "alpha": "1.0"}
    assert tools(made) == {**wanted, "cuda-toolkit": "13.0.2"}
    (one,) = made.extensions
    assert (one.kind, one.digest, one.env) == ("sdist", data["extensions"][0]["sdist"]["sha256"], {"KERNELS_CUDA": "1"})
    (change,) = lock_changes.version_changes(plain, made)
    assert change.startswith(f"kernels (new) -> {one.digest[:12]} for 9.0")
    assert made.stale(plan_of(project, {**data, "extensions": []})) == ["extensions"]


@pytest.mark.slow
def test_only_a_change_or_an_upgrade_moves_what_compiles_it(project: Path, links: Path) -> None:
    data = compiled(links)
    made = lock_creation_and_update.update_lock(plan_of(project, data), None)
    for name in ("ninja", "alpha", "nvidia-cuda-nvcc"):
        write_wheel(links, name, "27.0")
    lock_creation_and_update._chosen.cache_clear()  # as in a new process: one process queries the index only once
    assert lock_creation_and_update.update_lock(plan_of(project, data), made) is made
    flags = {**data["extensions"][0], "modules": ["kernels_cuda", "kernels_more"]}
    changed = lock_creation_and_update.update_lock(plan_of(project, {**data, "extensions": [flags]}), made)
    assert (tools(changed), changed.extensions[0].modules[1]) == (tools(made), "kernels_more")
    newest = lock_creation_and_update.update_lock(plan_of(project, data), made, frozenset({lock_file.EVERYTHING}))
    assert (tools(newest)["ninja"], tools(newest)["alpha"]) == ("27.0", "27.0")
    assert newest.versions["alpha"] == "27.0"  # the image and the compilation of the extension have the same version


def test_a_source_that_a_lock_has_already_is_not_downloaded(
    project: Path, links: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = compiled(links)
    write_profile(project, data)
    assert envbuild("lock", "sample").code == 0
    made = lock_file.read(project / "profiles" / "sample.lock.yaml")
    assert made

    def refuse(*_: object) -> None:
        pytest.fail("the source was downloaded")

    monkeypatch.setattr(extension_source_fetcher, "inspect_source", refuse)
    (project / "requirements.txt").write_text("gamma==1.0\n")
    done = envbuild("lock", "sample", "--requirements", "requirements.txt")
    assert done.code == 0, done.stderr
    own = lock_file.read(next((project / "profiles").glob("sample-*.lock.yaml")))
    assert own and own.extensions == made.extensions
    more = lock_creation_and_update.update_lock(plan_of(project, {**data, "packages": ["alpha"]}), made)
    assert more.extensions == made.extensions and more.wheels != made.wheels


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_an_extension_that_the_lock_has_as_a_wheel_is_refused_at_its_line(
    project: Path, links: Path, name: str
) -> None:
    """The wheel was requested by the profile, or required by torch."""
    data = compiled(links)
    data["extensions"][0]["name"] = name
    with pytest.raises(ProfileError, match="is also a locked wheel") as caught:
        lock_creation_and_update.update_lock(plan_of(project, data), None)
    (fault,) = caught.value.faults
    assert fault.field == "extensions[0]" and fault.line and fault.message.startswith(f"{name} 1.0 is already locked")


@pytest.mark.parametrize("name", ["torch", "python", "cuda"])
def test_an_extension_has_a_name_of_its_own(project: Path, links: Path, name: str) -> None:
    data = compiled(links)
    data["extensions"][0]["name"] = name
    with pytest.raises(ProfileError) as caught:
        plan_of(project, data)
    assert "extensions[0].name" in {fault.field for fault in caught.value.faults}


def test_tools_that_the_index_lacks_are_a_fault_at_the_extensions_line(project: Path, links: Path) -> None:
    data = compiled(links)
    data["extensions"][0]["build"]["requires"] = ["alpha>=99"]
    with pytest.raises(ProfileError) as caught:
        lock_creation_and_update.update_lock(plan_of(project, data), None)
    (fault,) = caught.value.faults
    assert fault.field == "extensions[0]" and "alpha>=99" in fault.message
    assert "alpha" in str(caught.value.hint)


def packaged(links: Path) -> dict[str, Any]:
    """Return the profile of `compiled`, but with Debian's nvcc."""
    write_wheel(links, "torch", "2.6.0", ["beta"])
    base = {"base": {"bootstrap": "trixie"}, "python": "3.13", "torch": "2.6.0", "gpus": ["a100"]}
    return {**compiled(links), **base, "toolchain": "debian"}


@pytest.mark.slow
def test_debian_packages_of_nvcc_are_locked_in_addition_to_those_of_the_image(
    project: Path, links: Path, mirror: Mirror
) -> None:
    plan = plan_of(project, packaged(links))
    made = lock_creation_and_update.update_lock(plan, None)
    assert made.builder and {item.name for item in made.builder.debs} == {"nvidia-cuda-toolkit", "g++-13"}
    assert made.builder.environment == {"CC": "gcc-13", "CXX": "g++-13"}
    assert set(mirror.requests[-1][1]) == {item.name for item in made.base}  # which stay as they are
    assert "nvidia-cuda-nvcc" not in tools(made)
    mirror.version = "2.0-1"
    assert lock_creation_and_update.update_lock(plan, made) is made
    mirror.version, mirror.versions = "1.0-1", {"nvidia-cuda-toolkit": "3.0-1"}
    newer = lock_creation_and_update.update_lock(plan, made, frozenset({lock_creation_and_update.BASE}))
    assert newer.builder and {item.version for item in newer.builder.debs} == {"1.0-1", "3.0-1"}
    assert newer.base == made.base
    mirror.version, mirror.versions = "2.0-1", {}
    moved = lock_creation_and_update.update_lock(plan, made, frozenset({lock_creation_and_update.BASE}))
    assert moved.builder and {item.version for item in (*moved.base, *moved.builder.debs)} == {"2.0-1"}


def test_nvcc_that_does_not_go_with_the_base_any_longer_says_what_to_do(
    project: Path, links: Path, mirror: Mirror
) -> None:
    data = packaged(links)
    made = lock_creation_and_update.update_lock(plan_of(project, {**data, "extensions": []}), None)
    mirror.gone, mirror.version = {"1.0-1"}, "2.0-1"
    with pytest.raises(ProfileError) as caught:
        lock_creation_and_update.update_lock(plan_of(project, data), made)
    (fault,) = caught.value.faults
    assert fault.field == "extensions[0]" and "nvidia-cuda-toolkit" in fault.message
    assert "--upgrade base" in str(caught.value.hint)


def test_an_archive_is_looked_through_when_it_is_locked(project: Path, links: Path, tmp_path: Path) -> None:
    file = tmp_path / "compat.tar.gz"
    sha256 = write_tar(file, {"libcuda.so.580.95.05": b"x"})
    plain = {**SMALL, "torch": "2.13.0", "gpus": ["h200"]}
    runtime = lock_creation_and_update.update_lock(plan_of(project, plain), None)
    data = {**plain, "driver": {"minimum": "550.54.14", "compat": {"sha256": sha256, "url": file.as_uri()}}}
    locked = lock_creation_and_update.update_lock(plan_of(project, data), runtime)
    size = file.stat().st_size
    assert locked.archives == (Archive("cuda-compat", "580.95.05", sha256, size),)
    assert locked.wheels == runtime.wheels
    assert list(lock_changes.version_changes(runtime, locked)) == [f"cuda-compat (new) -> 580.95.05 ({sha256[:12]})"]
    file.unlink()
    assert lock_creation_and_update.update_lock(plan_of(project, data), locked) is locked
    assert lock_creation_and_update.update_lock(plan_of(project, plain), locked).content == runtime.content


def test_a_torch_of_another_cuda_wants_the_archive_looked_at_again(project: Path, links: Path, tmp_path: Path) -> None:
    """The libraries in the archive are from a driver that is too old for the new CUDA version."""
    file = tmp_path / "compat.tar.gz"
    sha256 = write_tar(file, {"libcuda.so.570.26": b"x"})
    write_wheel(links, "torch", "2.9.1")
    compat = {"compat": {"sha256": sha256, "url": file.as_uri()}}
    data = {**SMALL, "torch": "2.9.1", "gpus": ["h200"], "driver": {"minimum": "470.57.02", **compat}}
    locked = lock_creation_and_update.update_lock(plan_of(project, data), None)
    with pytest.raises(ProfileError) as caught:
        lock_creation_and_update.update_lock(plan_of(project, {**data, "torch": "2.13.0"}), locked)
    (fault,) = caught.value.faults
    assert (fault.field, fault.message) == ("driver.compat", "cuda-compat has version 570.26, but must match >=580")


def test_differences_are_a_line_each(project: Path) -> None:
    one = lock_for(plan_of(project, SMALL))
    two = dataclasses.replace(one, suite=None, image="x", python="3.12", base=(), environment={}, wheels=one.wheels[:1])
    assert list(lock_changes.version_changes(None, one)) == ["3 wheels, 4 Debian packages"]
    assert list(lock_changes.version_changes(one, one)) == []
    lines = list(lock_changes.version_changes(one, two))
    assert "base image (new) -> x" in lines
    assert "python 3.11 -> 3.12" in lines
    assert "torch 2.13.0 -> (gone)" in lines
    assert "libstdc++6 1:2.3+deb12u1~x-4 -> (gone)" in lines
    assert lines[-1] == "environment"


def test_profiles_with_the_same_requests_are_looked_up_once(project: Path, links: Path, monkeypatch: Any) -> None:
    """Several profiles are resolved at the same time, but reported and written in the requested order."""
    calls: list[Sequence[str]] = []
    resolve = wheel_resolution_and_download.resolve_wheels

    def counted(requirements: Sequence[str], *more: Any) -> wheel_resolution_and_download.Resolved:
        calls.append(requirements)
        return resolve(requirements, *more)

    monkeypatch.setattr(wheel_resolution_and_download, "resolve_wheels", counted)
    names = [f"same-{letter}" for letter in "cabd"]
    for name in names:
        write_profile(project, SMALL, name)
    write_profile(project, {**SMALL, "packages": ["beta"]}, "other")
    done = envbuild("lock", *names, "other", "--json")
    assert [row["profile"] for row in done.document["profiles"]] == [*names, "other"]
    assert sorted("alpha" in requirements for requirements in calls) == [False, True]
    assert all((project / "profiles" / f"{name}.lock.yaml").is_file() for name in names)


def test_the_first_failure_of_several_is_reported_and_earlier_results_are_written(project: Path, links: Path) -> None:
    for name, wanted in (("a", "alpha"), ("b", "nosuch"), ("c", "beta"), ("d", "nosuch-either")):
        write_profile(project, {**SMALL, "packages": [wanted]}, name)
    done = envbuild("lock", "a", "b", "c", "d", "--json")
    assert done.code == 3
    assert "nosuch" in str(done.document["error"]) and "either" not in str(done.document["error"])
    locks = [(project / "profiles" / f"{name}.lock.yaml").is_file() for name in "abcd"]
    assert locks == [True, False, False, False]
    assert envbuild("lock", "c").code == 0, "a failure does not last"
