"""Builds by buildx, which compile an extension: the command line, the contexts, and the errors."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from envbuild.fetch import sha256_file_store, wheel_resolution_and_download
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import COMPAT, TOOLKIT, Archive
from envbuild.fetch.locked_wheel_types import Wheel
from envbuild.image import (
    build_context_folders,
    buildx,
    debian_base_tar,
    docker_client_finder,
    extension_dockerfile,
)
from envbuild.image.buildx import BuildOrder
from envbuild.image.docker_engine import Engine
from envbuild.lock import extension_source_fetcher
from envbuild.lock.lock_entry_types import Builder, LockedExtension
from envbuild.lock.lock_file import Lock
from envbuild.util import user_folders
from envbuild.util.errors import BuildError, DiskError, EngineError, HashMismatch, NetworkError
from envbuild.util.host_processes import Completed, LineListeners
from unit.support import PROFILE, deb, lock_for, plan_of, sha, write_wheel

KERNELS = {"name": "kernels", "git": "https://git.example/team/kernels", "commit": "c" * 40, "modules": ["kernels"]}
CARD = {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [KERNELS]}
OPTIONS = ["--target", "wheel-kernels"]
T = TypeVar("T", Wheel, Deb)


class FakeEngine:
    host, version, platform, data_folder = "unix:///fake.sock", "26.1.5", "linux/amd64", None
    memory_bytes = 16 * 10**9
    builder: str | None = None
    identity = "fake"


class BuildxStandIn:
    """Stands in for buildx: records the command line and the Dockerfile, and succeeds or fails."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.calls: list[list[str]] = []
        self.env: Mapping[str, str] = {}
        self.text = ""
        self.answer = Completed(0, "", "")

    def __call__(self, argv: Sequence[str | Path], *, env: Mapping[str, str], listeners: LineListeners) -> Completed:
        self.words, self.env = [str(word) for word in argv], env
        self.calls.append(self.words)
        self.text = Path(self.after("--file")).read_text(encoding="utf-8")
        return self.answer

    def after(self, option: str) -> str:
        return self.words[self.words.index(option) + 1]


@pytest.fixture
def locked(project: Path, monkeypatch: pytest.MonkeyPatch) -> Lock:
    """A lock with an extension, whose files are all complete in the stores; each file except the wheels contains its
    own name."""

    def write_archive(extension: LockedExtension, file: Path) -> None:
        file.write_text(extension.name, encoding="utf-8")

    monkeypatch.setattr(extension_source_fetcher, "write_archive", write_archive)
    plain = lock_for(plan_of(project, CARD))
    assert plain.builder
    builder = dataclasses.replace(
        plain.builder,
        archives=(Archive(TOOLKIT, "1.2", sha(TOOLKIT), 1_000_000),),
        wheels=tuple(dataclasses.replace(w, wheel=stored(w.wheel, project)) for w in plain.builder.wheels),
        debs=(whole(deb("g++-12")),),
    )
    made = dataclasses.replace(
        plain,
        archives=(Archive(COMPAT, "1.2", sha(COMPAT), 1_000_000),),
        wheels=tuple(dataclasses.replace(w, wheel=stored(w.wheel, project)) for w in plain.wheels),
        base=tuple(map(whole, plain.base)),
        apt=tuple(map(whole, plain.apt)),
        builder=builder,
    )
    files: list[tuple[Path, Deb | Archive]] = [*deb_files(made), *archive_files(made)]
    for path, item in files:
        path.parent.mkdir(parents=True)
        path.write_text(item.name, encoding="utf-8")
    debian_base_tar.tar_file(made).write_text("base", encoding="utf-8")
    debian_base_tar.tar_file(made).with_suffix(".sha256").write_text(sha("base"), encoding="utf-8")
    return made


def whole(item: T) -> T:
    return dataclasses.replace(item, sha256=sha(item.name))


def stored(item: Wheel, folder: Path) -> Wheel:
    """A real wheel, because its contents are read before each build."""
    file = write_wheel(folder / "wheels", item.name, item.version)
    made = dataclasses.replace(item, file=file.name, sha256=sha256_file_store.file_digest(file))
    sha256_file_store.wheel_store().put(file, made.sha256, made.file)
    return made


def tools(made: Lock) -> Builder:
    assert made.builder
    return made.builder


def wheel_files(made: Lock) -> list[tuple[Path, Wheel]]:
    store = sha256_file_store.wheel_store()
    return [(store.path(w.wheel.sha256, w.wheel.file), w.wheel) for w in (*made.wheels, *tools(made).wheels)]


