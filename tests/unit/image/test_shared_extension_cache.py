"""The shared cache of compiled extensions: what is fetched, what is refused, and how entries are stored."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from envbuild.doctor import cpu_memory_and_os, engine_disk_and_network_checks, site_settings_validation
from envbuild.doctor.machine_readings import Host
from envbuild.image import extension_wheel_build, shared_extension_cache
from envbuild.image.extension_wheel_build import BuiltWheel
from envbuild.image.shared_extension_cache import SharedCache, SharedFolder, SharedRepository
from envbuild.lock.lock_file import Lock
from envbuild.registry import oci_types
from envbuild.util import disk_space, user_folders
from envbuild.util.errors import DiskError, FileError, NetworkError, SettingsError
from envbuild.util.untrusted_input_errors import Refusal
from unit.image.extension_wheels import (
    FILE,
    PROFILE_WITH_EXTENSION,
    FakeCompiler,
    compile_kernels,
    compiler,
    kernels_wheel,
    use_machine,
)
from unit.registries import Registry, docker_login, serving
from unit.support import configure, lock_for, plan_of

__all__ = ["compiler"]  # a fixture


@pytest.fixture
def locked(project: Path) -> Lock:
    return lock_for(plan_of(project, PROFILE_WITH_EXTENSION))


class Kind(Protocol):
    """A kind of shared cache, and how to change its entries by hand."""

    @property
    def cache(self) -> SharedCache: ...

    def put(self, key: str, about: bytes, wheel: bytes, sha256: str) -> None: ...
    def entries(self) -> int: ...


class FolderKind:
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.cache = folder, SharedFolder(folder)

    def put(self, key: str, about: bytes, wheel: bytes, sha256: str) -> None:
        (self.folder / key).mkdir(exist_ok=True)
        (self.folder / key / f"{sha256}.json").write_bytes(about)
        (self.folder / key / f"{sha256}.whl").write_bytes(wheel)

    def entries(self) -> int:
        return len(list(self.folder.rglob("*.whl")))


class RegistryKind:
    def __init__(self, registry: Registry) -> None:
        self.registry, self.cache = registry, SharedRepository(f"{registry.host}/team/extensions")

    def put(self, key: str, about: bytes, wheel: bytes, sha256: str) -> None:
        self.registry.blobs[f"sha256:{sha256}"] = wheel
        self.registry.add_blob(about)
        layer = {"mediaType": "application/x", "digest": f"sha256:{sha256}", "size": len(wheel)}
        manifest = oci_types.image_manifest(oci_types.descriptor("application/json", about), [layer])
        self.registry.put(manifest.media_type, manifest.document, f"extension-{key}", f"extension-{key}-{sha256[:32]}")

    def entries(self) -> int:
        return len([name for name in self.registry.manifests if name.count("-") == 2])


@pytest.fixture(params=["folder", "registry"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kind]:
    if request.param == "folder":
        yield FolderKind(tmp_path / "shared")
        return
    with serving(Registry()) as registry:
        yield RegistryKind(registry)


def key(lock: Lock) -> str:
    return extension_wheel_build.key(lock, lock.extensions[0])


def fetch(cache: SharedCache, lock: Lock, shown: list[tuple[str, int]] | None = None) -> BuiltWheel | None:
    def show(file: str, count: int) -> None:
        if shown is not None:
            shown.append((file, count))

    one = lock.extensions[0]
    found = shared_extension_cache.find_description(cache, lock, one, lock.recorded_wheel(one.name, key(lock)))
    return shared_extension_cache.fetch_wheel(cache, lock, one, found, lambda text: None, show) if found else None


def acts(cache: SharedCache, lock: Lock, wheel: BuiltWheel) -> list[Callable[[], object]]:
    """Return what is done with a cache."""
    return [lambda: fetch(cache, lock), lambda: shared_extension_cache.store_wheel(cache, wheel)]


def local_files() -> list[str]:
    return sorted(path.name for path in user_folders.cache_folder("extensions").rglob("*") if path.is_file())


def recording(lock: Lock, wheel: BuiltWheel) -> Lock:
    return replace(lock, compiled=(wheel.lock_record,))


@pytest.fixture
def on_b(
    kind: Kind, locked: Lock, compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> BuiltWheel:
    """Machine A compiled a wheel and stored it; now machine B is used. Return A's wheel."""
    use_machine("a", tmp_path, monkeypatch)
    wheel = compile_kernels(locked)
    shared_extension_cache.store_wheel(kind.cache, wheel)
    use_machine("b", tmp_path, monkeypatch)
    return wheel


