"""Whether an image is verified, or why not, with a simulated engine that consists of two dictionaries."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any, cast

import pytest

from envbuild.cli import show_html
from envbuild.cli import status as command
from envbuild.evidence import evidence_statements_and_store, image_status, profile_proofs_and_image_states
from envbuild.evidence.image_status import Status
from envbuild.evidence.run_record_schema import RunRecord, validate_record
from envbuild.image import build_records
from envbuild.image.build_records import Record
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.layers import wheel_layers
from envbuild.image.oci import lock_image_lookup_and_recipe
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import make_build_and_test, runner_selection
from envbuild.pipeline.step_context import StepContext
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.report import profile_page_contents
from envbuild.resolve import plan_resolver
from envbuild.runners.runner_interface import RunnerError
from envbuild.testrun import run_result
from envbuild.testrun.selftest_job import selftest_id
from envbuild.util import user_folders
from unit.evidence.runs import passed_run, probe
from unit.support import PROFILE, envbuild, image_of, plan_of, profile_of, whole_lock

DAY = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
OLD_SELFTEST = {"id": f"sha256:{'0' * 64}", "level": "full", "versions": {}}


class FakeEngine:
    def __init__(self) -> None:
        self.held: dict[str, Image] = {}
        self.tagged: dict[str, str] = {}

    def require_bounds(self) -> None:
        """This engine can limit its containers."""

    def find(self, reference: str) -> Image | None:
        return self.held.get(reference)

    def tags(self, repository: str) -> dict[str, str]:
        assert repository == "envbuild/sample"
        return dict(self.tagged)


class World:
    """One profile with its lock, its images, evidence and tags."""

    def __init__(self, folder: Path) -> None:
        self.engine = FakeEngine()
        self.loaded: LoadedProfile = profile_of(folder, PROFILE)
        self.first = self.loaded.profile
        self.lock = whole_lock(plan_of(folder, PROFILE))
        self.stale: list[str] = []

    def built(self, image: Image, lock: Lock | None = None) -> Image:
        made = lock or self.lock
        recipe = lock_image_lookup_and_recipe.recipe_digest(made, ())
        build_records.write(Record(image.id, image.handle, made.id, recipe, image.layers, "envbuild"))
        self.engine.held[image.handle] = image
        self.engine.tagged[made.short] = image.handle
        return image

    def proved(self, image: Image, lock: Lock | None = None, **changes: Any) -> None:
        made = json.loads(self.record(image, passed_run(), lock).encoded)
        changed = {**made, **changes, "selftest": {**made["selftest"], **changes.get("selftest", {})}}
        evidence_statements_and_store.save(validate_record(changed))

    def record(self, image: Image, run: run_result.TestRun, lock: Lock | None = None) -> RunRecord:
        """Save a record with the requirements of the profile's first version."""
        wanted = profile_proofs_and_image_states.wanted("sample", self.first, lock or self.lock)
        return evidence_statements_and_store.run_record(image, wanted, run, "docker", DAY)

    def verified(self, image: Image) -> None:
        self.engine.tagged["verified"] = image.handle

    def status(self) -> Status:
        engine = cast(Engine, self.engine)
        return image_status.status_of(engine, self.loaded, self.lock, self.stale)


@pytest.fixture
def world(project: Path) -> World:
    return World(project)


def test_built_proved_and_tagged_is_verified(world: World) -> None:
    image = world.built(image_of())
    world.proved(image)
    world.verified(image)
    found = world.status()
    assert (found.state, found.details) == ("verified", ())
    assert found.tags == (f"envbuild/sample:{world.lock.short}", "envbuild/sample:verified")
    document: Any = found.document()
    assert (document.image, document.tags, document.tag) == (image.id, found.tags, "correct")
    assert [proof.state for proof in document.evidence] == ["verified"]


