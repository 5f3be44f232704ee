"""Where the wheels of a lock's extensions come from, and when they are recorded in the lock file."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from packaging.requirements import Requirement

from envbuild.evidence import image_status
from envbuild.image import build_records, extension_wheel_build, registry_push, shared_extension_cache
from envbuild.image.build_records import Record
from envbuild.image.engine_endpoint_and_errors import UnusableEngine
from envbuild.image.extension_wheel_build import BuiltWheel
from envbuild.image.oci import disk_space_needs, lock_image_lookup_and_recipe
from envbuild.image.shared_extension_cache import WheelDescription
from envbuild.lock import lock_creation_and_update, lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import (
    image_steps,
    layer_steps,
    make_build_and_test,
    preflight_report,
    preflight_steps,
    rebuild_comparison,
)
from envbuild.pipeline.image_stores.registry_images import RegistryImages
from envbuild.pipeline.model import BuiltImage, Options, Recipe, StepResult, WheelRecords
from envbuild.pipeline.preflight_report import PlannedExtension
from envbuild.pipeline.progress_events import Event, Note
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve import plan_resolver
from envbuild.util.errors import BuildError, FileError
from unit.image.extension_wheels import (
    FILE,
    PROFILE_WITH_EXTENSION,
    FakeCompiler,
    compile_kernels,
    compiler,
    kernels_wheel,
    use_machine,
)
from unit.registries import Registry, serving
from unit.support import configure, envbuild, image_of, profile_of, sha, whole_lock, write_profile

__all__ = ["compiler"]  # a fixture

DATA: dict[str, Any] = {**PROFILE_WITH_EXTENSION, "toolchain": {"sha256": "a" * 64}}


@dataclass
class Site:
    """A team with a shared folder, a project with a lock, and several machines."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    loaded: LoadedProfile
    compiler: FakeCompiler
    shown: list[Event] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.shown if isinstance(event, Note)]

    @property
    def lock(self) -> Lock:
        found = lock_file.read(self.loaded.lock_file)
        assert found
        return found

    @property
    def key(self) -> str:
        return extension_wheel_build.key(self.lock, self.lock.extensions[0])

    def machine(self, name: str) -> None:
        use_machine(name, self.folder, self.monkeypatch)
        self.shown.clear()

    def share(self) -> Path:
        folder = self.folder / "shared"
        folder.mkdir(exist_ok=True)
        configure(f"extensions: {{cache: {folder}}}\n")
        return folder

    def other_wheel(self) -> None:
        """From now on, a compilation gives a different wheel."""
        self.compiler.wheel = kernels_wheel(self.folder / "other", "different = True")

    def build(self, wheel_records: WheelRecords = "write") -> BuiltWheel:
        """The step "extensions" of `build`, and what it records."""
        context = StepContext(self.shown.append)
        recipe = Recipe(self.loaded, plan_resolver.resolve(self.loaded), self.lock, wheel_records)
        self.monkeypatch.setattr(
            image_steps, "_compile_extension", lambda context, recipe, one: compile_kernels(recipe.lock)
        )
        return context.step("extensions", image_steps.compile_extensions, context, recipe)[0]

    def without_engine(self, wheel_records: WheelRecords = "require") -> BuiltWheel:
        context = StepContext(self.shown.append)
        recipe = Recipe(self.loaded, plan_resolver.resolve(self.loaded), self.lock, wheel_records)
        return layer_steps.compiled_wheels(context, recipe)[0]


@pytest.fixture
def site(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: FakeCompiler) -> Site:
    write_profile(project, DATA)
    loaded = profile_of(project, DATA)
    lock_file.write(whole_lock(plan_resolver.resolve(loaded)), loaded.lock_file, "sample")
    found = Site(tmp_path, monkeypatch, loaded, compiler)
    found.machine("a")
    return found


# recording


