"""The disk space that the image of a lock needs, and the error if the disk has less."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from envbuild.fetch import sha256_file_store
from envbuild.fetch.archive_spec import COMPAT, TOOLKIT, Archive
from envbuild.image import debian_base_tar
from envbuild.image.docker_engine import Engine
from envbuild.image.layers import layer_cache
from envbuild.image.oci import base_image_download, disk_space_needs
from envbuild.lock.lock_file import Lock
from envbuild.registry import oci_types
from envbuild.util.errors import DiskError, EngineError
from unit.image.base_images import PLATFORM, PushedBase, debian
from unit.registries import Registry, serving
from unit.support import PROFILE, lock_for, plan_of, sha


@pytest.fixture
def locked(project: Path) -> Lock:
    """A lock whose files are in the stores: the sizes are those of the lock."""
    plain = lock_for(plan_of(project, PROFILE))
    archives = tuple(Archive(name, "1.2", sha(name), 1_000_000) for name in (TOOLKIT, COMPAT))
    made = dataclasses.replace(plain, archives=archives)
    files = [sha256_file_store.wheel_store().path(w.wheel.sha256, w.wheel.file) for w in made.wheels]
    files += [sha256_file_store.archive_store().path(item.sha256, item.name) for item in made.archives]
    files += [sha256_file_store.debs().path(deb.sha256, deb.file) for deb in made.debs]
    for file in (*files, *(debian_base_tar.tar_file(made, apt=apt) for apt in (False, True))):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return made


def test_the_disk_is_looked_at_before_with_figures(
    locked: Lock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = SimpleNamespace(data_folder=tmp_path)
    needed = disk_space_needs.needed_bytes(locked) + disk_space_needs.fetched_bytes(locked)
    free = {"bytes": needed}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, free["bytes"]))
    disk_space_needs.require_disk_space(cast(Engine, engine), locked)
    free["bytes"] = needed - 1
    figure = f"{needed / 1e9:.1f} GB"
    assert figure != "0.0 GB"
    with pytest.raises(DiskError, match=f"{figure} .* {figure} are free") as caught:
        disk_space_needs.require_disk_space(cast(Engine, engine), locked)
    assert caught.value.code == 6


def test_a_load_needs_twice_the_layers_that_are_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine keeps the archive until the layers are unpacked. If its disk is elsewhere, nothing is known."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 2_000_000_000))
    engine = SimpleNamespace(data_folder=tmp_path)
    disk_space_needs.require_load_space(cast(Engine, engine), 1_000_000_000)
    with pytest.raises(DiskError, match=r"needs about 2\.2 GB in .*, 2\.0 GB are free"):
        disk_space_needs.require_load_space(cast(Engine, engine), 1_100_000_000)
    engine.data_folder = None
    disk_space_needs.require_load_space(cast(Engine, engine), 1_100_000_000)


def test_an_engine_of_another_platform_is_refused(locked: Lock) -> None:
    engine = SimpleNamespace(platform="linux/arm64")
    with pytest.raises(EngineError, match="linux/arm64"):
        disk_space_needs.require_platform(cast(Engine, engine), locked)


def test_the_required_disk_space_grows_with_the_lock(locked: Lock) -> None:
    assert disk_space_needs.needed_bytes(locked) > sum(w.bytes for w in locked.wheels) * 3
    assert disk_space_needs.fetched_bytes(locked) == 0
    shutil.rmtree(sha256_file_store.wheel_store().folder)
    assert disk_space_needs.fetched_bytes(locked) == sum(w.bytes for w in locked.wheels)
    shutil.rmtree(sha256_file_store.archive_store().folder)
    assert disk_space_needs.fetched_bytes(locked) == sum(w.bytes for w in locked.wheels) + sum(
        a.bytes for a in locked.archives
    )
    without = dataclasses.replace(locked, archives=())
    packed = sum(archive.bytes for archive in locked.archives)
    assert disk_space_needs.needed_bytes(locked) > disk_space_needs.needed_bytes(without) + packed * 3


def test_missing_debian_packages_and_both_bases_count(locked: Lock) -> None:
    """A base needs space for its tar and for a copy of its packages."""
    base, apt = (sum(deb.bytes for deb in debs) for debs in (locked.base, locked.apt))
    assert base > 0 < apt
    debian_base_tar.tar_file(locked, apt=True).unlink()
    with_apt = int((base + apt) * 5.5)
    assert disk_space_needs.fetched_bytes(locked) == with_apt
    debian_base_tar.tar_file(locked).unlink()
    both = int((2 * base + apt) * 5.5)
    assert disk_space_needs.fetched_bytes(locked) == both
    shutil.rmtree(sha256_file_store.debs().folder)
    assert disk_space_needs.fetched_bytes(locked) == both + base + apt
    for has_apt in (False, True):
        debian_base_tar.tar_file(locked, apt=has_apt).touch()
    assert disk_space_needs.fetched_bytes(locked) == apt, "they are downloaded even if both bases are made"


def test_where_something_is_compiled_the_disk_must_take_its_tools_too(project: Path) -> None:
    kernels = {"name": "kernels", "git": "https://git.example/k", "commit": "c" * 40, "modules": ["k"]}
    card = {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [kernels]}
    made = lock_for(plan_of(project, {**card, "toolchain": {"sha256": "a" * 64}}))
    trixie = {"base": {"bootstrap": "trixie"}, "python": "3.13", "torch": "2.6.0", "gpus": ["a100"]}
    of_debian = lock_for(plan_of(project, {**card, **trixie, "toolchain": "debian"}))
    for lock in (made, of_debian):
        tools = lock.builder
        assert tools
        packed = sum(item.bytes for item in tools.wheels) + sum(item.bytes for item in tools.archives)
        packed += sum(item.bytes for item in tools.debs)
        assert packed > 0
        assert disk_space_needs.fetched_bytes(lock, compiling=True) == disk_space_needs.fetched_bytes(lock) + packed
        assert disk_space_needs.needed_bytes(lock, compiling=True) > disk_space_needs.needed_bytes(lock) + packed * 3
    assert made.builder and of_debian.builder and made.builder.archives and of_debian.builder.debs


def test_the_layers_of_a_base_image_count_once_their_sizes_are_known(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers count with the sizes of their blobs until they were read, and with the sizes of their tars afterwards.
    They need space on the engine's disk, not only in the cache."""
    base, plain = (
        PushedBase([debian(), {"srv/data": bytes(5_000_000)}]),
        PushedBase([debian()], media_type=oci_types.LAYER_TAR, pack=bytes),
    )
    engine, free = SimpleNamespace(data_folder=tmp_path), {"bytes": 0}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, free["bytes"]))
    with serving(Registry()) as registry:
        for pushed, ratio in ((base, 2.8), (plain, 1)):
            reference, packed = pushed.reference(registry), sum(map(len, pushed.blobs))
            lock = lock_for(plan_of(project, {**PROFILE, "base": {"image": reference}, "apt": []}))
            assert disk_space_needs.lacks_base_image(lock)
            before = disk_space_needs.needed_bytes(lock)
            base_image_download.download_base_manifest(reference, PLATFORM)
            assert not disk_space_needs.lacks_base_image(lock)
            assert disk_space_needs.needed_bytes(lock) - before == pytest.approx(2 * ratio * packed, abs=2)
            free["bytes"] = disk_space_needs.needed_bytes(lock) + disk_space_needs.fetched_bytes(lock) - 1
            with pytest.raises(DiskError):
                disk_space_needs.require_disk_space(cast(Engine, engine), lock)
            free["bytes"] += 1
            disk_space_needs.require_disk_space(cast(Engine, engine), lock)
            image = base_image_download.download_base_image(reference, PLATFORM, lambda name, count: None)
            for layer in image.layers:
                layer_cache.stream_layer(image.recipe(layer))
            assert disk_space_needs.needed_bytes(lock) == before + 2 * sum(map(len, pushed.tars))


def test_a_lock_without_a_base_image_lacks_none(locked: Lock) -> None:
    assert not disk_space_needs.lacks_base_image(locked)