def deb_files(made: Lock) -> list[tuple[Path, Deb]]:
    store = sha256_file_store.debs()
    return [(store.path(item.sha256, item.file), item) for item in (*made.base, *made.apt, *tools(made).debs)]


def archive_files(made: Lock) -> list[tuple[Path, Archive]]:
    store = sha256_file_store.archive_store()
    return [(store.path(item.sha256, item.name), item) for item in (*made.archives, *tools(made).archives)]


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> BuildxStandIn:
    found = BuildxStandIn()
    monkeypatch.setattr(buildx, "run", found)
    monkeypatch.setattr(docker_client_finder, "program", lambda: Path("/fake/docker"))
    return found


def quiet(text: str) -> None:
    """Ignore progress."""


def built(locked: Lock, engine: FakeEngine | None = None) -> None:
    """Build as for an extension."""
    text = extension_dockerfile.render(locked)
    made = cast(Engine, engine or FakeEngine())
    build_context_folders.fill_builder(locked, "sample", locked.extensions[0])
    buildx.build(BuildOrder(made, locked, "sample", text, quiet, quiet), OPTIONS)


def test_another_builder_is_asked(locked: Lock, builder: BuildxStandIn) -> None:
    engine = FakeEngine()
    engine.builder = "--evil"
    built(locked, engine)
    assert builder.words.count("--builder=--evil") == 1


def test_a_builder_that_is_not_there_is_named(locked: Lock, builder: BuildxStandIn) -> None:
    builder.answer = Completed(1, "", 'ERROR: no builder "nosuch" found\n')
    with pytest.raises(EngineError, match=r'^no builder "nosuch" found$') as caught:
        built(locked)
    assert "docker buildx ls" in str(caught.value.hint)


UNREACHABLE = (
    'ERROR: failed to list workers: Unavailable: connection error: desc = "transport: Error while dialing: dial tcp '
    '192.0.2.1:1234: connect: connection refused"'
)


def test_a_builder_that_does_not_answer_is_named(locked: Lock, builder: BuildxStandIn) -> None:
    engine = FakeEngine()
    engine.builder = "farm"
    builder.answer = Completed(1, "", f"{UNREACHABLE}\n")
    with pytest.raises(EngineError, match=r"^the builder 'farm' does not answer$") as caught:
        built(locked, engine)
    assert "192.0.2.1:1234" in str(caught.value.hint) and "docker buildx inspect farm" in str(caught.value.hint)
    builder.answer = Completed(1, "", "ERROR: failed to solve: a step\n")
    with pytest.raises(BuildError, match=r"^the image build by 'farm' failed$"):
        built(locked, engine)


@pytest.mark.parametrize("answers", [True, False])
def test_whether_there_is_a_builder_is_asked_before_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: bool
) -> None:
    """If buildx has a file of the builder, buildx is not called: buildx would contact all nodes of the builder."""
    calls: list[list[str]] = []

    def run(argv: Sequence[str | Path], timeout: float) -> Completed:
        calls.append([str(word) for word in argv])
        return Completed(0, "", "") if answers else Completed(1, "", 'ERROR: no builder "nope" found\n')

    monkeypatch.setattr(buildx, "run", run)
    monkeypatch.setattr(docker_client_finder, "program", lambda: Path("/fake/docker"))
    monkeypatch.setenv("BUILDX_CONFIG", str(tmp_path))
    (tmp_path / "instances").mkdir()
    (tmp_path / "instances" / "farm").write_text("{}", encoding="utf-8")
    engine = FakeEngine()
    for name in (None, "farm", "Farm"):
        engine.builder = name
        buildx.require_builder(cast(Engine, engine))
    assert calls == []
    engine.builder = "nope"
    if answers:
        buildx.require_builder(cast(Engine, engine))
    else:
        with pytest.raises(EngineError, match=r"^unknown builder 'nope'$") as caught:
            buildx.require_builder(cast(Engine, engine))
        assert str(caught.value.hint).startswith('no builder "nope" found')
    assert calls == [["/fake/docker", "--host", "unix:///fake.sock", "buildx", "inspect", "--", "nope"]]


