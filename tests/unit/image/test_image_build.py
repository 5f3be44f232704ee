from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from envbuild.fetch import sha256_file_store, wheel_resolution_and_download
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import COMPAT, TOOLKIT, Archive
from envbuild.fetch.locked_artifact_types import Wheel
from envbuild.image import (
    build_context_folders,
    build_records_and_comparison,
    buildx,
    debian_base_tar,
    docker_client_finder,
    dockerfile_renderer,
    image_build,
)
from envbuild.image.build_records_and_comparison import CompiledRecord, Record
from envbuild.image.docker_engine import Engine, Image
from envbuild.lock.lock_file import Lock
from envbuild.util import process_locks, user_folders
from envbuild.util.errors import BuildError, DiskError, EngineError, HashMismatch, NetworkError
from envbuild.util.host_processes import Completed
from unit.support import PROFILE, image_of, lock_for, plan_of, sha, write_wheel

IMAGE = image_of()
T = TypeVar("T", Wheel, Deb)


class FakeEngine:
    host, version, platform, data_folder = "unix:///fake.sock", "26.1.5", "linux/amd64", None
    memory_bytes = 16 * 10**9
    builder: str | None = None
    identity = "fake"

    def __init__(self) -> None:
        self.held: Image | None = IMAGE
        self.requests: list[str] = []
        self.removed: list[str] = []

    def find(self, reference: str) -> Image | None:
        self.requests.append(reference)
        return self.held

    def remove(self, reference: str) -> None:
        self.removed.append(reference)