def test_the_first_compilation_is_recorded_and_nothing_else_changes(site: Site) -> None:
    before = site.loaded.lock_file.read_text(encoding="utf-8")
    wheel = site.build()
    after = site.loaded.lock_file.read_text(encoding="utf-8")
    assert after.startswith(before)
    size = wheel.path.stat().st_size
    row = f"- {{name: kernels, key: {wheel.key}, file: {FILE}, sha256: {wheel.sha256}, bytes: {size}}}"
    assert after.removeprefix(before) == f"compiled:\n{row}\n"
    assert site.lock.compiled == (wheel.lock_record,)
    assert site.notes == [f"recorded in profiles/sample.lock.yaml: {FILE} {wheel.sha256[:12]}"]
    assert site.build() == wheel
    assert len(site.compiler.compiled) == 1 and site.loaded.lock_file.read_text(encoding="utf-8") == after


@pytest.mark.parametrize("wheel_records", ["require", "ignore"])
def test_nothing_is_recorded_with_locked_and_in_a_trial(site: Site, wheel_records: WheelRecords) -> None:
    before = site.loaded.lock_file.read_bytes()
    site.build(wheel_records)
    assert site.loaded.lock_file.read_bytes() == before and site.notes == []


def test_options_decide_what_is_done_with_records() -> None:
    assert Options().wheel_records == Options(pins={"numpy": "1"}, write=True).wheel_records == "write"
    assert Options(locked=True).wheel_records == "require"
    assert Options(pins={"numpy": "1"}).wheel_records == "ignore"


def test_a_lock_of_another_folder_is_not_changed(site: Site) -> None:
    """A shipped profile has its lock next to it, and none in the working folder."""
    elsewhere = replace(site.loaded, name="other")
    context = StepContext(site.shown.append)
    recipe = Recipe(elsewhere, plan_resolver.resolve(site.loaded), site.lock, "write")
    layer_steps.record_wheels(context, recipe, [compile_kernels(site.lock).lock_record])
    assert not elsewhere.lock_file.exists() and site.lock.compiled == ()
    (note,) = site.notes
    assert "other.lock.yaml does not exist" in note and "envbuild lock" in note


@pytest.mark.parametrize("wheel_records", ["write", "require"])
def test_a_wheel_of_an_image_that_was_built_before_is_recorded(site: Site, wheel_records: WheelRecords) -> None:
    wheel = compile_kernels(site.lock)
    build_records.write(Record("sha256:1", "h", site.lock.id, "r", (), "b", (wheel.compiled_record,)))
    build_records.write(
        Record("sha256:2", "h", site.lock.id, "r", (), "b", (replace(wheel.compiled_record, sha256=sha("other")),))
    )
    context = StepContext(site.shown.append)
    recipe = Recipe(site.loaded, plan_resolver.resolve(site.loaded), site.lock, wheel_records)
    layer_steps.record_wheels_of_image(context, recipe, "sha256:2")
    assert site.lock.compiled == (), "the image has a different wheel"
    layer_steps.record_wheels_of_image(context, recipe, "sha256:1")
    assert site.lock.compiled == ((wheel.lock_record,) if wheel_records == "write" else ())


def test_an_image_with_another_wheel_than_the_recorded_does_not_count(site: Site) -> None:
    wheel, lock = compile_kernels(site.lock), site.lock
    recipe = lock_image_lookup_and_recipe.recipe_digest(lock, [wheel.compiled_record])
    record = Record("sha256:1", "h", lock.id, recipe, (), "b", (wheel.compiled_record,))
    build_records.write(record)
    other = replace(lock, compiled=(replace(wheel.lock_record, sha256=sha("other")),))
    outdated = replace(lock, compiled=(replace(wheel.lock_record, sha256=sha("other"), key=sha("other")),))
    for one, expected in ((lock, [record]), (other, []), (outdated, [record])):
        assert lock_image_lookup_and_recipe.matching_records(one) == expected
        different = None if expected else "built with a different compiled wheel than the lock records"
        assert lock_image_lookup_and_recipe.built_differently(one) == different
    without_images = cast(Any, SimpleNamespace(find=lambda handle: None))
    assert lock_image_lookup_and_recipe.built_differently(other, without_images) is None