def test_the_builder_gets_all_options_for_a_reproducible_build(locked: Lock, builder: BuildxStandIn) -> None:
    built(locked)
    assert builder.words[:5] == ["/fake/docker", "--host", "unix:///fake.sock", "buildx", "build"]
    assert {"--provenance=false", "--sbom=false"} <= set(builder.words)
    assert builder.after("--platform") == "linux/amd64"
    assert builder.after("--target") == "wheel-kernels"
    assert builder.env["SOURCE_DATE_EPOCH"] == "1704067200"
    assert builder.text == extension_dockerfile.render(locked)


def test_the_context_holds_what_the_lock_names_and_nothing_else(locked: Lock, builder: BuildxStandIn) -> None:
    folder = user_folders.cache_folder("contexts") / "sample"
    stale = folder / "wheels" / "old"
    stale.mkdir(parents=True)
    built(locked)
    own = Path(builder.words[-1])
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    all_wheels = (*locked.wheels, *tools(locked).wheels)
    wheels = {f"wheels/{w.layer}/{w.wheel.file}" for w in all_wheels}
    wanted = {f"own/debs/{item.file}" for item in locked.apt}
    wanted |= {f"own/{extension_dockerfile.BUILDER_DEBS}/{item.file}" for item in tools(locked).debs}
    wanted |= {f"own/archives/{item.name}/{item.name}" for _, item in archive_files(locked)}
    wanted |= {"own/sources/kernels/source.tar"}
    wanted |= {f"own/{name}" for name in ("bin/uv", "bin/install", "bin/repin", "bin/check", "bin/unpack", "base.tar")}
    assert found == {*wanted, *wheels}
    assert own == folder / "own", "the wheels lie outside, or they would come twice"
    assert not stale.exists()
    given = dict(word.removeprefix("--build-context=").split("=") for word in builder.words if "build-context" in word)
    assert given == {f"wheels-{w.layer}": str(folder / "wheels" / w.layer) for w in all_wheels}
    for tool in extension_dockerfile.TOOLS:
        assert (own / "bin" / tool.name).read_bytes() == tool.read_bytes()


def test_another_file_system_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_text("x", encoding="utf-8")
    build_context_folders._link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text(encoding="utf-8") == "x"


@pytest.mark.parametrize(
    ("stderr", "kind", "words"),
    [
        ("#9 [5/9] RUN\n#9 install: the base has no python3.11\nmore", "build", "the base has no python3.11"),
        ("#9 ERROR: process did not complete successfully: exit code: 1", "build", "exit code: 1"),
        ("write /x: no space left on device\nERROR: failed", "disk", "prune"),
        ("#9 error: No space left on device (os error 28)\nERROR: failed", "disk", "prune"),
        ("#9 ERROR: process did not complete successfully: exit code: 137", "build", "has 16.0 GB in all"),
        ("something else", "build", "something else"),
        ("", "build", ""),
    ],
)
def test_a_failed_build_says_why(locked: Lock, builder: BuildxStandIn, stderr: str, kind: str, words: str) -> None:
    builder.answer = Completed(1, "", stderr)
    with pytest.raises((BuildError, DiskError)) as caught:
        built(locked)
    assert (caught.value.code, caught.value.kind) == (6, kind)
    assert words in str(caught.value.hint)


BROKEN = "ERROR: failed to receive status: rpc error: code = Unavailable desc = error reading from server: EOF"


@pytest.mark.parametrize(
    ("stderr", "full", "farm", "kind"),
    [
        (BROKEN, True, None, "disk"),
        (BROKEN, False, None, "build"),
        (BROKEN, True, "farm", "build"),  # another machine's disk
        ("ERROR: process did not complete successfully: exit code: 1", True, None, "build"),
    ],
)
def test_an_engine_that_stopped_in_the_build_with_a_full_disk_is_reported(
    locked: Lock, stderr: str, full: bool, farm: str | None, kind: str
) -> None:
    engine = cast(Engine, SimpleNamespace(builder=farm, without_room=lambda: DiskError("full") if full else None))
    assert buildx._failed(engine, locked, stderr).kind == kind


def test_a_base_that_changed_on_disk_gets_into_no_build_and_is_removed(locked: Lock, builder: BuildxStandIn) -> None:
    debian_base_tar.tar_file(locked).write_text("spoiled", encoding="utf-8")
    with pytest.raises(HashMismatch, match="cached base"):
        built(locked)
    assert builder.words == []
    assert not debian_base_tar.tar_file(locked).exists()