class Builder:
    """Stands in for buildx: records the command line and the Dockerfile, and answers with an image id or a failure."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.calls: list[list[str]] = []
        self.env: Mapping[str, str] = {}
        self.text = ""
        self.answer = Completed(0, "", "")
        self.image = IMAGE.id

    def __call__(
        self, argv: Sequence[str | Path], *, env: Mapping[str, str], on_line: Callable[[str], None]
    ) -> Completed:
        self.words, self.env = [str(word) for word in argv], env
        self.calls.append(self.words)
        self.text = Path(self.after("--file")).read_text(encoding="utf-8")
        metadata = {"containerimage.config.digest": self.image}
        Path(self.after("--metadata-file")).write_text(json.dumps(metadata), encoding="utf-8")
        return self.answer

    def after(self, option: str) -> str:
        return self.words[self.words.index(option) + 1]


@pytest.fixture
def locked(project: Path) -> Lock:
    """A lock whose files are all complete in the stores; each file except the wheels contains its own name."""
    plain = lock_for(plan_of(project, PROFILE))
    made = dataclasses.replace(
        plain,
        archives=tuple(Archive(name, "1.2", sha(name), 1_000_000) for name in (TOOLKIT, COMPAT)),
        wheels=tuple(dataclasses.replace(w, wheel=stored(w.wheel, project)) for w in plain.wheels),
        base=tuple(map(whole, plain.base)),
        apt=tuple(map(whole, plain.apt)),
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


def wheel_files(made: Lock) -> list[tuple[Path, Wheel]]:
    return [(sha256_file_store.wheel_store().path(w.wheel.sha256, w.wheel.file), w.wheel) for w in made.wheels]


def deb_files(made: Lock) -> list[tuple[Path, Deb]]:
    return [(sha256_file_store.debs().path(deb.sha256, deb.file), deb) for deb in (*made.base, *made.apt)]


def archive_files(made: Lock) -> list[tuple[Path, Archive]]:
    return [(sha256_file_store.archive_store().path(item.sha256, item.name), item) for item in made.archives]


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> Builder:
    found = Builder()
    monkeypatch.setattr(buildx, "run", found)
    monkeypatch.setattr(docker_client_finder, "program", lambda: Path("/fake/docker"))
    return found


def quiet(text: str) -> None:
    """Ignore progress."""


LABELS = {"io.envbuild.torch": "2.3.1+cu121", "io.envbuild.cublas": "12.5.2.13"}


def built(locked: Lock, engine: FakeEngine | None = None, note: Callable[[str], None] = quiet, **options: Any) -> Image:
    """Build the layers, then add the labels, as the pipeline does."""
    text = dockerfile_renderer.render(locked, "sample")
    made = cast(Engine, engine or FakeEngine())
    image_build.build_layers(made, locked, "sample", text, say=quiet, on_line=quiet, **options)
    return image_build.build_labelled(made, locked, "sample", text, LABELS, say=quiet, on_line=quiet, note=note)


def test_a_build_is_recorded(locked: Lock, builder: Builder) -> None:
    text = dockerfile_renderer.render(locked, "sample")
    assert image_build.matching_records(locked, text) == []
    assert built(locked) == IMAGE
    (record,) = image_build.matching_records(locked, text)
    assert (record.image, record.handle, record.lock) == (IMAGE.id, IMAGE.handle, locked.id)
    assert record.layers == IMAGE.layers
    assert list(build_records_and_comparison.all_records(IMAGE.id)) == [record]
    assert list(build_records_and_comparison.all_records(image_of("other").id)) == []


def test_another_image_of_the_same_recipe_is_reported(locked: Lock, builder: Builder) -> None:
    """The report comes before the record: if envbuild is killed in between, the next run finds the image recorded and
    would report nothing."""
    messages: list[str] = []

    def note(line: str) -> None:
        assert image_of("2").id not in [record.image for record in build_records_and_comparison.all_records()]
        messages.append(line)

    built(locked, note=note)
    built(locked, note=note)
    assert messages == []
    engine, builder.image = FakeEngine(), image_of("2").id
    engine.held = image_of("2")
    built(dataclasses.replace(locked, environment={"A": "another lock"}), engine, note)
    assert messages == []
    for file in user_folders.state_folder("builds").glob("*"):
        file.unlink()
    builder.image = IMAGE.id
    built(locked, note=note)
    builder.image = image_of("2").id
    built(locked, engine, note)
    assert (
        len(messages) == 1
        and f"this lock gave {IMAGE.id} before, and {image_of('2').id} now; its layers are the same" in messages[0]
    )
    assert {record.image for record in build_records_and_comparison.all_records()} == {IMAGE.id, image_of("2").id}


def recorded(image: str, layers: str, builder: str = "docker 26", *wheels: CompiledRecord) -> Record:
    return Record(image, image, "lock", "recipe", tuple(layers), builder, wheels)


def wheel(name: str, sha256: str) -> CompiledRecord:
    return CompiledRecord(name, "key", "file", sha256, ())


NOW = recorded("now", "abcde", "docker 26", wheel("apex", "1"))
SAME_WHEEL = NOW.extensions[0]


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (
            [recorded("then", "abcXe", "docker 26", SAME_WHEEL)],
            "gave then before, and now now; layer 4 (torch) of 5 differs. ",
        ),
        ([recorded("then", "aXcde", "docker 26", SAME_WHEEL)], "; layer 2 (base) of 5 differs. "),
        ([recorded("then", "XbcXe", "docker 26", SAME_WHEEL)], "; layers 1 (base), 4 (torch) of 5 differ. "),
        ([recorded("then", "abcd", "docker 26", SAME_WHEEL)], "; it had 4 layers, and has 5. "),
        ([recorded("then", "abcde", "docker 26", SAME_WHEEL)], "; its layers are the same, its labels or other"),
        (
            [recorded("then", "abcXe", "docker 24", SAME_WHEEL)],
            "differs; built by docker 24 before, by docker 26 now. ",
        ),
        (
            [recorded("then", "abcXe", "docker 26", wheel("apex", "2"))],
            "differs; recompiled, with a different wheel: apex. ",
        ),
        ([recorded("far", "XYZde"), recorded("near", "abcXe"), NOW], "gave near before, and now now; "),
    ],
)
def test_the_difference_from_the_earlier_image_is_reported(before: list[Record], message: str) -> None:
    assert message in str(build_records_and_comparison.difference_message(before, NOW, ["venv", "torch", "packages"]))


def test_the_same_image_is_not_reported() -> None:
    assert build_records_and_comparison.difference_message([], NOW, []) is None
    assert build_records_and_comparison.difference_message([NOW, NOW], NOW, []) is None


def test_another_builder_is_asked_and_recorded(locked: Lock, builder: Builder) -> None:
    engine = FakeEngine()
    engine.builder = "--evil"
    assert built(locked, engine) == IMAGE
    assert [words.count("--builder=--evil") for words in builder.calls] == [1, 1]
    assert all("--load" in words for words in builder.calls)
    assert [record.builder for record in build_records_and_comparison.all_records()] == [
        "docker 26.1.5, builder --evil"
    ]


def test_a_builder_that_is_not_there_is_named(locked: Lock, builder: Builder) -> None:
    builder.answer = Completed(1, "", 'ERROR: no builder "nosuch" found\n')
    with pytest.raises(EngineError, match=r'^no builder "nosuch" found$') as caught:
        built(locked)
    assert "docker buildx ls" in str(caught.value.hint)


UNREACHABLE = (
    'ERROR: failed to list workers: Unavailable: connection error: desc = "transport: Error while dialing: dial tcp '
    '192.0.2.1:1234: connect: connection refused"'
)


def test_a_builder_that_does_not_answer_is_named(locked: Lock, builder: Builder) -> None:
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
    """If buildx has a file of the builder, buildx is not called: it would contact all nodes of the builder."""
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


def test_the_builder_gets_all_options_for_a_reproducible_build(locked: Lock, builder: Builder) -> None:
    built(locked)
    assert builder.words[:5] == ["/fake/docker", "--host", "unix:///fake.sock", "buildx", "build"]
    assert {"--load", "--provenance=false", "--sbom=false"} <= set(builder.words)
    assert "--no-cache" not in builder.words
    assert builder.after("--platform") == "linux/amd64"
    assert builder.after("--tag") == f"envbuild/sample:{locked.short}"
    assert builder.env["SOURCE_DATE_EPOCH"] == "1704067200"
    assert builder.text == dockerfile_renderer.render(locked, "sample")


def test_labels_come_with_the_same_build_again(locked: Lock, builder: Builder) -> None:
    """The second build uses the cached layers; otherwise the labels could describe different layers than the measured
    ones."""
    engine = FakeEngine()
    built(locked, engine, no_cache=True)
    layers, labelled = builder.calls
    named = [word for word in labelled if word.startswith("--label")]
    assert named == ["--label=io.envbuild.cublas=12.5.2.13", "--label=io.envbuild.torch=2.3.1+cu121"]
    assert "--no-cache" in layers and "--no-cache" not in labelled
    assert not [word for word in layers if word.startswith("--label")]
    tag = f"envbuild/sample:{locked.short}-layers"
    assert tag in layers and engine.removed == [tag]


def test_the_layers_tag_is_gone_before_the_build_is_recorded(
    locked: Lock, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If envbuild is killed in between, the recorded image would keep the tag forever, because it is not built
    again."""
    engine, removed = FakeEngine(), []
    monkeypatch.setattr(build_records_and_comparison, "write", lambda record: removed.extend(engine.removed))
    built(locked, engine)
    assert removed == [f"envbuild/sample:{locked.short}-layers"]