@pytest.mark.parametrize("has_engine", [False, True])
def test_status_reports_an_image_with_another_wheel_than_the_recorded(site: Site, has_engine: bool) -> None:
    wheel, lock, image = compile_kernels(site.lock), site.lock, image_of("built")
    recipe = lock_image_lookup_and_recipe.recipe_digest(lock, [wheel.compiled_record])
    build_records.write(Record(image.id, image.handle, lock.id, recipe, (), "b", (wheel.compiled_record,)))
    lock_file.record_compiled(site.loaded.lock_file, lock, [replace(wheel.lock_record, sha256=sha("other"))])
    engine = cast(Any, SimpleNamespace(find={image.handle: image}.get, tags=lambda name: {}))
    if has_engine:
        status = image_status.compute(engine, site.loaded)
    else:
        status = image_status.compute_without_engine(site.loaded)
    assert (status.state, status.next) == ("missing", f"envbuild make {site.loaded.known}")
    assert status.details[-1] == "built with a different compiled wheel than the lock records: make it again"


def test_a_new_lock_keeps_only_records_that_match(site: Site, project: Path) -> None:
    wheel = site.build()
    stale = replace(wheel.lock_record, name="gone")
    lock = replace(site.lock, compiled=(stale, wheel.lock_record))
    for changed, expected in ((lock, (wheel.lock_record,)), (replace(lock, python="3.13"), ())):
        assert extension_wheel_build.current_records(changed) == expected
        assert extension_wheel_build.with_current_records(changed) == replace(changed, compiled=expected)


