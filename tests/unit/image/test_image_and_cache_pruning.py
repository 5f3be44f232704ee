from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest

from envbuild.cli import prune as command
from envbuild.fetch import sha256_file_store
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import COMPAT, Archive
from envbuild.image import (
    build_records,
    debian_base_tar,
    extension_wheel_build,
    image_and_cache_pruning,
    lock_paths_of_built_images,
)
from envbuild.image.docker_engine import Engine
from envbuild.image.layers import layer_cache
from envbuild.image.layers.layer_cache import LayerRecipe
from envbuild.image.layers.layer_writer import LayerFile, WrittenLayer, write_layer
from envbuild.image.layers.wheel_layers import WheelLayer, WheelOfLayer
from envbuild.image.oci import base_image_download, lock_image_lookup_and_recipe
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import make_build_and_test
from envbuild.registry import oci_types
from envbuild.runners import docker_runner
from envbuild.util import user_folders
from unit.image.base_images import PLATFORM, PushedBase, debian
from unit.registries import Registry, serving
from unit.support import PROFILE, envbuild, lock_for, plan_of, sha


class FakeEngine:
    """An engine with tags, containers and untagged images, as (tag or id, handle, bytes)."""

    def __init__(self) -> None:
        self.tagged: list[tuple[str, str, int]] = []
        self.loose: list[tuple[str, str, int]] = []
        self.running: set[str] = set()
        self.removed: list[str] = []

    def images(self, prefix: str) -> list[tuple[str, str, int]]:
        return [item for item in self.tagged if item[0].startswith(prefix)]

    def untagged(self, label: str) -> list[tuple[str, str, int]]:
        return list(self.loose)

    def used(self) -> set[str]:
        return set(self.running)

    def remove(self, reference: str) -> None:
        self.removed.append(reference)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty temporary folder, so that leftovers of killed processes on this machine do not matter."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def locked(project: Path) -> Lock:
    return lock_for(plan_of(project, PROFILE))


def old(engine: FakeEngine, *locks: Lock) -> list[str]:
    return [item.name for item in image_and_cache_pruning.images(cast(Engine, engine), ["sample", "a"], locks)]


def record(handle: str) -> None:
    made = build_records.Record(f"sha256:{handle}", handle, "sha256:x", "r", (), "docker")
    build_records.write(made)


def test_only_what_nothing_needs_is_old(engine: FakeEngine, locked: Lock) -> None:
    engine.tagged = [
        ("envbuild/sample:0123456789ab", "h1", 10),
        (f"envbuild/sample:{locked.short}", "h2", 10),
        ("envbuild/sample:verified", "h3", 10),
        ("envbuild/sample:ba9876543210", "h3", 10),  # the verified image under another name
        ("envbuild/sample:111111111111", "h4", 10),  # in use
        ("other/sample:0123456789ab", "h5", 10),
        ("envbuild/other:0123456789ab", "h6", 10),  # a profile that is not visible from here
    ]
    engine.running = {"h4"}
    assert old(engine, locked) == ["envbuild/sample:0123456789ab"]


def test_an_image_in_use_stays_even_without_a_name(engine: FakeEngine, locked: Lock) -> None:
    engine.loose = [("sha256:a", "h1", 10), ("sha256:b", "h2", 10), ("sha256:c", "a child image's", 10)]
    record("h1")
    record("h2")
    engine.running = {"h2"}
    assert old(engine, locked) == ["h1"]


def test_without_locks_the_verified_image_still_stays(engine: FakeEngine, locked: Lock) -> None:
    engine.tagged = [("envbuild/sample:verified", "h1", 10), ("envbuild/sample:0123456789ab", "h1", 10)]
    assert old(engine) == []