def test_building_only_layers_is_not_recorded_as_a_build(locked: Lock, builder: Builder) -> None:
    text = dockerfile_renderer.render(locked, "sample")
    image_build.build_layers(cast(Engine, FakeEngine()), locked, "sample", text, say=quiet, on_line=quiet)
    assert list(build_records_and_comparison.all_records()) == []
    assert f"envbuild/sample:{locked.short}" not in builder.words


def test_the_context_holds_what_the_lock_names_and_nothing_else(locked: Lock, builder: Builder) -> None:
    folder = user_folders.cache_folder("contexts") / "sample"
    stale = folder / "wheels" / "old"
    stale.mkdir(parents=True)
    built(locked)
    own = Path(builder.words[-1])
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    wheels = {f"wheels/{w.layer}/{w.wheel.file}" for w in locked.wheels}
    wanted = {f"own/debs/{deb.file}" for deb in locked.apt}
    wanted |= {f"own/archives/{archive.name}/{archive.name}" for archive in locked.archives}
    wanted |= {f"own/{name}" for name in ("bin/uv", "bin/install", "bin/repin", "bin/check", "bin/unpack", "base.tar")}
    assert found == {*wanted, *wheels}
    assert own == folder / "own", "the wheels lie outside, or they would come twice"
    assert not stale.exists()
    given = dict(word.removeprefix("--build-context=").split("=") for word in builder.words if "build-context" in word)
    assert given == {f"wheels-{w.layer}": str(folder / "wheels" / w.layer) for w in locked.wheels}
    for tool in dockerfile_renderer.TOOLS:
        assert (own / "bin" / tool.name).read_bytes() == tool.read_bytes()