def test_a_wheel_of_another_machine_is_fetched(kind: Kind, locked: Lock, on_b: BuiltWheel) -> None:
    shown: list[tuple[str, int]] = []
    fetched = fetch(kind.cache, locked, shown)
    assert fetched == extension_wheel_build.find_wheel(locked, locked.extensions[0])
    assert fetched and fetched.path != on_b.path and replace(fetched, path=on_b.path) == on_b
    assert fetched.path.read_bytes() == on_b.path.read_bytes()
    about = [json.loads((path.parent / "built.json").read_bytes()) for path in (on_b.path, fetched.path)]
    assert about[0] == about[1]
    assert {file for file, _ in shown} == {FILE}
    assert sum(count for _, count in shown) == on_b.path.stat().st_size


def test_a_cache_without_the_key_has_no_wheel(kind: Kind, locked: Lock, on_b: BuiltWheel) -> None:
    assert fetch(kind.cache, replace(locked, python="3.13")) is None
    assert fetch(kind.cache, replace(locked, compiled=(replace(on_b.lock_record, sha256="0" * 64),))) is None
    assert local_files() == []


def test_each_lock_gets_the_wheel_that_it_records(
    kind: Kind, locked: Lock, on_b: BuiltWheel, compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines compiled different wheels from the same inputs."""
    compiler.wheel = kernels_wheel(tmp_path / "second", "different = True")
    second = compile_kernels(locked)
    assert second.sha256 != on_b.sha256
    shared_extension_cache.store_wheel(kind.cache, second)
    assert kind.entries() == 2
    for number, wheel in enumerate((on_b, second, on_b)):
        use_machine(f"c{number}", tmp_path, monkeypatch)
        fetched = fetch(kind.cache, recording(locked, wheel))
        assert fetched and fetched.sha256 == wheel.sha256
    use_machine("d", tmp_path, monkeypatch)
    assert (anything := fetch(kind.cache, locked)) and anything.sha256 in (on_b.sha256, second.sha256)


def test_a_recorded_wheel_replaces_a_different_one_on_this_machine(
    kind: Kind, locked: Lock, on_b: BuiltWheel, compiler: FakeCompiler, tmp_path: Path
) -> None:
    compiler.wheel = kernels_wheel(tmp_path / "second", "different = True")
    compile_kernels(locked)
    fetched = fetch(kind.cache, recording(locked, on_b))
    assert fetched and fetched.sha256 == on_b.sha256
    assert local_files() == ["built.json", FILE]


def test_a_wheel_that_came_meanwhile_is_used(
    kind: Kind, locked: Lock, on_b: BuiltWheel, compiler: FakeCompiler, tmp_path: Path
) -> None:
    """Without a record, a wheel that another process is using is not replaced."""
    compiler.wheel = kernels_wheel(tmp_path / "second", "different = True")
    second = compile_kernels(locked)
    assert fetch(kind.cache, locked) == second


# hostile and damaged entries


def described(wheel: BuiltWheel) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((wheel.path.parent / "built.json").read_bytes())
    return found


def harmed(about: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({**about, **changes}).encode()


DESCRIPTIONS: dict[str, tuple[Callable[[dict[str, Any]], bytes], str]] = {
    "not JSON": (lambda about: b"[", "is not JSON"),
    "a list": (lambda about: b"[]", "is not a JSON object"),
    "a key twice": (lambda about: b'{"file": "a.whl", "file": "b.whl"}', "contains a key twice"),
    "too large": (lambda about: harmed(about, more="x" * (1 << 20)), "larger than"),
    "a key missing": (lambda about: json.dumps({**about, "jobs": None}).encode(), "invalid 'jobs'"),
    "an unknown key": (lambda about: harmed(about, more=1), "invalid 'more'"),
    "a name with a folder": (lambda about: harmed(about, file="../../evil.whl"), "invalid 'file'"),
    "an absolute name": (lambda about: harmed(about, file="/etc/evil.whl"), "invalid 'file'"),
    "a name that hides": (lambda about: harmed(about, file="a\n.whl"), "invalid 'file'"),
    "the name of our description": (lambda about: harmed(about, file="built.json"), "invalid 'file'"),
    "a huge size": (lambda about: harmed(about, bytes=1 << 40), "invalid 'bytes'"),
    "no size": (lambda about: harmed(about, bytes=-1), "invalid 'bytes'"),
    "a sha256 that is a path": (lambda about: harmed(about, sha256="../" * 20), "invalid 'sha256'"),
    "an endless time": (lambda about: json.dumps(about).replace(f'"seconds": {about["seconds"]}', '"seconds": 1e999')
                        .encode(), "is not JSON"),
    "other inputs": (lambda about: harmed(about, **{"from": {**about["from"], "cuda": "12.4", "more": 1}}),
                     "different inputs: 'cuda', 'more'"),
    "inputs of another type": (lambda about: harmed(about, **{"from": []}), "invalid 'from'"),
    "half a surrogate pair": (lambda about: harmed(about, **{"from": {"\ud800": "\ud800"}}), "different inputs"),
}  # fmt: skip


@pytest.mark.parametrize("case", DESCRIPTIONS)
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_hostile_description_is_refused(
    kind: Kind, locked: Lock, on_b: BuiltWheel, case: str, is_recorded: bool
) -> None:
    harm, message = DESCRIPTIONS[case]
    about = described(on_b)
    kind.put(key(locked), harm(about), on_b.path.read_bytes(), on_b.sha256)
    lock = recording(locked, on_b) if is_recorded else locked
    record = on_b.lock_record if is_recorded else None

    def find(cache: SharedCache, lock: Lock) -> object:
        return shared_extension_cache.find_description(cache, lock, lock.extensions[0], record)

    for look in (fetch, find):
        with pytest.raises(Refusal) as caught:
            look(kind.cache, lock)
        assert message in caught.value.message
    assert local_files() == []


def test_a_description_of_another_wheel_than_the_recorded_is_refused(
    kind: Kind, locked: Lock, on_b: BuiltWheel
) -> None:
    """Its wheel would pass every other check."""
    wanted = replace(locked, compiled=(replace(on_b.lock_record, sha256="0" * 64),))
    kind.put(key(locked), harmed(described(on_b)), on_b.path.read_bytes(), "0" * 64)
    with pytest.raises(Refusal, match="but the lock records 000000000000"):
        fetch(kind.cache, wanted)
    assert local_files() == []


@pytest.mark.parametrize("change", [{"file": "kernels-0.2-py3-none-any.whl"}, {"bytes": 1}])
def test_a_description_that_differs_from_the_record_is_refused(
    kind: Kind, locked: Lock, on_b: BuiltWheel, change: dict[str, Any]
) -> None:
    kind.put(key(locked), harmed(described(on_b), **change), on_b.path.read_bytes(), on_b.sha256)
    with pytest.raises(Refusal, match="and the lock does not"):
        fetch(kind.cache, recording(locked, on_b))
    assert local_files() == []


def test_a_wheel_with_another_sha256_is_refused(kind: Kind, locked: Lock, on_b: BuiltWheel) -> None:
    content = bytearray(on_b.path.read_bytes())
    content[-1] ^= 1
    kind.put(key(locked), harmed(described(on_b)), bytes(content), on_b.sha256)
    with pytest.raises(Refusal, match=f"{FILE} has the sha256 .*, not {on_b.sha256[:12]}"):
        fetch(kind.cache, recording(locked, on_b))
    assert local_files() == []


def test_a_short_wheel_is_refused(kind: Kind, locked: Lock, on_b: BuiltWheel) -> None:
    kind.put(key(locked), harmed(described(on_b)), on_b.path.read_bytes()[:100], on_b.sha256)
    with pytest.raises((Refusal, NetworkError)):
        fetch(kind.cache, locked)
    assert local_files() == []


def test_a_wheel_that_is_larger_than_described_is_not_read_on(
    kind: Kind, locked: Lock, on_b: BuiltWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_extension_cache, "_BLOCK", 1 << 10)
    size = on_b.path.stat().st_size
    kind.put(key(locked), harmed(described(on_b)), on_b.path.read_bytes() + bytes(1 << 20), on_b.sha256)
    shown: list[tuple[str, int]] = []
    with pytest.raises(Refusal, match=r"more (bytes )?than the"):
        fetch(kind.cache, locked, shown)
    assert sum(count for _, count in shown) <= size
    assert local_files() == []


WHEELS: dict[str, tuple[dict[str, str], str]] = {
    "another architecture": ({"arch": "sm_80"}, "no device code for compute capability 9.0"),
    "a missing module": ({"module": "other.cpython-311-x86_64-linux-gnu.so"}, "the module kernels_cuda is not in it"),
    "another name": ({"name": "other-0.1-cp311-cp311-linux_x86_64.whl"}, "the wheel is of other, but kernels"),
    "another Python": ({"name": "kernels-0.1-cp310-cp310-linux_x86_64.whl"}, "does not accept"),
    "no version": ({"name": "kernels-0.1-x-y-z-w.whl"}, "is not a wheel's name"),
}


@pytest.mark.parametrize("case", WHEELS)
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_wheel_that_is_not_as_requested_is_refused(
    kind: Kind, locked: Lock, on_b: BuiltWheel, tmp_path: Path, case: str, is_recorded: bool
) -> None:
    changes, message = WHEELS[case]
    wheel = kernels_wheel(tmp_path / "hostile", **changes)
    raw = wheel.read_bytes()
    sha256 = hashlib.sha256(raw).hexdigest()
    kind.put(key(locked), harmed(described(on_b), file=wheel.name, sha256=sha256, bytes=len(raw)), raw, sha256)
    if isinstance(kind, FolderKind):
        (kind.folder / key(locked) / f"{on_b.sha256}.json").unlink()
    lock = (
        replace(locked, compiled=(replace(on_b.lock_record, sha256=sha256, file=wheel.name, bytes=len(raw)),))
        if is_recorded
        else locked
    )
    with pytest.raises(Refusal) as caught:
        fetch(kind.cache, lock)
    assert message in caught.value.message
    assert local_files() == []


def test_the_disk_is_looked_at_before_a_wheel(
    kind: Kind, locked: Lock, on_b: BuiltWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, needed: int, what: str) -> None:
        assert (needed, what) == (on_b.path.stat().st_size, "the wheel of kernels")
        raise DiskError("full")

    monkeypatch.setattr(disk_space, "require_free", full)
    with pytest.raises(DiskError):
        fetch(kind.cache, locked)


# folders


@pytest.fixture
def folder(tmp_path: Path) -> FolderKind:
    return FolderKind(tmp_path / "shared")


def stored(folder: FolderKind, lock: Lock) -> BuiltWheel:
    wheel = compile_kernels(lock)
    shared_extension_cache.store_wheel(folder.cache, wheel)
    return wheel


def test_the_files_of_a_folder_have_the_rights_of_the_umask(
    folder: FolderKind, locked: Lock, compiler: FakeCompiler
) -> None:
    before = os.umask(0o002)
    try:
        wheel = stored(folder, locked)
    finally:
        os.umask(before)
    place = folder.folder / key(locked)
    assert stat.S_IMODE(place.stat().st_mode) == 0o775
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {
        f"{wheel.sha256}.json": 0o664, f"{wheel.sha256}.whl": 0o664,
    }  # fmt: skip


def test_a_usable_wheel_is_found_behind_a_damaged_one(
    folder: FolderKind, locked: Lock, compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = stored(folder, locked)
    (folder.folder / key(locked) / f"{'0' * 64}.json").write_bytes(b"[")
    (folder.folder / key(locked) / f"{'00' + 'f' * 62}.json").symlink_to("/etc/hostname")
    (folder.folder / key(locked) / ".hidden.json").write_bytes(b"[")
    (folder.folder / key(locked) / "a\nnote: b.json").write_bytes(b"[")
    use_machine("b", tmp_path, monkeypatch)
    assert (found := fetch(folder.cache, locked)) and found.sha256 == wheel.sha256


@pytest.mark.parametrize("suffix", ["json", "whl"])
@pytest.mark.parametrize("harm", ["link", "pipe", "folder"])
def test_only_regular_files_of_a_folder_are_read(
    folder: FolderKind, locked: Lock, compiler: FakeCompiler, suffix: str, harm: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    wheel = stored(folder, locked)
    file = folder.folder / key(locked) / f"{wheel.sha256}.{suffix}"
    moved = file.rename(tmp_path / "moved")
    if harm == "link":
        file.symlink_to(moved)
    elif harm == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    use_machine("b", tmp_path, monkeypatch)
    for lock in (locked, recording(locked, wheel)):
        with pytest.raises(Refusal, match="is not a regular file"):
            fetch(folder.cache, lock)


def test_two_writers_and_a_reader_do_not_disturb_each_other(
    folder: FolderKind, locked: Lock, compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, stop, failed = stored(folder, locked), threading.Event(), list[BaseException]()

    def write() -> None:
        try:
            while not stop.is_set():
                shared_extension_cache.store_wheel(folder.cache, wheel)
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for number in range(30):
            use_machine(f"b{number}", tmp_path, monkeypatch)
            assert (found := fetch(folder.cache, locked)) and found.sha256 == wheel.sha256
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert failed == []
    assert sorted(path.suffix for path in (folder.folder / key(locked)).iterdir()) == [".json", ".whl"]


def test_an_interrupted_writer_leaves_no_entry(
    folder: FolderKind, locked: Lock, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = compile_kernels(locked)
    flush, calls = os.fsync, list[int]()

    def interrupted(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 2:
            raise KeyboardInterrupt
        flush(handle)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shared_extension_cache.store_wheel(folder.cache, wheel)
    assert [path.suffix for path in (folder.folder / key(locked)).iterdir()] == [".whl"]
    assert list(folder.cache.descriptions(key(locked), None)) == []


def test_a_damaged_entry_is_replaced(
    folder: FolderKind, locked: Lock, compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = stored(folder, locked)
    for file in (folder.folder / key(locked)).iterdir():
        file.write_bytes(b"damaged")
    shared_extension_cache.store_wheel(folder.cache, wheel)
    use_machine("b", tmp_path, monkeypatch)
    assert fetch(folder.cache, locked)


def test_a_missing_folder_is_not_made(locked: Lock, compiler: FakeCompiler, tmp_path: Path) -> None:
    """The folder of a file system that is not mounted must not be filled."""
    cache, wheel = SharedFolder(tmp_path / "missing"), compile_kernels(locked)
    for act in acts(cache, locked, wheel):
        with pytest.raises(FileError, match=f"the folder {cache.folder} does not exist"):
            act()
    assert not cache.folder.exists()


def test_doctor_warns_of_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    for name, fault in {"missing": "the folder {} does not exist", "file": "{} is not a folder", "": None}.items():
        folder = tmp_path / name
        (tmp_path / "file").touch()
        configure(f"extensions: {{cache: {folder}}}\n")
        reading = site_settings_validation.read()
        assert reading.cache_fault == (fault and fault.format(folder)) and reading.faults == ()
        check = engine_disk_and_network_checks.check_settings(
            Host("node", "", cpu_memory_and_os.unread(), site=reading)
        )
        assert check.status == ("warn" if fault else "ok")


def test_a_folder_that_cannot_be_used_is_a_file_error(locked: Lock, compiler: FakeCompiler, tmp_path: Path) -> None:
    folder, wheel = FolderKind(tmp_path / "shared"), compile_kernels(locked)
    (folder.folder / key(locked)).write_text("a file instead of a folder", encoding="utf-8")
    for act in acts(folder.cache, locked, wheel):
        with pytest.raises(FileError) as caught:
            act()
        assert str(folder.folder) in caught.value.message


def test_the_number_of_entries_that_are_read_is_limited(
    folder: FolderKind, locked: Lock, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.folder / key(locked)).mkdir()
    for number in range(50):
        (folder.folder / key(locked) / f"{number:064d}.json").write_bytes(b"[")
    read, opened = list[Path](), shared_extension_cache._opened

    def note(file: Path) -> Any:
        read.append(file)
        return opened(file)

    monkeypatch.setattr(shared_extension_cache, "_opened", note)
    with pytest.raises(Refusal):
        fetch(folder.cache, locked)
    assert len(read) == 10


# registries


def test_a_registry_gets_an_artifact_of_two_tags(locked: Lock, compiler: FakeCompiler) -> None:
    with serving(Registry()) as registry:
        wheel = compile_kernels(locked)
        shared_extension_cache.store_wheel(SharedRepository(f"{registry.host}/team/extensions"), wheel)
        tags = {name: raw for name, (_, raw) in registry.manifests.items() if not name.startswith("sha256:")}
        assert set(tags) == {f"extension-{key(locked)}", f"extension-{key(locked)}-{wheel.sha256[:32]}"}
        assert max(map(len, tags)) <= 128
        (document,) = {raw: json.loads(raw) for raw in tags.values()}.values()
        (layer,) = document["layers"]
        assert layer["digest"] == f"sha256:{wheel.sha256}" and layer["size"] == wheel.path.stat().st_size
        assert layer["annotations"] == {"org.opencontainers.image.title": FILE}
        assert registry.blobs[layer["digest"]] == wheel.path.read_bytes()
        assert json.loads(registry.blobs[document["config"]["digest"]]) == described(wheel)


@pytest.mark.parametrize("layers", [0, 2])
def test_a_manifest_without_exactly_one_wheel_is_refused(
    locked: Lock, compiler: FakeCompiler, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Registry()) as registry:
        kind, wheel = RegistryKind(registry), compile_kernels(locked)
        shared_extension_cache.store_wheel(kind.cache, wheel)
        media_type, raw = registry.manifests[f"extension-{key(locked)}"]
        document = json.loads(raw)
        registry.put(media_type, {**document, "layers": document["layers"] * layers}, f"extension-{key(locked)}")
        use_machine("b", tmp_path, monkeypatch)
        with pytest.raises(Refusal, match="is not a manifest with one wheel"):
            fetch(kind.cache, locked)


def test_the_registrys_credentials_are_used(
    locked: Lock, compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Registry(user="u", password="p")) as registry:
        kind, wheel = RegistryKind(registry), compile_kernels(locked)
        with pytest.raises(NetworkError, match="401"):
            shared_extension_cache.store_wheel(kind.cache, wheel)
        docker_login(tmp_path / "docker", monkeypatch, **{registry.host: "u:p"})
        from envbuild.registry import registry_http_and_auth

        registry_http_and_auth._docker_logins.cache_clear()
        shared_extension_cache.store_wheel(RegistryKind(registry).cache, wheel)
        use_machine("b", tmp_path, monkeypatch)
        assert fetch(RegistryKind(registry).cache, locked)


def test_an_unreachable_registry_is_a_network_error(locked: Lock, compiler: FakeCompiler) -> None:
    cache, wheel = SharedRepository("127.0.0.1:1/team/extensions"), compile_kernels(locked)
    for act in acts(cache, locked, wheel):
        with pytest.raises(NetworkError):
            act()


def test_a_wheel_whose_blob_is_gone_is_a_network_error(
    locked: Lock, compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Registry()) as registry:
        kind, wheel = RegistryKind(registry), compile_kernels(locked)
        shared_extension_cache.store_wheel(kind.cache, wheel)
        del registry.blobs[f"sha256:{wheel.sha256}"]
        use_machine("b", tmp_path, monkeypatch)
        with pytest.raises(NetworkError, match="has no blob"):
            fetch(kind.cache, locked)
        assert local_files() == []


# the setting


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("extensions: {}\n", None),
        ("extensions: {cache: /shared/extensions}\n", SharedFolder(Path("/shared/extensions"))),
        ("extensions: {cache: registry.example/team/extensions}\n",
         SharedRepository("registry.example/team/extensions")),
        ('extensions: {cache: "localhost:5000/extensions"}\n', SharedRepository("localhost:5000/extensions")),
    ],
)  # fmt: skip
def test_the_cache_is_the_one_of_the_settings(text: str, expected: SharedCache | None) -> None:
    configure(text)
    assert shared_extension_cache.configured_cache() == expected
    assert site_settings_validation.site_faults() == []


def test_a_folder_of_the_user_is_expanded() -> None:
    configure("extensions: {cache: ~/extensions}\n")
    assert shared_extension_cache.configured_cache() == SharedFolder(Path.home() / "extensions")


@pytest.mark.parametrize(
    "value",
    ["shared/extensions", "extensions", "./extensions", "https://registry.example/x", "registry.example/x:tag", "[]",
     "registry.example/X", '""', "1", "registry.example", '"/a\\0b"', f"registry.example/x@sha256:{'a' * 64}"],
)  # fmt: skip
def test_an_invalid_cache_is_reported_with_its_line(value: str) -> None:
    configure(f"line: auto\nextensions:\n  cache: {value}\n")
    with pytest.raises(SettingsError) as caught:
        shared_extension_cache.configured_cache()
    (fault,) = caught.value.faults
    assert (fault.line, fault.field) == (3, "extensions.cache") and "HOST/REPOSITORY" in fault.message
    assert site_settings_validation.site_faults() == [fault]


def test_an_unknown_key_is_reported() -> None:
    configure("extensions: {caches: /shared}\n")
    with pytest.raises(SettingsError) as caught:
        shared_extension_cache.configured_cache()
    assert "cache" in str(caught.value.faults[0])