def test_caches_keep_what_a_lock_names(locked: Lock) -> None:
    archive = Archive(COMPAT, "580.95.05", sha("compat"), 5)
    locked = dataclasses.replace(locked, archives=(archive,))
    wheel, deb = locked.wheels[0].wheel, locked.base[0]
    for found, sha256, name in (
        (sha256_file_store.wheel_store(), wheel.sha256, wheel.file),
        (sha256_file_store.debs(), deb.sha256, deb.file),
        (sha256_file_store.archive_store(), archive.sha256, archive.name),
    ):
        for digest in (sha256, "0" * 64):
            found.path(digest, name).parent.mkdir(parents=True)
            found.path(digest, name).write_bytes(b"12345")
        for name in (".incoming-x", ".incoming-now"):
            (found.folder / name).mkdir()
        os.utime(found.folder / ".incoming-x", (0, 0))
    debian_base_tar.tar_file(locked).write_bytes(b"1234")
    debian_base_tar.tar_file(locked).with_suffix(".sha256").touch()
    (user_folders.cache_folder("bases") / "old.tar").write_bytes(b"123")
    removable = list(image_and_cache_pruning.caches([], [locked]))
    names = {(item.kind, Path(item.name).name, item.bytes) for item in removable}
    assert names == {
        ("wheels", "0" * 64, 5), ("wheels", ".incoming-x", 0), ("debs", "0" * 64, 5), ("debs", ".incoming-x", 0),
        ("archives", "0" * 64, 5), ("archives", ".incoming-x", 0), ("bases", "old.tar", 3),
    }  # fmt: skip
    image_and_cache_pruning.remove_items(None, removable)
    assert list(image_and_cache_pruning.caches([], [locked])) == []
    assert sha256_file_store.wheel_store().holds(wheel.sha256, wheel.file)
    assert sha256_file_store.debs().holds(deb.sha256, deb.file)
    assert sha256_file_store.archive_store().holds(archive.sha256, archive.name)
    assert (
        debian_base_tar.tar_file(locked).is_file() and debian_base_tar.tar_file(locked).with_suffix(".sha256").is_file()
    )
    assert (sha256_file_store.wheel_store().folder / ".incoming-now").is_dir()


def test_a_context_goes_only_if_its_name_is_held(locked: Lock) -> None:
    for name in ("sample", "elsewhere"):
        (user_folders.cache_folder("contexts") / name).mkdir()
        (user_folders.cache_folder("contexts") / name / "Dockerfile").write_text("FROM x", encoding="utf-8")
    found = [
        (item.kind, Path(item.name).name, item.bytes)
        for item in image_and_cache_pruning.caches(["sample", "never-built"], [])
    ]
    assert found == [("contexts", "sample", 6)]