def test_a_self_test_that_never_began_takes_nothing_from_an_image(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = world.built(image_of())
    world.proved(image)
    world.verified(image)

    def refused(*_: object, **__: object) -> None:
        raise RunnerError("Slurm refused the job", ending="refused")

    monkeypatch.setattr(make_build_and_test, "existing", lambda *_: (world.lock, image))
    monkeypatch.setattr(StepContext, "engine", world.engine)
    monkeypatch.setattr(runner_selection, "runner", refused)
    document = envbuild("test", "--record", "sample", "--on", "slurm", "--json").document
    assert (document["error"]["kind"], document["state"], document["selftest"]) == ("runner", "verified", None)
    assert document["tags"] == [f"envbuild/sample:{world.lock.short}", "envbuild/sample:verified"]
    assert [proof["state"] for proof in document["evidence"]] == ["verified"]


def test_missing_isolation_of_a_cluster_container_is_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    image = world.built(image_of())
    world.proved(image, where={"runner": "slurm", "unconfined": ["the network is open"]})
    world.verified(image)
    document: Any = world.status().document()
    assert document.evidence[0].unconfined == ("the network is open",)
    monkeypatch.setattr(command, "Engine", FakeEngine)
    monkeypatch.setattr(image_status, "compute", lambda engine, source: world.status())
    for arguments in ((), ("sample",)):
        result = envbuild("status", *arguments)
        counts = {
            (line.count("less confined"), line.count("the network is open")) for line in result.stdout.splitlines()
        }
        assert (result.code, counts) == (0, {(1, 1)})


def test_never_locked_is_missing(world: World) -> None:
    found = image_status.status_of(cast(Engine, world.engine), world.loaded, None, [])
    assert (found.state, found.lock) == ("missing", None)
    assert (found.details, found.next) == (
        ("never locked",),
        f"envbuild make {world.loaded.file}",
    )  # the profile was named by its path


def test_never_built_is_missing(world: World) -> None:
    found = world.status()
    assert (found.state, found.lock, found.image) == ("missing", world.lock.id, None)
    assert "no image was built" in found.details[0]


@pytest.mark.parametrize(("known", "code"), [(True, 6), (False, 8)])
def test_an_image_that_is_not_built_exits_as_in_test_and_prove(
    world: World, monkeypatch: pytest.MonkeyPatch, known: bool, code: int
) -> None:
    if known:
        lock_file.write(world.lock, world.loaded.lock_file, "sample")
    monkeypatch.setattr(command, "Engine", lambda: world.engine)
    monkeypatch.setattr(StepContext, "engine", world.engine)
    result = envbuild("status", "sample", "--json")
    assert (result.code, result.document["state"]) == (code, "missing")
    assert {envbuild("test", "sample", *options).code for options in ((), ("--record",))} == {code}


def test_an_image_that_the_engine_removed_is_missing(world: World) -> None:
    world.proved(world.built(image_of()))
    world.engine.held.clear()
    assert world.status().state == "missing"


def test_another_image_under_the_recorded_handle_is_missing(world: World) -> None:
    image = world.built(image_of())
    world.proved(image)
    world.engine.held[image.handle] = dataclasses.replace(image, id=image_of("other").id)
    assert world.status().state == "missing"


def test_a_tag_alone_makes_nothing_built(world: World) -> None:
    image = image_of()
    world.engine.held[image.handle] = image
    world.engine.tagged = {world.lock.short: image.handle, "verified": image.handle}
    world.proved(image)
    found = world.status()
    assert (found.state, found.image) == ("missing", None)
    assert "no image was built" in found.details[0] and "another user or machine built it" in found.details[1]


def test_a_tag_on_an_image_of_another_lock_was_moved_by_hand(world: World) -> None:
    image = image_of()
    world.engine.held[image.handle] = image
    world.engine.tagged = {"verified": image.handle}
    found = world.status()
    assert found.state == "tampered"
    assert "moved by hand" in found.details[1]


def test_built_and_not_proved_is_unproved(world: World) -> None:
    world.built(image_of())
    found = world.status()
    assert (found.state, found.details) == ("unverified", ("sample: unverified",))


def test_the_tag_alone_is_not_proof(world: World) -> None:
    world.verified(world.built(image_of()))
    found = world.status()
    assert found.state == "tampered"
    assert "moved by hand" in found.details[-1]


def test_a_proof_is_made_with_the_profiles_own_script(world: World, project: Path) -> None:
    image = world.built(image_of())
    world.proved(image)
    world.verified(image)
    for text in ("step('one')", "step('two')"):
        (project / "profiles" / "smoke.py").write_text(text, encoding="utf-8")
        world.loaded = profile_of(project, {**PROFILE, "selftest": {**PROFILE["selftest"], "script": "smoke.py"}})
        found = world.status()
        assert (found.state, found.details[0]) == ("stale", "sample: proved with another script")
        world.first = world.loaded.profile
        evidence_statements_and_store.save(world.record(image, passed_run(probe("env.libs"), probe("own.script"))))
        assert world.status().state == "verified"


def test_a_failed_run_is_not_proof(world: World) -> None:
    image = world.built(image_of())
    run = passed_run(probe("gemm.crash"), probe("env.libs", "failed"))
    evidence_statements_and_store.save(world.record(image, run))
    found = world.status()
    assert (found.state, found.details) == ("failed", ("sample: the self-test failed: env.libs",))


def test_a_failure_after_a_proof_is_a_failure_though_the_tag_stays(world: World) -> None:
    image = world.built(image_of())
    world.proved(image)
    world.verified(image)
    evidence_statements_and_store.save(
        world.record(image, passed_run(probe("gemm.crash"), probe("env.libs", "failed")))
    )
    found = world.status()
    assert (found.state, found.details) == ("failed", ("sample: the self-test failed since: env.libs",))


def test_a_script_of_another_profile_of_the_image_fails_only_that_one(world: World, project: Path) -> None:
    image = world.built(image_of())
    world.proved(image)
    world.verified(image)
    (project / "profiles" / "smoke.py").write_text("fail('no')", encoding="utf-8")
    child = profile_of(project, {"extends": "sample", "selftest": {"script": "smoke.py"}}, "child")
    required = profile_proofs_and_image_states.wanted("child", child.profile, world.lock)
    run = passed_run(probe("env.libs"), probe("own.script", "failed"))
    evidence_statements_and_store.save(
        evidence_statements_and_store.run_record(image, required, run, "docker", DAY + datetime.timedelta(days=1))
    )
    assert (world.status().state, world.status().details) == ("verified", ())
    world.proved(image)  # another pass without that script does not refute its failure
    (proof,) = profile_proofs_and_image_states.proofs_of(image.id, "child", child.profile, world.lock)
    assert (proof.state, proof.reason, proof.failed) == ("stale", "the self-test failed: own.script", True)


def test_a_changed_profile_is_out_of_date(world: World) -> None:
    image = world.built(image_of())
    world.proved(image)
    world.verified(image)
    world.stale = ["wheels", "apt"]
    found = world.status()
    assert found.state == "stale"
    assert [reason.partition(" ")[0] for reason in found.details] == ["wheels", "apt"]


def test_an_older_selftest_is_out_of_date(world: World) -> None:
    image = world.built(image_of())
    world.proved(image, selftest=OLD_SELFTEST)
    found = world.status()
    assert (found.state, found.details) == ("stale", ("sample: proved by a different version of the self-test",))


@pytest.mark.parametrize(
    "changes",
    [{"selftest": OLD_SELFTEST}, {"results": [], "start": {}}, {"selftest": {"id": selftest_id(), "level": "quick"}}],
)
def test_a_tag_that_was_set_in_its_time_is_out_of_date_and_not_moved_by_hand(
    world: World, project: Path, changes: dict[str, Any]
) -> None:
    image = world.built(image_of())
    if "results" in changes:  # the profile now requires one probe more
        world.loaded = profile_of(
            project, {**PROFILE, "selftest": {"level": "quick", "require": ["env.libs", "gemm.exact"]}}
        )
        changes = {}
    elif changes["selftest"]["level"] == "quick":  # and here a higher level
        world.loaded = profile_of(project, {**PROFILE, "selftest": {"level": "full"}})
    world.proved(image, **changes)
    world.verified(image)
    found = world.status()
    assert (found.state, len(found.details)) == ("stale", 1)
    assert found.details[0].startswith("sample: ")


def test_a_tag_on_an_image_that_only_failed_was_moved_by_hand(world: World) -> None:
    image = world.built(image_of())
    run = passed_run(probe("env.libs", "failed"))
    evidence_statements_and_store.save(world.record(image, run))
    world.verified(image)
    found = world.status()
    assert found.state == "tampered"
    assert "moved by hand" in found.details[-1]


def test_a_tag_that_names_nothing_the_engine_has_was_moved_by_hand(world: World) -> None:
    world.proved(world.built(image_of()))
    world.engine.tagged["verified"] = "sha256:gone"
    assert world.status().state == "tampered"


def test_a_tag_moved_to_a_foreign_image_is_noticed(world: World) -> None:
    world.proved(world.built(image_of()))
    foreign = image_of("foreign")
    world.engine.held[foreign.handle] = foreign
    world.verified(foreign)
    found = world.status()
    assert found.state == "tampered"
    assert "moved by hand" in found.details[-1]


def test_a_tag_moved_to_a_foreign_image_is_noticed_before_the_proof_too(world: World) -> None:
    world.built(image_of())
    foreign = image_of("foreign")
    world.engine.held[foreign.handle] = foreign
    world.verified(foreign)
    assert world.status().state == "tampered"


def test_evidence_for_a_foreign_image_does_not_make_it_ours(world: World) -> None:
    world.proved(world.built(image_of()))
    foreign = image_of("foreign")
    world.engine.held[foreign.handle] = foreign
    world.proved(foreign)
    world.verified(foreign)
    assert world.status().state == "tampered"


def earlier(world: World, **changes: Any) -> Image:
    """An image of an older lock, which was verified and tagged then."""
    older = dataclasses.replace(world.lock, environment={"A": "1"})
    image = world.built(image_of("earlier"), older)
    world.proved(image, older, **changes)
    world.verified(image)
    return image


def test_an_earlier_image_stays_tagged_until_the_new_one_is_proved(world: World) -> None:
    earlier(world)
    world.built(image_of())
    found = world.status()
    assert (found.state, found.details) == ("unverified", ("sample: unverified",))


def test_an_earlier_image_that_an_older_selftest_proved_was_not_moved_by_hand(world: World) -> None:
    earlier(world, selftest=OLD_SELFTEST)
    world.built(image_of())
    found = world.status()
    assert (found.state, found.details) == ("unverified", ("sample: unverified",))


def test_a_proved_image_without_its_tag_is_not_verified(world: World) -> None:
    world.proved(world.built(image_of()))
    found = world.status()
    assert (found.state, found.details) == ("unverified", ("the tag 'verified' is missing",))


def test_a_proved_image_with_the_tag_still_elsewhere_is_not_verified(world: World) -> None:
    earlier(world)
    world.proved(world.built(image_of()))
    found = world.status()
    assert found.state == "unverified"
    assert (found.details, found.next) == (
        (image_status._TAG_REASONS["outdated"],),
        f"envbuild make {world.loaded.known}",
    )


def test_a_damaged_build_record_proves_nothing(world: World) -> None:
    image = world.built(image_of())
    world.proved(image)
    world.verified(image)
    for file in user_folders.state_folder("builds").iterdir():
        file.write_text("{}", encoding="utf-8")
    found = world.status()
    assert (found.state, found.image) == ("missing", None)
    assert "no image was built" in found.details[0]


def test_the_lock_on_disk_is_what_counts(world: World) -> None:
    engine = cast(Engine, world.engine)
    assert "never locked" in image_status.compute(engine, world.loaded).details[0]
    world.built(image_of())
    lock_file.write(world.lock, world.loaded.lock_file, "sample")
    assert image_status.compute(engine, world.loaded).state == "unverified"
    stale = whole_lock(plan_of(world.loaded.project, {**PROFILE, "packages": []}))
    lock_file.write(stale, world.loaded.lock_file, "sample")
    assert "wheels changed in the profile since it was locked" in image_status.compute(engine, world.loaded).details


@pytest.mark.parametrize("which", [0, 1])
def test_without_an_engine_a_verified_image_counts_first(world: World, which: int) -> None:
    """Two engines may have different images of one lock, for example with an extension that was compiled twice."""
    assert image_status.compute_without_engine(world.loaded).lock is None
    lock_file.write(world.lock, world.loaded.lock_file, "sample")
    assert image_status.compute_without_engine(world.loaded).state == "missing"
    images = [world.built(image_of(name)) for name in ("one", "other")]
    found = image_status.compute_without_engine(world.loaded)
    assert (found.state, found.tag, found.tags) == ("unverified", None, ())
    world.proved(images[which])
    found = image_status.compute_without_engine(world.loaded)
    assert (found.state, found.image and found.image.id) == ("verified", images[which].id)


def test_the_status_of_all_has_a_line_for_each(world: World, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Engine", lambda: world.engine)
    monkeypatch.setattr(profile_and_lock_name_lookup, "profile_names", lambda: ["broken", "sample"])
    (project / "profiles" / "broken.yaml").write_text("- x", encoding="utf-8")
    lock_file.write(world.lock, world.loaded.lock_file, "sample")
    image = world.built(image_of())
    done = envbuild("status", "--json")
    assert done.code == 0
    rows = [(row["profile"], row["state"]) for row in done.document["profiles"]]
    assert rows == [("broken", "invalid"), ("sample", "unverified")]
    world.proved(image)
    world.verified(image)
    broken, sample = envbuild("status").stdout.splitlines()
    assert broken.startswith("broken: invalid: ") and broken.endswith("; next: envbuild show broken")
    assert sample.startswith(f"sample: verified: {image.id} (")


def test_each_state_has_its_next_command(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of `status` ends with the next command."""
    known = world.loaded.known
    found: dict[str, str] = {}

    def note() -> None:
        status = world.status()
        monkeypatch.setattr(image_status, "compute", lambda engine, source: status)
        monkeypatch.setattr(command, "Engine", FakeEngine)
        line = envbuild("status", known).stdout.rstrip("\n")
        assert line.startswith(f"sample: {status.state}: ") and line.endswith(f"; next: {status.next}")
        assert envbuild("status").stdout.splitlines()[-1].endswith(f"; next: {status.next}")
        found[status.state] = status.next

    note()
    image = world.built(image_of())
    note()
    world.proved(image)
    world.verified(image)
    note()
    world.stale = ["wheels"]
    note()
    world.stale = []
    evidence_statements_and_store.save(world.record(image, passed_run(probe("env.libs", "failed"))))
    note()
    world.engine.tagged["verified"] = "sha256:gone"
    note()
    assert found == {
        "missing": f"envbuild make {known}",
        "unverified": f"envbuild test {known} --record",
        "verified": "docker run --rm -it envbuild/sample:verified",
        "stale": f"envbuild make {known}",
        "failed": f"envbuild test {known}",
        "tampered": f"envbuild make {known}",
    }


def test_an_image_that_an_older_envbuild_built_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evidence of the image stays valid, so that the tag `verified` is correct."""
    image = world.built(image_of())
    world.proved(image)
    world.verified(image)
    monkeypatch.setattr(wheel_layers, "WRITER_VERSION", 10**6)
    found = world.status()
    assert (found.state, found.image, found.tag) == ("missing", None, "correct")
    assert found.details == ("built by an older envbuild: make it again",)
    assert found.next == f"envbuild make {world.loaded.known}"


def test_the_page_of_show_says_the_same_as_status(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every state that can be known without the engine's tags."""
    monkeypatch.setattr(Lock, "stale", lambda lock, plan: world.stale)
    plan = plan_resolver.resolve(world.loaded)
    found: list[str] = []

    def compare(lock: Lock | None = world.lock) -> None:
        engine = cast(Engine, world.engine)
        status = image_status.status_of(engine, world.loaded, lock, world.stale)
        evidence = show_html.page_evidence(world.loaded, lock)
        page = profile_page_contents.page_status(world.loaded, plan, lock, evidence)
        assert (page.state, page.next) == (status.state, status.next)
        assert set(status.details) <= set(page.reasons)
        found.append(page.state)

    compare(None)
    compare()
    image = world.built(image_of())
    compare()
    world.proved(image)
    world.verified(image)
    compare()
    world.stale = ["wheels"]
    compare()
    world.stale = []
    evidence_statements_and_store.save(world.record(image, passed_run(probe("env.libs", "failed"))))
    compare()
    monkeypatch.setattr(wheel_layers, "WRITER_VERSION", 10**6)  # as if an older envbuild had built the image
    compare()
    assert found == ["missing", "missing", "unverified", "verified", "stale", "failed", "missing"]