def test_lock_drops_a_record_that_no_longer_matches(site: Site, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = site.build()
    for change, expected in (({"env": {"A": "1"}}, (wheel.lock_record,)), ({"gpus": ["a100"]}, ())):
        changed = profile_of(project, {**DATA, **change})
        after = replace(whole_lock(plan_resolver.resolve(changed)), compiled=site.lock.compiled)
        monkeypatch.setattr(lock_creation_and_update, "update_lock", lambda *_, after=after, **__: after)
        done = envbuild("lock", "sample", "--json")
        assert done.code == 0 and site.lock.compiled == expected, done.stderr


# which wheel is used


def test_another_machine_of_the_team_compiles_nothing(site: Site) -> None:
    site.share()
    wheel = site.build()
    for wheel_records in ("require", "write"):
        site.machine(f"b {wheel_records}")
        assert site.build(wheel_records).sha256 == wheel.sha256
        assert len(site.compiler.compiled) == 1
        assert site.notes == [f"kernels: fetched {FILE} from the shared cache {site.folder / 'shared'}"]


def test_a_wheel_that_no_lock_records_is_fetched_and_recorded(site: Site) -> None:
    site.share()
    wheel = site.build("require")
    site.machine("b")
    site.build()
    assert len(site.compiler.compiled) == 1 and site.lock.compiled == (wheel.lock_record,)


def test_without_an_engine_wheels_come_from_the_shared_cache(site: Site) -> None:
    with pytest.raises(BuildError, match="kernels is not compiled yet; compiling needs an engine") as caught:
        site.without_engine()
    assert "extensions.cache" in str(caught.value.hint)
    site.share()
    with pytest.raises(BuildError, match="kernels is not compiled"):
        site.without_engine()
    wheel = site.build()
    site.machine("b")
    assert site.without_engine().sha256 == wheel.sha256


def differing(site: Site, at_hand: str) -> str:
    """The lock records the wheel of machine A; machine B gets a different one. Return the recorded sha256."""
    recorded = site.build().sha256
    site.machine("b")
    site.other_wheel()
    if at_hand == "cached":
        compile_kernels(site.lock)
    return recorded


@pytest.mark.parametrize("at_hand", ["cached", "compiled"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_with_locked_a_different_wheel_is_refused(site: Site, at_hand: str, is_shared: bool) -> None:
    recorded = differing(site, at_hand)
    shared = site.share() if is_shared else None
    before = site.loaded.lock_file.read_bytes()
    with pytest.raises(BuildError) as caught:
        site.build("require")
    (local,) = (site.folder / "b").rglob(FILE)
    assert f"the lock records the wheel {recorded[:12]} of kernels, but this machine has " in caught.value.message
    hint = str(caught.value.hint)
    assert f"envbuild build {site.loaded.known} (without --locked)" in hint and str(local) in hint
    assert (f"store the recorded wheel in {shared}" if shared else "set extensions.cache in config.yaml") in hint
    assert site.loaded.lock_file.read_bytes() == before
    assert shared is None or list(shared.iterdir()) == [], "others must not get it"


@pytest.mark.parametrize("at_hand", ["cached", "compiled"])
def test_without_locked_a_different_wheel_is_recorded_and_reported(site: Site, at_hand: str) -> None:
    recorded = differing(site, at_hand)
    shared = site.share()
    wheel = site.build()
    assert wheel.sha256 != recorded and site.lock.compiled == (wheel.lock_record,)
    assert site.notes == [
        f"the lock records the wheel {recorded[:12]} of kernels, but this machine has {wheel.sha256[:12]}, which was "
        "compiled from the same inputs. The lock will record this wheel instead",
        f"recorded in profiles/sample.lock.yaml: {FILE} {wheel.sha256[:12]}",
    ]
    assert [path.stem for path in shared.rglob("*.whl")] == [wheel.sha256]


@pytest.mark.parametrize("at_hand", ["cached", "compiled"])
@pytest.mark.parametrize("cache", ["/nowhere/extensions", "127.0.0.1:1/extensions"])
def test_a_record_is_kept_if_the_shared_cache_cannot_be_used(site: Site, at_hand: str, cache: str) -> None:
    """The cache may have the recorded wheel."""
    recorded = differing(site, at_hand)
    configure(f'extensions: {{cache: "{cache}"}}\n')
    before = site.loaded.lock_file.read_bytes()
    wheel = site.build()
    assert wheel.sha256 != recorded and site.loaded.lock_file.read_bytes() == before
    first, second = site.notes
    assert first.startswith(f"the shared cache {cache} cannot be used: ")
    assert second == (
        f"the lock records the wheel {recorded[:12]} of kernels, but this machine has {wheel.sha256[:12]}, which was "
        "compiled from the same inputs. This image has this machine's wheel, and the lock keeps its record, because "
        f"the shared cache may have the recorded wheel; once it can be used: envbuild build {site.loaded.known}"
    )
    with pytest.raises(BuildError) as caught:
        site.build("require")
    assert str(caught.value.hint).startswith("correct this first, because the shared cache may have the recorded wheel")


def test_a_record_is_kept_if_the_wheel_cannot_be_fetched(site: Site) -> None:
    with serving(Registry()) as registry:
        configure(f'extensions: {{cache: "{registry.host}/extensions"}}\n')
        recorded = differing(site, "compiled")
        del registry.blobs[f"sha256:{recorded}"]
        assert site.build().sha256 != recorded
        assert site.lock.compiled[0].sha256 == recorded
        assert "cannot be fetched" in site.notes[0] and "the lock keeps its record" in site.notes[1]


def test_verify_uses_a_different_wheel_and_reports_it(site: Site) -> None:
    recorded = differing(site, "cached")
    shared = site.share()
    assert site.build("ignore").sha256 != recorded
    assert site.lock.compiled[0].sha256 == recorded and list(shared.iterdir()) == []
    assert len(site.notes) == 1 and "This wheel is used" in site.notes[0]


def test_the_recorded_wheel_of_the_shared_cache_replaces_a_different_one(site: Site) -> None:
    site.share()
    recorded = differing(site, "cached")
    assert site.build("require").sha256 == recorded
    assert site.lock.compiled[0].sha256 == recorded


def test_a_compilation_that_gives_the_recorded_wheel_is_accepted(site: Site) -> None:
    wheel = site.build()
    site.machine("b")
    shared = site.share()
    assert site.build("require").sha256 == wheel.sha256
    assert len(site.compiler.compiled) == 2 and [path.stem for path in shared.rglob("*.whl")] == [wheel.sha256]


@pytest.mark.parametrize("first", ["require", "write"])
def test_a_wheel_compiled_before_the_cache_was_set_up_is_stored_later(site: Site, first: WheelRecords) -> None:
    wheel = site.build(first)
    shared = site.share()
    site.build("require")
    assert list(shared.rglob("*.whl")) == []
    site.build()
    (file,) = shared.rglob("*.whl")
    assert file.stem == wheel.sha256
    before = file.stat().st_ino
    site.build()
    assert file.stat().st_ino == before, "it is not stored twice"


@pytest.mark.parametrize("damaged", [b"", b"damaged"])
def test_a_damaged_wheel_in_a_folder_is_replaced(site: Site, damaged: bytes) -> None:
    shared = site.share()
    wheel = site.build()
    (file,) = shared.rglob("*.whl")
    content = file.read_bytes()
    file.write_bytes(damaged + content[len(damaged) or 1 :])  # shorter, or of the same size
    assert site.build() == wheel
    assert file.read_bytes() == content


def test_a_missing_wheel_in_a_registry_is_stored_again(site: Site) -> None:
    with serving(Registry()) as registry:
        configure(f'extensions: {{cache: "{registry.host}/extensions"}}\n')
        wheel = site.build()
        content = registry.blobs.pop(f"sha256:{wheel.sha256}")
        assert site.build() == wheel
        assert registry.blobs[f"sha256:{wheel.sha256}"] == content


def test_a_wheel_that_cannot_be_read_only_warns(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(file: Path) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    shared = site.share()
    wheel = site.build()
    monkeypatch.setattr(Path, "is_symlink", denied)  # root may read everything
    monkeypatch.setattr(shared_extension_cache, "find_description", lambda *_: described(wheel))
    site.shown.clear()
    assert site.build() == wheel
    (note,) = site.notes
    assert note == f"the shared cache {shared} cannot be used: {shared / wheel.key}: Permission denied"


def described(wheel: BuiltWheel) -> WheelDescription:
    text = (wheel.path.parent / extension_wheel_build.DESCRIPTION_FILE).read_text(encoding="utf-8")
    return WheelDescription.model_validate_json(text)


def test_a_wheel_of_this_machine_does_not_wait_for_the_shared_cache(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, shared = site.build(), site.share()
    monkeypatch.setattr(layer_steps, "CACHE_SECONDS", 0.2)
    monkeypatch.setattr(shared_extension_cache, "find_description", lambda *_: time.sleep(60))
    site.shown.clear()
    assert site.build() == wheel
    assert site.notes == [f"the shared cache {shared} cannot be used: no answer in 0 s"]


# a shared cache that cannot be used


def test_a_refused_entry_is_reported_and_the_wheel_is_compiled(site: Site) -> None:
    shared = site.share()
    wheel = site.build()
    (file,) = shared.rglob("*.whl")
    file.write_bytes(b"hostile")
    site.machine("b")
    assert site.build("require").sha256 == wheel.sha256
    assert len(site.compiler.compiled) == 2
    (note,) = site.notes
    assert note.startswith(f"kernels: the wheel in the shared cache {shared} is refused: {FILE} has the sha256 ")
    assert file.read_bytes() == wheel.path.read_bytes(), "the damaged entry was replaced"


@pytest.mark.parametrize("cache", ["/nowhere/extensions", "127.0.0.1:1/extensions"])
def test_an_unreachable_cache_only_warns(site: Site, cache: str) -> None:
    configure(f'extensions: {{cache: "{cache}"}}\n')
    assert site.build()
    first, second = site.notes
    assert first.startswith(f"the shared cache {cache} cannot be used: ")
    assert second.startswith("recorded in")


def with_two_extensions(site: Site) -> Lock:
    (kernels,) = site.lock.extensions
    return replace(site.lock, extensions=(kernels, replace(kernels, name="second", env={"A": "1"})))


@pytest.mark.parametrize("cache", ["/nowhere/extensions", "127.0.0.1:1/extensions"])
def test_a_cache_that_cannot_be_used_is_noted_once(site: Site, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(f'extensions: {{cache: "{cache}"}}\n')
    asked, find = list[str](), shared_extension_cache.find_description

    def note(cache: Any, lock: Lock, one: Any, recorded: Any) -> Any:
        asked.append(one.name)
        return find(cache, lock, one, recorded)

    monkeypatch.setattr(shared_extension_cache, "find_description", note)
    wheel, context = compile_kernels(site.lock), StepContext(site.shown.append)
    site.machine("b")
    recipe = Recipe(site.loaded, plan_resolver.resolve(site.loaded), with_two_extensions(site), "require")
    found = layer_steps.find_or_compile_wheels(context, recipe, lambda one: replace(wheel, name=one.name))
    assert [one.name for one in found] == ["kernels", "second"] and len(site.notes) == 1
    assert asked == (["kernels", "second"] if cache.startswith("/") else ["kernels"]), "a registry may keep it waiting"


def test_a_wheel_that_requires_other_packages_is_recorded_and_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension_wheel_build, "_requirements", lambda wheel, python: ([Requirement("einops")], []))
    wheel = compile_kernels(site.lock)
    with pytest.raises(BuildError) as caught:
        site.build()
    assert "kernels needs einops, and the lock has none: add it" in str(caught.value.hint)
    assert site.lock.recorded_wheel("kernels", site.key)
    assert wheel.path.is_file()


def test_a_rebuild_does_not_use_the_shared_cache(site: Site) -> None:
    """Otherwise it would find the wheel that it has to check."""
    shared = site.share()
    site.build("ignore")
    assert not list(shared.iterdir())
    site.build()
    site.machine("b")
    site.build("ignore")
    assert len(site.compiler.compiled) == 2


def test_a_lock_file_that_cannot_be_written_only_warns(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(lock_file, "write_within", denied)  # root may write everywhere
    site.build()
    (note,) = site.notes
    assert note.startswith("the compiled wheels are not recorded in profiles/sample.lock.yaml: ")
    assert site.lock.compiled == ()


def test_a_registry_that_may_only_be_read_only_warns(site: Site) -> None:
    with serving(Registry(refuse="(POST|PUT) .*")) as registry:
        configure(f'extensions: {{cache: "{registry.host}/extensions"}}\n')
        assert site.build()
        assert site.notes[0].startswith(f"kernels: not stored in the shared cache {registry.host}/extensions: ")
        assert site.lock.compiled


def test_a_folder_that_may_only_be_read_only_warns(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = site.share()

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(shared))

    monkeypatch.setattr(shared_extension_cache, "_replace", denied)  # root may write everywhere
    assert site.build()
    assert site.notes[0] == f"kernels: not stored in the shared cache {shared}: {shared}: Permission denied"


# the preflight


def planned(site: Site, *, locked: bool = False) -> PlannedExtension:
    cache = shared_extension_cache.configured_cache()
    (found,) = preflight_steps._plan_extensions(site.lock, cache, Options(locked=locked))
    return found


def test_the_preflight_says_where_a_wheel_will_come_from(site: Site) -> None:
    assert planned(site) == PlannedExtension("kernels", "compiled")
    site.share()
    assert planned(site) == PlannedExtension("kernels", "compiled")
    wheel = site.build()
    assert planned(site) == PlannedExtension("kernels", "cached")
    site.machine("b")
    assert planned(site) == PlannedExtension("kernels", "fetched", wheel.path.stat().st_size)
    site.other_wheel()
    compile_kernels(site.lock)
    assert planned(site).source == "fetched", "this machine has a different wheel than the lock records"
    configure("")
    assert planned(site).source == "cached"


@pytest.mark.parametrize("at_hand", ["cached", "compiled"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_the_preflight_announces_that_locked_requires_another_wheel(site: Site, at_hand: str, is_shared: bool) -> None:
    recorded = differing(site, at_hand)
    if is_shared:
        site.share()
    assert planned(site) == PlannedExtension("kernels", "cached" if at_hand == "cached" else "compiled")
    source: Any = "refused" if at_hand == "cached" else "compiled"
    assert planned(site, locked=True) == PlannedExtension("kernels", source, required_sha256=recorded)


def test_the_preflight_does_not_wait_for_a_cache_that_hangs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_steps, "CACHE_SECONDS", 0.2)
    monkeypatch.setattr(shared_extension_cache, "find_description", lambda *_: time.sleep(60))
    site.share()
    begin = time.monotonic()
    assert planned(site) == PlannedExtension("kernels", "compiled", fault="no answer in 0 s")
    assert time.monotonic() - begin < 5


def test_the_preflight_names_the_fault_of_the_cache(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FileError("the folder is gone")

    site.share()
    monkeypatch.setattr(shared_extension_cache, "find_description", fail)
    assert planned(site) == PlannedExtension("kernels", "compiled", fault="the folder is gone")


@pytest.mark.parametrize(
    ("one", "cache", "line"),
    [
        (PlannedExtension("k", "compiled"), None, "extension: k will be compiled"),
        (PlannedExtension("k", "compiled"), "/s",
         "extension: k will be compiled; the shared cache /s does not have it"),
        (PlannedExtension("k", "fetched", 38_000_000), "/s",
         "extension: k will be fetched from the shared cache /s, 38 MB"),
        (PlannedExtension("k", "cached"), "/s", None),
        (PlannedExtension("k", "compiled", required_sha256="a" * 64), None,
         "extension: k will be compiled; --locked accepts only the recorded wheel aaaaaaaaaaaa"),
        (PlannedExtension("k", "refused", fault="gone", required_sha256="a" * 64), "/s",
         "extension: k will be refused: this machine's wheel differs, and --locked requires the recorded wheel "
         "aaaaaaaaaaaa"),
    ],
)  # fmt: skip
def test_the_lines_of_the_preflight(one: PlannedExtension, cache: str | None, line: str | None) -> None:
    found = preflight_report.Preflight(
        "p", "", (), 1, "local", None, (), None, None, True, 0, 0, False, 0, None, "possible", (), (one,), cache
    )
    lines = [text for text in preflight_report.preflight_lines(found) if text.startswith("extension")]
    assert lines == ([line] if line else [])


def test_the_preflight_names_a_fault_of_the_cache_once() -> None:
    """Also if the wheel comes from this machine, because the cache may have the recorded one."""
    extensions = (PlannedExtension("k", "compiled", fault="gone"), PlannedExtension("l", "cached", fault="gone"))
    found = preflight_report.Preflight(
        "p", "", (), 1, "local", None, (), None, None, True, 0, 0, False, 0, None, "possible", (), extensions, "/s"
    )
    lines = [text for text in preflight_report.preflight_lines(found) if "k " in text or "cache" in text]
    assert lines == ["extension: k will be compiled", "shared cache: /s cannot be used: gone"]


def test_the_document_of_a_dry_run_has_the_extensions(site: Site) -> None:
    shared = site.share()
    wheel = site.build()
    site.machine("b")
    document = envbuild("make", "sample", "--dry-run", "--json").document
    size = wheel.path.stat().st_size
    row = {"name": "kernels", "source": "fetched", "bytes": size, "fault": None, "required_sha256": None}
    assert (document["extensions"], document["extension_cache"]) == ([row], str(shared))
    configure("")
    without = envbuild("make", "sample", "--dry-run", "--json").document
    assert without["extension_cache"] is None and without["extensions"][0]["source"] == "compiled"
    assert without["fetch_bytes"] > document["fetch_bytes"], "the compiler need not be fetched"


# the workflows


def test_a_changed_lock_is_written_without_outdated_records(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = site.build()
    before = site.lock
    monkeypatch.setattr(image_steps, "fetch_base", lambda context, plan, lock, **_: lock)
    for change, expected in (({"environment": {"A": "1"}}, (wheel.lock_record,)), ({"python": "3.13"}, ())):
        after = replace(before, **change)
        monkeypatch.setattr(lock_creation_and_update, "update_lock", lambda *_, after=after, **__: after)
        context = StepContext(site.shown.append)
        plan = plan_resolver.resolve(site.loaded)
        assert image_steps.lock_profile(context, site.loaded, plan, Options()).value.compiled == expected
        assert site.lock.compiled == expected


@pytest.mark.parametrize("locked", [False, True])
def test_build_without_an_engine_records_unless_it_is_locked(
    site: Site, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    site.share()
    wheel = site.build("require")
    site.machine("b")
    monkeypatch.setattr(StepContext, "engine", property(no_engine))
    monkeypatch.setattr(image_steps, "fetch_base", lambda context, plan, lock, **_: lock)
    monkeypatch.setattr(disk_space_needs, "require_disk_space", lambda *_: None)
    image = SimpleNamespace(id="sha256:1", manifest=SimpleNamespace(digest="sha256:2"), layers=(), size=0)
    monkeypatch.setattr(layer_steps, "write_layers", lambda *_, **__: StepResult(image))
    done = make_build_and_test.build_only("sample", Options(locked=locked), site.shown.append)
    assert done.state == "computed" and len(site.compiler.compiled) == 1
    assert site.lock.compiled == (() if locked else (wheel.lock_record,))


def no_engine(context: StepContext) -> object:
    raise UnusableEngine("no engine")


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_build_with_an_engine_records_unless_it_is_locked(
    site: Site, monkeypatch: pytest.MonkeyPatch, locked: bool, exists: bool
) -> None:
    """Also if the image was built before, for example by an envbuild that recorded nothing."""
    wheel = compile_kernels(site.lock)
    image = image_of("built")
    build_records.write(Record(image.id, "h", site.lock.id, "r", (), "b", (wheel.compiled_record,)))
    found = image if exists else None
    monkeypatch.setattr(StepContext, "engine", SimpleNamespace(tags=lambda name: {}, tag=lambda *_: None))
    monkeypatch.setattr(lock_image_lookup_and_recipe, "existing_image", lambda *_: found)
    monkeypatch.setattr(image_steps, "fetch_base", lambda context, plan, lock, **_: lock)
    monkeypatch.setattr(disk_space_needs, "require_disk_space", lambda *_: None)
    monkeypatch.setattr(image_steps, "prepare_load", lambda *_, **__: StepResult(None))
    monkeypatch.setattr(image_steps, "load_layers", lambda *_: StepResult((image, None)))
    monkeypatch.setattr(lock_image_lookup_and_recipe, "written_record", lambda *_: None)
    monkeypatch.setattr(image_steps, "audit_image", lambda *_: StepResult(BuiltImage(image)))
    done = make_build_and_test.build_only("sample", Options(locked=locked), site.shown.append)
    assert [step.name for step in done.steps if step.name == "extensions"] == ([] if exists else ["extensions"])
    assert site.lock.compiled == (() if locked else (wheel.lock_record,))


def test_the_registry_of_a_cluster_records_the_wheels_of_an_image_that_it_has(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = compile_kernels(site.lock)
    image = image_of("pushed")
    build_records.write(Record(image.id, "h", site.lock.id, "r", (), "b", (wheel.compiled_record,)))
    monkeypatch.setattr(
        lock_image_lookup_and_recipe, "matching_records", lambda lock: list(build_records.all_records())
    )
    monkeypatch.setattr(registry_push, "find_pushed", lambda *_: SimpleNamespace(digest="sha256:1"))
    store = RegistryImages(StepContext(site.shown.append), cast(Any, None), "registry.example/team/images")
    store.provide(Recipe(site.loaded, plan_resolver.resolve(site.loaded), site.lock, "write"))
    assert site.lock.compiled == (wheel.lock_record,)


def test_verify_rebuilds_with_any_wheel(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A different wheel must end in an objection that names the layer, not in an error."""
    monkeypatch.setattr(rebuild_comparison, "fetch_base", lambda context, plan, lock, **_: lock)
    build = SimpleNamespace(profile=site.loaded.profile, document=site.loaded.document, lock=site.lock)
    recipe = rebuild_comparison._recipe(StepContext(site.shown.append), "sample", cast(Any, build), site.folder)
    assert recipe.wheel_records == "ignore"