@pytest.mark.parametrize("kind", ["wheel", "deb", "archive"])
def test_a_file_that_changed_on_disk_is_named_and_removed(locked: Lock, builder: BuildxStandIn, kind: str) -> None:
    """A wheel or archive is checked during the build, which then fails; a Debian package is checked before the
    build."""
    builder.answer = Completed(1, "", "#9 ERROR: process did not complete successfully: exit code: 1")
    files: dict[str, list[tuple[Path, Any]]] = {
        "wheel": [*wheel_files(locked)], "deb": [*deb_files(locked)], "archive": [*archive_files(locked)]
    }  # fmt: skip
    path, item = files[kind][-1]
    path.write_text("spoiled", encoding="utf-8")
    with pytest.raises(HashMismatch) as caught:
        built(locked)
    assert (caught.value.code, caught.value.kind) == (3, "hash")
    assert (item.name if kind == "archive" else item.file) in caught.value.message
    assert item.sha256 in caught.value.message and sha("spoiled") in caught.value.message
    assert "to download it" in str(caught.value.hint)
    assert not path.exists()
    assert all(other.exists() for other, _ in [*wheel_files(locked), *deb_files(locked)] if other != path)


def test_a_failed_build_says_why_though_a_stored_file_went_away(locked: Lock, builder: BuildxStandIn) -> None:
    """A concurrent `envbuild prune` may remove the file."""
    builder.answer = Completed(1, "", "#9 ERROR: exit code: 1")
    original = builder.__call__

    def pruned(*arguments: Any, **options: Any) -> Completed:
        wheel_files(locked)[0][0].unlink()
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buildx, "run", pruned)
        with pytest.raises(BuildError) as caught:
            built(locked)
    assert "exit code: 1" in str(caught.value.hint)


def test_files_are_not_read_again_where_the_build_went_well(locked: Lock, builder: BuildxStandIn) -> None:
    path, _ = wheel_files(locked)[0]
    spoiled = bytearray(path.read_bytes())
    spoiled[4] ^= 1  # outside the zip directory, the only part that is read before a build; the installer refuses it
    path.write_bytes(spoiled)
    built(locked)


SOLVE = "ERROR: failed to solve: "
HOST = "registry.example:5000"


def on_image(locked: Lock) -> Lock:
    return dataclasses.replace(locked, suite=None, image=f"{HOST}/debian@sha256:{'a' * 64}", base=(), apt=())


@pytest.mark.parametrize(
    "message",
    [
        f"{HOST}/debian@sha256:aa: failed to resolve source metadata for {HOST}/debian@sha256:aa: not found",
        f"{HOST}/debian@sha256:aa: failed to authorize: failed to fetch oauth token: 401 Unauthorized",
        "pull access denied, repository does not exist or may require authorization",
        f'failed to do request: Head "https://{HOST}/v2/debian": tls: failed to verify certificate',
    ],
)
def test_a_base_image_that_cannot_be_had_is_an_error_of_the_network(
    locked: Lock, builder: BuildxStandIn, message: str
) -> None:
    builder.answer = Completed(1, "", f"#2 [internal] load metadata\n#2 ERROR: {message}\n{SOLVE}{message}\n")
    on_base = on_image(locked)
    with pytest.raises(NetworkError) as caught:
        built(on_base)
    assert (caught.value.code, caught.value.kind) == (7, "network")
    assert str(on_base.image) in caught.value.message
    assert str(caught.value.hint).splitlines()[0] == message
    assert f"docker login {HOST}\n" in str(caught.value.hint)


def test_the_login_for_a_base_image_of_docker_hub_names_its_registry(locked: Lock, builder: BuildxStandIn) -> None:
    builder.answer = Completed(1, "", f"{SOLVE}pull access denied\n")
    with pytest.raises(NetworkError) as caught:
        built(dataclasses.replace(on_image(locked), image=f"python@sha256:{'a' * 64}"))
    assert "docker login docker.io\n" in str(caught.value.hint)


def test_with_a_base_of_our_own_no_registry_is_blamed(locked: Lock, builder: BuildxStandIn) -> None:
    builder.answer = Completed(1, "", f"{SOLVE}failed to authorize")
    with pytest.raises(BuildError):
        built(locked)


def test_on_an_image_other_failures_are_the_builds(locked: Lock, builder: BuildxStandIn) -> None:
    builder.answer = Completed(1, "", "#9 ERROR: process did not complete successfully: exit code: 1")
    with pytest.raises(BuildError, match="build failed"):
        built(on_image(locked))


def test_uv_is_there() -> None:
    assert wheel_resolution_and_download.uv_binary().is_file()