def test_steps_without_wheels_start_once_for_each_engine(locked: Lock, builder: Builder) -> None:
    text = dockerfile_renderer.render(locked, "sample")
    engine = FakeEngine()

    def begin(found: Lock = locked, text: str = text) -> int:
        image_build.start_build(cast(Engine, engine), found, "sample", text)
        return len(builder.calls)

    assert begin() == 1
    assert builder.text == dockerfile_renderer.beginning(text) and "--output=type=cacheonly" in builder.words
    assert begin() == 1
    built(locked)
    assert begin() == 3, "a whole build empties the contexts, and what was begun stays so"
    pinned = dataclasses.replace(locked, wheels=locked.wheels[:-1])
    assert begin(pinned, dockerfile_renderer.render(pinned, "sample")) == 3, "other wheels"
    engine.identity = "emptied"
    assert begin() == 4
    other = dataclasses.replace(locked, base=locked.base[:-1])
    for end in (".tar", ".sha256"):
        shutil.copy(debian_base_tar.tar_file(locked).with_suffix(end), debian_base_tar.tar_file(other).with_suffix(end))
    assert begin(other) == 5, "another base"
    build_context_folders.discard("sample")
    assert begin() == 6


def test_a_build_whose_first_step_failed_is_not_started(locked: Lock, builder: Builder) -> None:
    text = dockerfile_renderer.render(locked, "sample")
    builder.answer = Completed(1, "", "no")
    for calls in (1, 2):
        with pytest.raises(BuildError):
            image_build.start_build(cast(Engine, FakeEngine()), locked, "sample", text)
        assert len(builder.calls) == calls


def test_nothing_starts_while_another_process_builds_on_the_same_base(locked: Lock, builder: Builder) -> None:
    engine = cast(Engine, FakeEngine())
    with process_locks.exclusive(buildx._turn(engine, locked), "", quiet), pytest.raises(process_locks.Taken):
        image_build.start_build(engine, locked, "sample", dockerfile_renderer.render(locked, "sample"))
    assert builder.calls == []


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
def test_a_failed_build_says_why_and_leaves_no_record(
    locked: Lock, builder: Builder, stderr: str, kind: str, words: str
) -> None:
    builder.answer = Completed(1, "", stderr)
    with pytest.raises((BuildError, DiskError)) as caught:
        built(locked)
    assert (caught.value.code, caught.value.kind) == (6, kind)
    assert words in str(caught.value.hint)
    assert list(build_records_and_comparison.all_records()) == []


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


def test_a_base_that_changed_on_disk_gets_into_no_build_and_is_removed(locked: Lock, builder: Builder) -> None:
    debian_base_tar.tar_file(locked).write_text("spoiled", encoding="utf-8")
    with pytest.raises(HashMismatch, match="cached base"):
        built(locked)
    assert builder.words == []
    assert not debian_base_tar.tar_file(locked).exists()


@pytest.mark.parametrize("kind", ["wheel", "deb", "archive"])
def test_a_file_that_changed_on_disk_is_named_and_removed(locked: Lock, builder: Builder, kind: str) -> None:
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
    assert "downloads it again" in str(caught.value.hint)
    assert not path.exists()
    assert all(other.exists() for other, _ in [*wheel_files(locked), *deb_files(locked)] if other != path)
    assert list(build_records_and_comparison.all_records()) == []


def test_a_failed_build_says_why_though_a_stored_file_went_away(locked: Lock, builder: Builder) -> None:
    """The prune of a concurrent envbuild may remove it."""
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


def test_files_are_not_read_again_where_the_build_went_well(locked: Lock, builder: Builder) -> None:
    path, _ = wheel_files(locked)[0]
    spoiled = bytearray(path.read_bytes())
    spoiled[4] ^= 1  # not in the directory, which is read before each build; the installer in the image refuses it
    path.write_bytes(spoiled)
    assert built(locked) == IMAGE


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
    locked: Lock, builder: Builder, message: str
) -> None:
    builder.answer = Completed(1, "", f"#2 [internal] load metadata\n#2 ERROR: {message}\n{SOLVE}{message}\n")
    on_base = on_image(locked)
    with pytest.raises(NetworkError) as caught:
        built(on_base)
    assert (caught.value.code, caught.value.kind) == (7, "network")
    assert str(on_base.image) in caught.value.message
    assert str(caught.value.hint).splitlines()[0] == message
    assert f"docker login {HOST};" in str(caught.value.hint)
    assert list(build_records_and_comparison.all_records()) == []


def test_with_a_base_of_our_own_no_registry_is_blamed(locked: Lock, builder: Builder) -> None:
    builder.answer = Completed(1, "", f"{SOLVE}failed to authorize")
    with pytest.raises(BuildError):
        built(locked)


def test_on_an_image_other_failures_are_the_builds(locked: Lock, builder: Builder) -> None:
    builder.answer = Completed(1, "", "#9 ERROR: process did not complete successfully: exit code: 1")
    with pytest.raises(BuildError, match="build failed"):
        built(on_image(locked))