def test_a_lock_without_a_profile_of_its_name_keeps_what_it_needs(
    engine: FakeEngine, locked: Lock, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a variant, or of a project's requirements, has no profile of its name."""
    lock_file.write(dataclasses.replace(locked, wheels=()), project / "profiles" / "sample.lock.yaml", "sample")
    lock_file.write(locked, project / "profiles" / "sample-devel.lock.yaml", "sample-devel")
    wheel = locked.wheels[0].wheel
    sha256_file_store.wheel_store().path(wheel.sha256, wheel.file).parent.mkdir(parents=True)
    engine.tagged = [
        ("envbuild/sample-devel:0123456789ab", "h1", 1),
        (f"envbuild/sample-devel:{locked.short}", "h2", 1),
    ]
    held: list[str] = []

    @contextlib.contextmanager
    def alone(name: str, say: object) -> Iterator[None]:
        held.append(name)
        yield

    monkeypatch.setattr(command, "Engine", lambda: engine)
    monkeypatch.setattr(make_build_and_test, "one_run_per_profile", alone)
    done = envbuild("prune", "--dry-run", "--json")
    assert [row["name"] for row in done.document["items"]] == ["envbuild/sample-devel:0123456789ab"]
    assert {"sample", "sample-devel"} <= set(held)


@pytest.fixture
def elsewhere(engine: FakeEngine, locked: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of a profile that was built by its path, in a folder that prune does not search."""
    file = tmp_path / "else where" / "mine.lock.yaml"
    file.parent.mkdir()
    lock_file.write(locked, file, "mine")
    lock_paths_of_built_images.note_lock(file)
    monkeypatch.setattr(command, "Engine", lambda: engine)
    monkeypatch.setattr(docker_runner, "sweep_containers", lambda engine: None)
    engine.tagged = [(f"envbuild/mine:{tag}", handle, 1) for tag, handle in
                     ((locked.short, "h1"), ("0123456789ab", "h2"), ("ba9876543210", "another user's"))]  # fmt: skip
    for handle in ("h1", "h2"):
        record(handle)
    wheel = locked.wheels[0].wheel
    sha256_file_store.wheel_store().path(wheel.sha256, wheel.file).parent.mkdir(parents=True)
    return file


def pruned(*options: str) -> list[str]:
    done = envbuild("prune", "--json", *options)
    assert done.code == 0, done.stdout
    return [row["name"] for row in done.document["items"]]


def test_an_image_built_from_a_path_is_kept_while_its_lock_names_it(elsewhere: Path, engine: FakeEngine) -> None:
    assert pruned("--dry-run") == ["envbuild/mine:0123456789ab"]
    assert pruned() == engine.removed == ["envbuild/mine:0123456789ab"]
    assert list(lock_paths_of_built_images.all_locks()) == [elsewhere]


def test_a_lock_that_is_gone_keeps_nothing(elsewhere: Path, engine: FakeEngine, locked: Lock) -> None:
    elsewhere.unlink()
    found = pruned("--images-only")
    assert found == [f"envbuild/mine:{locked.short}", "envbuild/mine:0123456789ab"]
    assert list(lock_paths_of_built_images.all_locks()) == [elsewhere], "an image of that name is still there"
    engine.tagged = []
    assert [Path(name).name for name in pruned()] == [locked.wheels[0].wheel.sha256]
    assert list(lock_paths_of_built_images.all_locks()) == []


def test_without_an_engine_only_cached_files_are_removed(
    elsewhere: Path, locked: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note of a lock that is gone stays, because an image of it may exist."""
    monkeypatch.setattr(command, "Engine", Engine)
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")
    wheel = sha256_file_store.wheel_store().path(locked.wheels[0].wheel.sha256, "any.whl").parent
    elsewhere.unlink()
    text = "no Docker Engine answers at unix:///no/such/docker.sock: no such file or directory"
    done = envbuild("prune", "--dry-run", "--json")
    assert (done.code, done.document["state"], done.document["images_skipped"]) == (0, "kept", text)
    assert [row["name"] for row in done.document["items"]] == [str(wheel)] and wheel.is_dir()
    done = envbuild("prune")
    assert (done.code, f"note: images of an engine were skipped: {text}\n" in done.stderr) == (0, True)
    assert not wheel.exists()
    assert list(lock_paths_of_built_images.all_locks()) == [elsewhere]


def test_a_note_that_another_prune_removed_is_ignored(elsewhere: Path, locked: Lock) -> None:
    other = elsewhere.with_name("other.lock.yaml")
    lock_file.write(locked, other, "other")
    lock_paths_of_built_images.note_lock(other)
    found = lock_paths_of_built_images.all_locks()
    first = next(found)
    lock_paths_of_built_images.forget_lock(other if first == elsewhere else elsewhere)
    assert list(found) == []


def test_a_lock_elsewhere_that_cannot_be_read_stops_it(elsewhere: Path, engine: FakeEngine) -> None:
    for text in ("format: 1\n", "format: 2\n", "a: [\n"):
        elsewhere.write_text(text, encoding="utf-8")
        done = envbuild("prune")
        assert (done.code, str(elsewhere) in done.stderr, engine.removed) == (3, True, [])
        assert "; or delete it, if that checkout is not used any more\n" in done.stderr


def test_a_lock_seen_from_here_that_cannot_be_read_is_in_use(elsewhere: Path, project: Path) -> None:
    file = project / "profiles" / "sample.lock.yaml"
    file.write_text("format: 2\n", encoding="utf-8")
    lock_paths_of_built_images.note_lock(file)
    done = envbuild("prune")
    assert (done.code, "use a newer envbuild\n" in done.stderr) == (3, True)


def test_a_profile_that_is_first_made_while_others_are_waited_for_is_waited_for_too(
    elsewhere: Path, locked: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of this profile did not exist when prune began to wait for the profiles' locks; prune never holds some
    locks while it waits for others."""
    beginning = elsewhere.with_name("beginning.lock.yaml")
    elsewhere.unlink()  # it contains the same wheel
    held: list[str] = []
    taken: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def alone(name: str, say: object) -> Iterator[None]:
        if name == "mine" and not beginning.exists():
            lock_file.write(locked, beginning, "beginning")
            lock_paths_of_built_images.note_lock(beginning)
        taken.append((name, len(held)))
        held.append(name)
        yield
        held.remove(name)

    monkeypatch.setattr(make_build_and_test, "one_run_per_profile", alone)
    assert locked.wheels[0].wheel.sha256 not in {Path(name).name for name in pruned()}
    names = [name for name, _ in taken]
    before = len(names) // 2
    assert "beginning" not in names[:before] and "beginning" in names[before:]
    assert [number for _, number in taken] == [*range(before), *range(before + 1)], "two prunes could block each other"
    assert held == []


def test_images_and_files_named_by_hash_are_listed_with_their_content(engine: FakeEngine, locked: Lock) -> None:
    record("h9")
    engine.loose = [(f"sha256:{'5' * 64}", "h9", 10)]
    (image,) = image_and_cache_pruning.images(cast(Engine, engine), ["sample"], [])
    assert (image.name, image.holds) == ("h9", "without a tag, of lock 555555555555")
    file = sha256_file_store.wheel_store().path("a" * 64, "numpy-1.0-py3-none-any.whl")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    (wheel,) = image_and_cache_pruning.caches([], [locked])
    assert (Path(wheel.name).name, wheel.holds) == ("a" * 64, file.name)


def test_evidence_and_records_are_not_caches(locked: Lock) -> None:
    for kind in ("evidence", "builds"):
        (user_folders.state_folder(kind) / "x").write_text("x", encoding="utf-8")
    assert list(image_and_cache_pruning.caches([], [])) == []


def test_images_are_removed_by_name(engine: FakeEngine, locked: Lock) -> None:
    engine.tagged = [("envbuild/sample:0123456789ab", "h1", 10)]
    image_and_cache_pruning.remove_items(
        cast(Engine, engine), image_and_cache_pruning.images(cast(Engine, engine), ["sample"], [])
    )
    assert engine.removed == ["envbuild/sample:0123456789ab"]


def test_files_that_are_already_gone_are_not_a_fault(tmp_path: Path) -> None:
    image_and_cache_pruning.remove_items(None, [image_and_cache_pruning.Removable("wheels", str(tmp_path / "gone"), 1)])


def test_a_lock_with_another_environment_keeps_its_own_tag(engine: FakeEngine, locked: Lock) -> None:
    other = dataclasses.replace(locked, environment={})
    engine.tagged = [(f"envbuild/a:{locked.short}", "h1", 1), (f"envbuild/a:{other.short}", "h2", 1)]
    assert old(engine, other) == [f"envbuild/a:{locked.short}"]


def test_compiled_wheels_and_their_sources_stay_as_long_as_a_lock_names_them(project: Path) -> None:
    kernels = {"name": "kernels", "git": "https://git.example/kernels", "commit": "c" * 40, "modules": ["kernels"]}
    other = {"name": "other", "sdist": {"sha256": "e" * 64}, "modules": ["other"]}
    card = {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [kernels, other]}
    made = lock_for(plan_of(project, card))
    assert made.builder
    used = [("sources", "c" * 40), ("archives", "e" * 64), ("wheels", made.builder.wheels[0].wheel.sha256)]
    used += [("extensions", extension_wheel_build.key(made, one)) for one in made.extensions]
    unused = [("sources", "d" * 40), ("archives", "f" * 64), ("wheels", "0" * 64), ("extensions", "0" * 64)]
    for kind, name in (*used, *unused):
        (user_folders.cache_folder(kind) / name).mkdir()
    found = {(item.kind, Path(item.name).name) for item in image_and_cache_pruning.caches([], [made])}
    assert found == set(unused)
    assert {(item.kind, Path(item.name).name) for item in image_and_cache_pruning.caches([], [])} == {*used, *unused}


def with_python(lock: Lock) -> Lock:
    """The lock with the package of its Python, which the locks of `lock_for` lack."""
    return dataclasses.replace(lock, base=(Deb("python3.11", "3.11.2-6", sha("deb"), 1, "pool/p.deb"), *lock.base))


@dataclasses.dataclass(frozen=True)
class StandInRecipe:
    """A layer with one small file, under the key of another recipe."""

    key: str
    keeps_blob: bool

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        return write_layer([LayerFile("opt/file", self.key.encode())], packed, plain)


def cache_layers(lock: Lock, compiled: Mapping[str, WheelOfLayer] | None = None) -> set[Path]:
    """Put small layers into the cache under the keys of the lock's layers, and return the files that were added."""
    before = set(layer_files())
    for described in lock_image_lookup_and_recipe.describe_lock(lock, compiled or {}).layers:
        assert described.recipe.key
        layer_cache.stream_layer(StandInRecipe(described.recipe.key, described.recipe.keeps_blob))
    return set(layer_files()) - before


def layer_files() -> list[Path]:
    return [path for path in user_folders.cache_folder("layers").rglob("*") if path.is_file()]


def set_old() -> None:
    for path in [*layer_files(), user_folders.cache_folder("layers/blobs")]:
        os.utime(path, (0, 0))


def removable_layers(*locks: Lock) -> set[Path]:
    return {Path(one.name) for one in image_and_cache_pruning.caches([], locks) if one.kind.startswith("layers")}


def test_cached_layers_stay_as_long_as_a_lock_needs_them(locked: Lock) -> None:
    locked = with_python(locked)
    other = dataclasses.replace(locked, base=locked.base[:-1])
    files = cache_layers(locked)
    own = cache_layers(other)
    assert len([path for path in own if path.parent.name == "blobs"]) == 2, "its base and its apt packages"
    assert len(own) == 5, "the entries of both and of its virtual environment"
    assert removable_layers() == set(), "`export oci` may use them"
    set_old()
    assert removable_layers(locked, other) == set()
    assert removable_layers(locked) == own
    fewer = dataclasses.replace(locked, wheels=locked.wheels[:-1])
    assert len(removable_layers(fewer, other) & files) == 0 and len(removable_layers(fewer) - own) == 1
    assert removable_layers() == files | own
    hidden = user_folders.cache_folder("layers") / ".envbuild-tmp-archive-x"
    hidden.mkdir()
    os.utime(hidden, (0, 0))
    image_and_cache_pruning.remove_items(None, image_and_cache_pruning.caches([], [locked]))
    assert set(layer_files()) == files and not hidden.exists()
    assert all(map(layer_cache.known_layer, recipes_of(locked)))


def recipes_of(lock: Lock) -> list[LayerRecipe]:
    return [described.recipe for described in lock_image_lookup_and_recipe.describe_lock(lock, {}).layers]


def test_the_blob_of_a_layer_and_its_entry_stay_for_a_day_after_each_use(locked: Lock) -> None:
    locked = with_python(locked)
    cache_layers(locked)
    set_old()
    used, _ = [recipe.key for recipe in recipes_of(locked) if recipe.keeps_blob and recipe.key]
    layer = layer_cache.stream_layer(StandInRecipe(used, True))
    left = {path.name for path in layer_files() if path not in removable_layers()}
    assert left == {f"{used}.json", layer.digest[7:]}


def test_the_layer_of_an_extension_stays_while_its_wheel_is_in_the_cache(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = {"name": "kernels", "git": "https://git.example/kernels", "commit": "c" * 40, "modules": ["kernels"]}
    card = {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [kernels]}
    lock = with_python(lock_for(plan_of(project, card)))
    wheel = extension_wheel_build.BuiltWheel("kernels", "k", Path("kernels.whl"), sha("wheel"), 1, 1, "2026")
    files = cache_layers(lock, {"kernels": WheelOfLayer(wheel.path, wheel.sha256)})
    set_old()
    (of_wheel,) = removable_layers(lock)
    assert of_wheel.suffix == ".json"
    monkeypatch.setattr(extension_wheel_build, "find_wheel", lambda lock, one: wheel)
    assert removable_layers(lock) == set()
    assert removable_layers() == files


def test_layers_on_a_base_image_stay_also_if_the_image_is_not_in_the_cache(project: Path) -> None:
    """Layers of wheels are kept even then, because they do not depend on the image."""
    with serving(Registry()) as registry:
        base = PushedBase([debian()], {"Env": ["PATH=/usr/bin"]})
        lock = lock_for(plan_of(project, {**PROFILE, "base": {"image": base.reference(registry)}, "apt": []}))
        base_image_download.download_base_image(str(lock.image), PLATFORM, lambda name, count: None)
        files = cache_layers(lock)
    set_old()
    assert removable_layers(lock) == set()
    wheels = [recipe.key for recipe in recipes_of(lock) if isinstance(recipe, WheelLayer)]
    assert wheels
    for folder in ("image-contents", "images"):
        for path in user_folders.cache_folder(folder).iterdir():
            path.unlink()
        left = files - removable_layers(lock)
        assert {path.stem for path in left} == set(wheels)


def test_a_lock_that_has_no_valid_image_keeps_no_layers(locked: Lock) -> None:
    files = cache_layers(with_python(locked))
    set_old()
    assert removable_layers(locked) == files, "its base has no package of its Python"


def test_the_files_of_a_base_image_stay_as_long_as_a_lock_names_it(locked: Lock) -> None:
    folder = user_folders.cache_folder("images")
    with serving(Registry()) as registry:
        base, other = PushedBase([{"a": b"1"}, {"b": b"2"}]), PushedBase([{"a": b"1"}, {"c": b"3"}])
        references = [base.reference(registry), other.reference(registry)]
        for reference in references:
            base_image_download.download_base_image(reference, PLATFORM, lambda name, count: None)
    names = {path.name for path in folder.iterdir()}
    assert len(names) == 7, "two manifests, two configurations, three layers"
    recent = image_and_cache_pruning.caches([], [locked])
    assert not [item for item in recent if item.kind == "images"], "`verify --rebuild` may use them"
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    for name in (".incoming-x", ".incoming-now"):
        (folder / name).touch()
    os.utime(folder / ".incoming-x", (0, 0))
    lock = dataclasses.replace(locked, suite=None, image=references[0], base=(), apt=())
    needed = base_image_download.cached_files(references[0], PLATFORM)
    assert len(needed) == 4
    removable = list(image_and_cache_pruning.caches([], [lock, locked]))
    assert {(item.kind, Path(item.name).name) for item in removable} == {
        ("images", name) for name in (names - needed) | {".incoming-x"}
    }
    image_and_cache_pruning.remove_items(None, removable)
    assert {path.name for path in folder.iterdir()} == needed | {".incoming-now"}
    left = image_and_cache_pruning.caches([], [locked])
    assert {Path(item.name).name for item in left if item.kind == "images"} == needed


def test_the_files_of_a_base_image_stay_for_a_day_after_each_download() -> None:
    """Files that were in the cache before the download are kept too, and so is the part of a layer."""
    folder = user_folders.cache_folder("images")
    base = PushedBase([debian(), {"etc/motd": b"hello"}])
    part = folder / f".{oci_types.digest_of(base.blobs[0])[7:]}.part"
    removable: list[image_and_cache_pruning.Removable] = []

    def show(name: str, count: int) -> None:
        removable.extend(one for one in image_and_cache_pruning.caches([], []) if one.kind == "images")

    with serving(Registry()) as registry:
        reference = base.reference(registry)
        image = base_image_download.download_base_image(reference, PLATFORM, lambda name, count: None)
        (folder / image.layers[0].digest[7:]).unlink()
        part.write_bytes(base.blobs[0][:10])
        for file in folder.iterdir():
            os.utime(file, (0, 0))
        assert len(list(image_and_cache_pruning.caches([], []))) == 4
        base_image_download.download_base_image(reference, PLATFORM, show)
    show("", 0)
    assert removable == []


def test_what_was_read_from_a_base_image_stays_as_long_as_a_lock_needs_it(project: Path) -> None:
    """Two locks on one image with different Pythons have one file each."""
    locks = list[Lock]()
    with serving(Registry()) as registry:
        for base in (PushedBase([debian()], {"Env": ["PATH=/usr/bin"]}), PushedBase([debian("3.11.9")])):
            profile = {**PROFILE, "base": {"image": base.reference(registry)}, "apt": []}
            locks.append(lock_for(plan_of(project, profile)))
            base_image_download.download_base_image(str(locks[-1].image), PLATFORM, lambda name, count: None)
            lock_image_lookup_and_recipe.describe_lock(locks[-1], {})
    folder = user_folders.cache_folder("image-contents")
    first, second = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)

    def removable(*current: Lock) -> list[Path]:
        return [Path(one.name) for one in image_and_cache_pruning.caches([], current) if one.kind == "image-contents"]

    assert removable() == [], "`verify --rebuild` may use them"
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    assert removable(*locks) == []
    assert removable(locks[0]) == removable(locks[0], dataclasses.replace(locks[1], python="3.12")) == [second]
    assert removable(locks[1]) == [first]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(base_image_download, "read_base_image", lambda *_: None)
        assert set(removable(*locks)) == {first, second}, "an image that is not in the cache is read again anyway"


def test_old_results_of_apt_are_removed(locked: Lock) -> None:
    results = user_folders.cache_folder("apt-results")
    for name, days in (("new", 20), ("old", 40)):
        (results / name).write_bytes(b"12345")
        os.utime(results / name, (time.time() - days * 86400,) * 2)
    removable = list(image_and_cache_pruning.caches([], [locked]))
    assert [(item.kind, item.name, item.bytes) for item in removable] == [("apt-results", str(results / "old"), 5)]
    image_and_cache_pruning.remove_items(None, removable)
    assert [path.name for path in results.iterdir()] == ["new"]


def test_links_and_plans_of_installations_are_removed_when_they_are_old(locked: Lock, tmp_path: Path) -> None:
    links, plans = user_folders.cache_folder("find-links"), user_folders.cache_folder("install-plans")
    (tmp_path / "large.whl").write_bytes(b"x" * 1000)
    for folder in (links / locked.short, links / ("0" * 12), links / ("1" * 12)):
        folder.mkdir()
        (folder / "large.whl").symlink_to(tmp_path / "large.whl")
    for name in ("new", "old"):
        (plans / f"{name}.json").write_bytes(b"12345")
    days = {links / locked.short: 100, links / ("0" * 12): 2, plans / "new.json": 20, plans / "old.json": 40}
    for path, count in days.items():
        os.utime(path, (time.time() - count * 86400,) * 2)
    removable = list(image_and_cache_pruning.caches([], [locked]))
    assert [(item.kind, Path(item.name).name, item.bytes, item.holds) for item in removable] == [
        ("find-links", "0" * 12, 0, ""), ("install-plans", "old.json", 5, ""),
    ]  # fmt: skip
    image_and_cache_pruning.remove_items(None, removable)
    assert {path.name for path in links.iterdir()} == {locked.short, "1" * 12}
    assert (tmp_path / "large.whl").exists(), "only the links are removed"