@pytest.mark.parametrize("held", [None, image_of("another")])
def test_a_tag_that_names_another_image_is_not_recorded(locked: Lock, builder: Builder, held: Image | None) -> None:
    engine = FakeEngine()
    engine.held = held
    with pytest.raises(EngineError, match="not the image that was just built"):
        built(locked, engine)
    assert list(build_records_and_comparison.all_records()) == []


def test_an_engine_of_another_platform_is_refused(locked: Lock, builder: Builder) -> None:
    engine = FakeEngine()
    engine.platform = "linux/arm64"
    with pytest.raises(EngineError, match="linux/arm64"):
        built(locked, engine)
    assert builder.words == []


def test_a_record_is_of_one_lock_dockerfile_and_installer(
    locked: Lock, builder: Builder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built(locked)
    text = dockerfile_renderer.render(locked, "sample")
    assert len(image_build.matching_records(locked, text)) == 1
    assert image_build.matching_records(locked, text + "\n") == []
    assert image_build.matching_records(dataclasses.replace(locked, environment={}), text) == []
    (tmp_path / "install").write_text("#!/bin/sh\n", encoding="utf-8")
    monkeypatch.setattr(dockerfile_renderer, "TOOLS", (tmp_path / "install", dockerfile_renderer.TOOLS[1]))
    assert image_build.matching_records(locked, text) == []


@pytest.mark.parametrize("content", ["", "{", "[]", "5", "{}", '{"image": "x"}', '{"layers": 5}', "\x00", "null"])
def test_a_damaged_record_is_ignored(locked: Lock, builder: Builder, content: str) -> None:
    built(locked)
    text = dockerfile_renderer.render(locked, "sample")
    (file,) = user_folders.state_folder("builds").iterdir()
    file.write_text(content, encoding="utf-8")
    assert image_build.matching_records(locked, text) == []
    assert list(build_records_and_comparison.all_records()) == []


def test_a_build_record_with_unknown_keys_is_ignored(locked: Lock, builder: Builder) -> None:
    built(locked)
    (file,) = user_folders.state_folder("builds").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "more": 1}), encoding="utf-8")
    assert list(build_records_and_comparison.all_records()) == []


def test_the_disk_is_looked_at_before_with_figures(
    locked: Lock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = SimpleNamespace(data_folder=tmp_path)
    needed = image_build.needed_bytes(locked) + image_build.fetched_bytes(locked)
    free = {"bytes": needed}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, free["bytes"]))
    image_build.require_disk_space(cast(Engine, engine), locked)
    free["bytes"] = needed - 1
    figure = f"{needed / 1e9:.1f} GB"
    assert figure != "0.0 GB"
    with pytest.raises(DiskError, match=f"{figure} .* {figure} are free") as caught:
        image_build.require_disk_space(cast(Engine, engine), locked)
    assert caught.value.code == 6


def test_the_disk_is_looked_at_once_more_when_the_turn_has_come(
    locked: Lock, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other profiles were built in the meantime."""

    def full(*_: Any) -> None:
        raise DiskError("full")

    monkeypatch.setattr(image_build, "require_disk_space", full)
    monkeypatch.setattr(buildx, "build", lambda *given: given[-1]())
    with pytest.raises(DiskError):
        built(locked)


def test_the_required_disk_space_grows_with_the_lock(locked: Lock) -> None:
    assert image_build.needed_bytes(locked) > sum(w.bytes for w in locked.wheels) * 3
    assert image_build.fetched_bytes(locked) == 0
    shutil.rmtree(sha256_file_store.wheel_store().folder)
    assert image_build.fetched_bytes(locked) == sum(w.bytes for w in locked.wheels)
    shutil.rmtree(sha256_file_store.archive_store().folder)
    assert image_build.fetched_bytes(locked) == sum(w.bytes for w in locked.wheels) + sum(
        a.bytes for a in locked.archives
    )
    without = dataclasses.replace(locked, archives=())
    assert (
        image_build.needed_bytes(locked) > image_build.needed_bytes(without) + sum(a.bytes for a in locked.archives) * 3
    )


def test_uv_is_there() -> None:
    assert wheel_resolution_and_download.uv_binary().is_file()


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
        assert image_build.fetched_bytes(lock, compiling=True) == image_build.fetched_bytes(lock) + packed
        assert image_build.needed_bytes(lock, compiling=True) > image_build.needed_bytes(lock) + packed * 3
    assert made.builder and of_debian.builder and made.builder.archives and of_debian.builder.debs
