"""The effect of a finished self-test on the pipeline and on the commands that report it."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock
from xml.etree import ElementTree

import pytest

from envbuild.audit import environment_audit, image_collector
from envbuild.audit.environment_audit import Audit, Expected
from envbuild.audit.finding_types import Finding
from envbuild.evidence.proof_rules import Proof
from envbuild.facts import probe_catalogue_reader
from envbuild.fetch import archive_fetcher, wheel_resolution_and_download
from envbuild.image import (
    build_records,
    buildx,
    lock_paths_of_built_images,
)
from envbuild.image.oci import disk_space_needs, lock_image_lookup_and_recipe
from envbuild.image.oci.image_description import ImageToLoad
from envbuild.lock import extension_source_fetcher, lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import build_downloads, image_steps, layer_steps, make_build_and_test
from envbuild.pipeline.model import BuiltImage, MakeResult, Options, Recipe, RunnerOptions, StepResult
from envbuild.pipeline.progress_events import Listener
from envbuild.pipeline.selftest_steps import WrittenEvidence
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.registry import oci_types
from envbuild.runners import docker_runner
from envbuild.testrun import run_result, selftest_job
from envbuild.util import user_folders
from envbuild.util.errors import CheckFailed, DiskError, EngineError, EnvbuildError, NotProved
from envbuild.util.untrusted_input_errors import Reason
from unit.evidence.runs import NAMES, documents, judged, lines, passed_run, probe
from unit.image.base_images import PushedBase, debian
from unit.image.oci.layered_samples import sample, written
from unit.registries import Registry, serving
from unit.support import (
    PROFILE,
    CommandResult,
    envbuild,
    image_of,
    is_locked,
    lock_for,
    plan_of,
    profile_of,
    whole_lock,
)
from unit.testrun import fingerprints

SOURCE = cast(LoadedProfile, SimpleNamespace(name="sample", known_lock=Path("profiles/sample.lock.yaml")))


def made(run: run_result.TestRun | None) -> MakeResult:
    return MakeResult("sample", image=image_of(), run=run)


def skipped(*required: str) -> run_result.TestRun:
    found = documents(probe("env.libs"), probe("gemm.crash", "skipped", reason="needs a GPU"))
    return judged(lines(found), required)


def test_a_run_that_passed_is_let_through() -> None:
    make_build_and_test.require_passed(made(None))
    make_build_and_test.require_passed(made(passed_run()))
    make_build_and_test.require_passed(made(skipped("env.libs")))


def test_a_required_probe_that_was_skipped_is_not_proved_and_named_with_its_reason() -> None:
    with pytest.raises(NotProved, match="sample is built, and not proved: a required probe was skipped") as caught:
        make_build_and_test.require_passed(made(skipped("env.libs", "gemm.crash")))
    assert (caught.value.code, caught.value.kind) == (4, "not-proved")
    assert caught.value.hint == "gemm.crash: needs a GPU"


@pytest.mark.parametrize("required", [[], ["gemm.crash"]])
def test_where_nothing_ran_nothing_is_proved(required: list[str]) -> None:
    run = judged(lines(documents(probe("gemm.crash", "skipped", reason="needs a GPU"))), required)
    with pytest.raises(NotProved) as caught:
        make_build_and_test.require_passed(made(run))
    assert caught.value.hint == "gemm.crash: needs a GPU"


def test_a_failure_is_a_failed_check_with_any_skips() -> None:
    found = documents(probe("env.libs", "failed"), probe("gemm.crash", "skipped"), probe("train.step"))
    run = judged(lines(found), ["gemm.crash"], exit_code=5)
    assert run.skipped_required == ("gemm.crash",)
    with pytest.raises(CheckFailed, match=r"self-test of sample failed: env\.libs") as caught:
        make_build_and_test.require_passed(made(run))
    assert (caught.value.code, caught.value.hint) == (5, "env.libs: signal at a step: why")


@pytest.mark.parametrize("whole", [False, True])
def test_where_memory_was_short_the_limit_is_named(whole: bool) -> None:
    killed = probe("gemm.crash", "failed", failure="oom", reason="killed: out of memory or a limit", signal="SIGKILL")
    run = judged(lines(documents(killed)), exit_code=5)
    if whole:
        run = judged(lines(documents()[:1]), exit_code=137, out_of_memory=True)
    with pytest.raises(CheckFailed, match="the self-test of sample failed: ") as caught:
        make_build_and_test.require_passed(dataclasses.replace(made(run), memory_gb=1.5))
    assert str(caught.value.hint).endswith("its container is limited to 1.5 GiB: selftest: memory_gb in the profile")
    with pytest.raises(CheckFailed) as elsewhere:  # an environment of this machine has no such limit
        make_build_and_test.require_passed(made(run))
    assert "memory_gb" not in str(elsewhere.value.hint)


def test_a_required_probe_that_is_absent_is_a_failed_check() -> None:
    run = judged(lines(documents(probe("env.libs"))), ["gemm.crash"])
    with pytest.raises(CheckFailed, match=r"required probe gemm\.crash is not among the results"):
        make_build_and_test.require_passed(made(run))


def test_a_run_that_was_stopped_is_a_failed_check_that_names_the_probe() -> None:
    run = judged(lines(documents()[:2]), exit_code=None, timed_out=True, seconds=900.2)
    with pytest.raises(CheckFailed, match=r"failed: gemm\.crash$") as caught:
        make_build_and_test.require_passed(made(run))
    assert "the self-test was stopped after 900 s" in str(caught.value.hint).splitlines()


def test_a_run_without_results_has_the_reason_in_its_message() -> None:
    run = judged(b"", exit_code=1, stderr="x\nno python")
    with pytest.raises(
        CheckFailed, match="self-test of sample failed: the self-test ended with exit code 1: no python"
    ):
        make_build_and_test.require_passed(made(run))


@pytest.mark.parametrize(
    ("run", "proofs", "status"),
    [
        (None, [], "built"),
        (skipped("gemm.crash"), ["stale"], "unverified"),
        (passed_run(), ["proved"], "verified"),
        (passed_run(), ["proved", "missing"], "unverified"),
        (passed_run(probe("env.libs", "failed")), ["stale"], "failed"),
        (passed_run(probe("env.libs", "skipped")), ["stale"], "unverified"),
    ],
)
def test_the_status_of_what_was_made(run: run_result.TestRun | None, proofs: list[str], status: str) -> None:
    found = dataclasses.replace(made(run), proofs=tuple(Proof("cpu", state, None, "") for state in proofs))
    assert found.state == found.document().state == status


@pytest.fixture
def being_made(monkeypatch: pytest.MonkeyPatch) -> tuple[StepContext, list[str]]:
    """A context with stand-ins for engine, builder and audit, which record the calls."""
    done: list[str] = []

    def note(name: str, value: Any) -> Any:
        def work(*_: Any, **__: Any) -> Any:
            done.append(name)
            return value

        return work

    monkeypatch.setattr(lock_image_lookup_and_recipe, "existing_image", note("built", None))
    monkeypatch.setattr(disk_space_needs, "require_disk_space", note("check_disk", None))
    monkeypatch.setattr(image_steps, "prepare_load", note("layers", StepResult(written().to_load)))
    monkeypatch.setattr(lock_image_lookup_and_recipe, "describe_lock", lambda *_: sample()[1])
    monkeypatch.setattr(image_steps, "load_layers", note("load", StepResult((image_of("loaded"), written()))))
    monkeypatch.setattr(
        image_collector,
        "collect_from_image",
        note(
            "collect",
            SimpleNamespace(
                libraries=(), extended={}, torch=None, installed={}, python=SimpleNamespace(version="3.11.9")
            ),
        ),
    )
    monkeypatch.setattr(environment_audit, "expected_contents", note("expected", Expected()))
    monkeypatch.setattr(build_downloads, "fetch_image_parts", note("fetch", None))
    monkeypatch.setattr(image_steps, "fetch_base", lambda context, plan, lock, **_: lock)
    engine = SimpleNamespace(tag=note("tag", None), remove=note("untag", None), version="26.1.5", builder=None)
    monkeypatch.setattr(StepContext, "engine", engine)
    return StepContext(cast(Any, MagicMock())), done


def judged_as(*findings: Finding) -> Any:
    return lambda target, held, wanted: Audit(target, wanted, held, findings)


def test_an_image_is_audited_before_it_gets_its_tag(
    being_made: tuple[StepContext, list[str]], monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    """The record comes last: once recorded, the image is not made again, and the tag of the unaudited image would
    stay."""
    context, done = being_made
    monkeypatch.setattr(environment_audit, "assess", judged_as(Finding("a", "warn", "m", "r")))
    monkeypatch.setattr(build_records, "write", lambda record: done.append("record"))
    plan = plan_of(project, PROFILE)
    lock_file.write(whole_lock(plan), SOURCE.known_lock, "sample")
    built = image_steps.find_or_build_image(context, Recipe(SOURCE, plan, whole_lock(plan)))
    assert built.image == image_of("loaded")
    (record,) = built.new_build_records
    assert (record.image, record.handle) == (written().id, image_of("loaded").handle)
    assert [name for name in done if name not in ("built", "expected")] == [
        "check_disk", "layers", "load", "collect", "tag", "untag", "record"
    ]  # fmt: skip
    assert [step.name for step in context.steps] == ["build", "load", "audit"]
    assert list(lock_paths_of_built_images.all_locks()) == [project / "profiles" / "sample.lock.yaml"], (
        "prune would not know it"
    )


def test_the_layers_of_a_base_image_count_for_the_disk_before_anything_is_downloaded(
    being_made: tuple[StepContext, list[str]], monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    context, done = being_made
    monkeypatch.setattr(environment_audit, "assess", judged_as())

    def count(engine: object, lock: Lock) -> None:
        done.append(str(disk_space_needs.fetched_bytes(lock)))

    monkeypatch.setattr(disk_space_needs, "require_disk_space", count)
    base = PushedBase([debian()], sizes=lambda size: 7_000_000_000)
    with serving(Registry()) as registry:
        plan = plan_of(project, {**PROFILE, "base": {"image": base.reference(registry)}, "apt": []})
        lock = whole_lock(plan)
        without_base = sum(wheel.bytes for wheel in lock.wheels)
        image_steps.find_or_build_image(context, Recipe(SOURCE, plan, lock))
        assert registry.sent == [(oci_types.digest_of(base.configuration), len(base.configuration))]
    assert done[:3] == ["built", str(without_base + 7_000_000_000), "layers"]


def test_without_the_cache_layers_are_written_again(
    being_made: tuple[StepContext, list[str]], monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    context, done = being_made
    asked: list[bool] = []

    def prepare(*_: Any, again: bool) -> StepResult[ImageToLoad]:
        asked.append(again)
        return StepResult(written().to_load)

    monkeypatch.setattr(image_steps, "prepare_load", prepare)
    monkeypatch.setattr(environment_audit, "assess", judged_as())
    plan = plan_of(project, PROFILE)
    recipe = Recipe(SOURCE, plan, whole_lock(plan))
    image_steps.find_or_build_image(context, recipe, no_cache=True)
    image_steps.find_or_build_image(context, recipe)
    assert asked == [True, False]
    assert done.count("built") == 1, "an existing image is not looked for"


def test_an_image_without_a_lock_file_is_not_noted(
    being_made: tuple[StepContext, list[str]], monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    """For example, a trial of pins before the first lock has no lock file."""
    context, _ = being_made
    monkeypatch.setattr(environment_audit, "assess", judged_as())
    plan = plan_of(project, PROFILE)
    image_steps.find_or_build_image(context, Recipe(SOURCE, plan, whole_lock(plan)))
    assert list(user_folders.cache_folder("built", make=False).glob("*")) == []


@pytest.mark.parametrize("stays", [None, "a container's", "recorded before"])
def test_a_discarded_image_leaves_no_record(
    being_made: tuple[StepContext, list[str]], monkeypatch: pytest.MonkeyPatch, project: Path, stays: str | None
) -> None:
    """The record stays if the image stays, or if the image was recorded before, for example by a different engine."""
    context, _ = being_made
    plan = plan_of(project, PROFILE)
    locked = whole_lock(plan)
    image = image_of("loaded")
    record = lock_image_lookup_and_recipe.written_record(locked, written(), image.handle, ())
    earlier = dataclasses.replace(record, image=image_of("earlier").id)
    monkeypatch.setattr(lock_image_lookup_and_recipe, "matches", lambda record, lock: record.lock == lock.id)
    build_records.write(earlier)
    if stays == "recorded before":
        build_records.write(dataclasses.replace(record, builder="another engine"))
    monkeypatch.setattr(environment_audit, "assess", judged_as())
    found = image if stays == "a container's" else None
    monkeypatch.setattr(StepContext.engine, "find", lambda handle: found, raising=False)
    built = image_steps.find_or_build_image(context, Recipe(SOURCE, plan, locked))
    image_steps.discard_build(context, MakeResult("sample", lock=locked, new_build_records=built.new_build_records))
    assert {one.image for one in build_records.all_records()} == {
        earlier.image,
        *([record.image] if stays else []),
    }


def test_layers_with_a_defect_do_not_become_an_image(
    being_made: tuple[StepContext, list[str]], monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    _, done = being_made
    monkeypatch.setattr(environment_audit, "assess", judged_as(Finding("two-copies", "defect", "m", "r")))
    loaded = profile_of(project, PROFILE)
    locked = lock_for(plan_of(project, PROFILE))
    lock_file.write(locked, loaded.lock_file, "sample")
    with pytest.raises(CheckFailed, match=f"envbuild/sample:{locked.short}-layers: 1 defect") as caught:
        make_build_and_test.build_only("sample", Options(locked=True), MagicMock())
    assert "tag" not in done and "untag" not in done, "it stays under the other tag, to be inspected"
    partial = caught.value.partial
    assert (partial["image"], partial["state"], partial["lock"]) == (None, "failed", locked.id)
    assert [step["name"] for step in partial["steps"]] == ["load profile", "resolve", "lock", "render", "build", "load"]


@pytest.mark.parametrize("left", [(), ("{}-layers",), ("loading-{}-layers",), ("loading-{}-layers", "{}-layers")])
def test_what_an_interrupted_load_or_audit_left_is_removed_with_the_next_build(
    being_made: tuple[StepContext, list[str]], monkeypatch: pytest.MonkeyPatch, project: Path, left: tuple[str, ...]
) -> None:
    """The image itself can be there, with a record of an earlier build of the same lock."""
    context, done = being_made
    loaded, plan, locked = profile_of(project, PROFILE), plan_of(project, PROFILE), lock_for(plan_of(project, PROFILE))
    image = image_of("built")
    tags = dict.fromkeys([locked.short, *(tag.format(locked.short) for tag in left)], image.handle)
    monkeypatch.setattr(lock_image_lookup_and_recipe, "existing_image", lambda *_: image)
    monkeypatch.setattr(StepContext.engine, "tags", lambda name: tags, raising=False)
    removed: list[str] = []
    monkeypatch.setattr(StepContext.engine, "remove", removed.append, raising=False)
    monkeypatch.setattr(docker_runner, "sweep_containers", lambda engine: removed.append("containers"))
    built = image_steps.find_or_build_image(context, Recipe(loaded, plan, locked))
    assert built.image == image and "tag" not in done
    wanted = [f"envbuild/sample:{tag.format(locked.short)}" for tag in left]
    assert removed == [*wanted, *(["containers"] if left else [])]


def test_the_tag_of_a_load_that_was_killed_is_removed_if_the_engine_has_the_image(
    monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    """The load was complete, but the image has no record yet, so that it is found by its layers."""
    loaded, plan, locked = profile_of(project, PROFILE), plan_of(project, PROFILE), lock_for(plan_of(project, PROFILE))
    calls: list[tuple[str, ...]] = []
    engine = SimpleNamespace(tag=lambda _, *names: calls.append(names), remove=lambda name: calls.append((name,)))
    monkeypatch.setattr(StepContext, "engine", engine)
    monkeypatch.setattr(disk_space_needs, "require_platform", lambda *_: None)
    monkeypatch.setattr(layer_steps, "_in_engine", lambda *_: (image_of("built"), written()))
    layer_steps.load_layers(StepContext(lambda _: None), Recipe(loaded, plan, locked), MagicMock())
    tag = f"{locked.short}-layers"
    assert calls == [("envbuild/sample", tag), (f"envbuild/sample:loading-{tag}",)]


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch, project: Path) -> SimpleNamespace:
    """An image whose self-test fails, in an engine. `tags`: the tags that the engine has, by name; `written`: what the
    step for the evidence does."""
    image = image_of("this")
    tags = {"verified": image.handle}
    engine = SimpleNamespace(tags=lambda _: tags, remove=lambda tag: tags.pop(tag.split(":")[1]))
    monkeypatch.setattr(StepContext, "engine", engine)
    loaded = profile_of(project, PROFILE)
    lock = lock_for(plan_of(project, PROFILE))
    lock_file.write(lock, loaded.lock_file, "sample")
    found = SimpleNamespace(
        image=image, tags=tags, lock=lock, written=lambda *_: StepResult(WrittenEvidence(Path("x"), ()))
    )
    found.run = passed_run(probe("env.libs", "failed"))
    monkeypatch.setattr(make_build_and_test, "_require_own_build", lambda *_: None)
    monkeypatch.setattr(make_build_and_test, "existing", lambda *_: (lock, image))
    monkeypatch.setattr(image_steps, "fetch_base", lambda context, plan, lock, **_: lock)
    built = BuiltImage(image, tags=(f"envbuild/sample:{lock.short}",))
    monkeypatch.setattr(make_build_and_test, "render_and_build", lambda *_: built)
    monkeypatch.setattr(make_build_and_test, "run_preflight", lambda *_: StepResult(SimpleNamespace(proof="possible")))
    monkeypatch.setattr(make_build_and_test, "select_runner", lambda *_: SimpleNamespace(image="x"))
    monkeypatch.setattr(make_build_and_test, "test_on_one_node", lambda *_: StepResult(found.run))
    monkeypatch.setattr(make_build_and_test, "write_evidence", lambda *_: found.written())
    return found


def failed_make(found: SimpleNamespace, **options: Any) -> dict[str, Any]:
    """The document of a `make` that failed."""
    with pytest.raises(EnvbuildError) as caught:
        make_build_and_test.make("sample", Options(**options), cast(Any, MagicMock()))
    return caught.value.partial


def failed_proof(found: SimpleNamespace) -> dict[str, Any]:
    """The document of a `test --record` that ends with an error."""
    with pytest.raises(EnvbuildError) as caught:
        make_build_and_test.prove("sample", None, cast(Any, MagicMock()))
    return caught.value.partial


@pytest.mark.parametrize(("tagged", "left"), [("this", []), ("another", ["verified"])])
def test_an_image_that_failed_its_latest_test_is_not_verified(
    tested: SimpleNamespace, tagged: str, left: list[str]
) -> None:
    tested.tags.update({"verified": image_of(tagged).handle, "0123": tested.image.handle})
    document = failed_proof(tested)
    assert [tag for tag in tested.tags if tag == "verified"] == left
    assert document["tags"] == ["envbuild/sample:0123"]
    assert document["statement"] == "x", "evidence of the failure is written first"


def test_an_image_of_which_no_probe_passed_is_not_verified(tested: SimpleNamespace) -> None:
    """Its evidence counts as a failure, too."""
    tested.run = passed_run(probe("env.libs", "skipped"))
    tested.tags["verified"] = tested.image.handle
    with pytest.raises(NotProved):
        make_build_and_test.prove("sample", None, cast(Any, MagicMock()))
    assert "verified" not in tested.tags


@pytest.mark.parametrize("failed", [failed_make, failed_proof])
def test_a_failed_self_test_leaves_a_document_of_all_that_is_known(tested: SimpleNamespace, failed: Any) -> None:
    document = failed(tested)
    assert (document["state"], document["profile"]) == ("failed", "sample")
    assert (document["lock"], document["image"]) == (tested.lock.id, tested.image.id)
    assert (document["selftest"]["failed"], document["statement"]) == (1, "x")
    assert [step["name"] for step in document["steps"]][-2:] == ["self-test", "evidence"]
    assert document["tags"] == ([f"envbuild/sample:{tested.lock.short}"] if failed is failed_make else [])
    assert not tested.tags


def test_a_failed_image_loses_its_tag_though_no_evidence_can_be_written(tested: SimpleNamespace) -> None:
    tested.written = MagicMock(side_effect=DiskError("full"))
    document = failed_proof(tested)
    assert not tested.tags and not document["tags"]
    assert (document["selftest"]["failed"], document["statement"]) == (1, None)


def test_tags_of_a_trial_stay(tested: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary pins do not change what the tag names."""
    monkeypatch.setattr(make_build_and_test, "lock_profile", lambda *_: StepResult(tested.lock))
    document = failed_make(tested, pins={"numpy": "2.0.2"})
    assert list(tested.tags) == ["verified"]
    assert (document["state"], document["statement"]) == ("failed", "x")


# the commands, with a pipeline that ends immediately


def test_make_says_what_was_not_proved(tested: SimpleNamespace) -> None:
    tested.run = skipped("gemm.crash")
    done = envbuild("make", "sample")
    assert (done.code, done.stdout) == (4, "")
    assert "sample is built, and not proved: a required probe was skipped" in done.stderr
    assert "hint: gemm.crash: needs a GPU" in done.stderr
    done = envbuild("make", "sample", "--json")
    assert (done.code, done.document["state"], done.document["error"]["kind"]) == (4, "built", "not-proved")
    assert done.document["reasons"] == [{"id": "skipped", "detail": "gemm.crash: needs a GPU"}]


def test_make_may_be_allowed_not_to_prove(tested: SimpleNamespace) -> None:
    tested.run, tested.tags["0123"] = skipped("gemm.crash"), tested.image.handle
    done = envbuild("make", "sample", "--allow-unproved", "--json")
    assert (done.code, done.document["state"]) == (0, "built")
    assert done.document["reasons"] == [{"id": "skipped", "detail": "gemm.crash: needs a GPU"}]
    assert "error" not in done.document
    done = envbuild("make", "sample", "--allow-unproved")
    assert (done.code, done.stdout) == (0, f"built {tested.image.id}\n")
    assert "sample is built, but not proved: gemm.crash: needs a GPU" in done.stderr


@pytest.mark.parametrize("allowed", [False, True])
def test_missing_evidence_on_a_gpu_model_is_a_reason(tested: SimpleNamespace, allowed: bool) -> None:
    tested.run = passed_run()
    proofs = Proof("cpu", "proved", None, "proved"), Proof("h20", "missing", None, "unverified")
    tested.written = lambda *_: StepResult(WrittenEvidence(Path("x"), proofs))
    done = envbuild("make", "sample", "--json", *(["--allow-unproved"] if allowed else []))
    assert (done.code, done.document["state"]) == (0 if allowed else 4, "unverified")
    assert done.document["reasons"] == [{"id": "evidence", "detail": "h20: unverified"}]
    assert "tag" not in [step["name"] for step in done.document["steps"]]


def test_an_image_that_cannot_be_tested_here_is_reported_with_its_steps(
    tested: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = (Reason("no-gpu", "the engine has no GPU"),)
    report = SimpleNamespace(proof="impossible", reasons=reasons)
    monkeypatch.setattr(make_build_and_test, "run_preflight", lambda *_: StepResult(report))
    made = make_build_and_test.make("sample", Options(unproved=True), cast(Any, MagicMock()))
    assert made.reasons == reasons and made.run is None
    assert [step.name for step in made.steps] == ["load profile", "resolve", "preflight", "lock"]
    assert list(tested.tags) == ["verified"], "no tag is set or removed"


def test_make_reports_why_nothing_could_be_tested_here(monkeypatch: pytest.MonkeyPatch) -> None:
    built = dataclasses.replace(made(None), reasons=(Reason("no-gpu", "the engine has no GPU"),))
    monkeypatch.setattr(make_build_and_test, "make", lambda *_: built)
    done = envbuild("make", "sample", "--allow-unproved", "--json")
    assert done.document["reasons"] == [{"id": "no-gpu", "detail": "the engine has no GPU"}]
    done = envbuild("make", "sample", "--allow-unproved")
    assert (done.code, done.stdout.split()[0]) == (0, "built")
    assert "sample is built, but not proved: the engine has no GPU" in done.stderr


@pytest.mark.parametrize(("verb", "does"), [("make", "make"), ("build", "build_only")])
def test_a_projects_requirements_are_taken(monkeypatch: pytest.MonkeyPatch, verb: str, does: str) -> None:
    given: list[Options] = []

    def note(name: str, options: Options, *_: object) -> MakeResult:
        given.append(options)
        return made(None)

    monkeypatch.setattr(make_build_and_test, does, note)
    assert envbuild(verb, "sample", "--requirements", "requirements.txt").code == 0
    assert [options.requirements for options in given] == [Path("requirements.txt")]


@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_test_reports_every_probe(monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    run = passed_run(probe("env.libs"), probe("gemm.crash", outcome))
    result, document = reported(monkeypatch, run)
    assert result.code == (0 if outcome == "passed" else 5)
    assert [(item["name"], item["state"]) for item in document["probes"]] == [
        ("env.libs", "passed"), ("gemm.crash", outcome),
    ]  # fmt: skip
    assert ("error" in document) is (outcome == "failed")


def test_test_reports_a_required_probe_that_was_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    result, document = reported(monkeypatch, skipped("gemm.crash"))
    assert (result.code, document["error"]["kind"], document["selftest"]["skipped"]) == (4, "not-proved", 1)
    assert [item["state"] for item in document["probes"]] == ["passed", "skipped"]


def test_requested_options_reach_the_pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests: list[selftest_job.RunRequest] = []

    def test(
        name: str, reference: str | None, listener: Listener, wanted: selftest_job.RunRequest, on: RunnerOptions
    ) -> MakeResult:
        requests.append(wanted)
        return made(passed_run())

    monkeypatch.setattr(make_build_and_test, "test", test)
    arguments = ["--level", "full", "--probe", "gemm.crash", "--probe", "env.libs"]
    assert envbuild("test", "sample", *arguments, "--junit", str(tmp_path / "junit.xml")).code == 0
    assert requests == [selftest_job.RunRequest("full", ("gemm.crash", "env.libs"))]
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert [case.attrib["name"] for case in suite.iter("testcase")] == list(NAMES)
    assert image_of().id in {item.attrib["value"] for item in suite.iter("property")}


def test_a_failed_test_is_reported_for_ci_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(make_build_and_test, "test", lambda *_: made(passed_run(probe("env.libs", "failed"))))
    assert envbuild("test", "sample", "--junit", str(tmp_path / "junit.xml")).code == 5
    assert "<failure" in (tmp_path / "junit.xml").read_text(encoding="utf-8")
    assert envbuild("test", "sample", "--junit", str(tmp_path / "junit.xml" / "x")).code == 6


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space left")


@pytest.mark.parametrize("arguments", [["test", "sample", "--junit"], ["export", "selftest", "-o"]])
def test_a_file_that_cannot_be_written_whole_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    monkeypatch.setattr(make_build_and_test, "test", lambda *_: made(passed_run()))
    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "file").write_text("old", encoding="utf-8")
    assert envbuild(*arguments, str(tmp_path / "file")).code == 6
    assert [(file.name, file.read_text(encoding="utf-8")) for file in tmp_path.iterdir()] == [("file", "old")]


def test_a_fingerprint_is_kept_of_a_failed_run_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "new" / "card.json"
    requests: list[selftest_job.RunRequest] = []

    def test(
        name: str, reference: str | None, listener: Listener, wanted: selftest_job.RunRequest, on: RunnerOptions
    ) -> MakeResult:
        requests.append(wanted)
        return made(dataclasses.replace(passed_run(probe("fingerprint", "failed")), fingerprint=fingerprints.load()))

    monkeypatch.setattr(make_build_and_test, "test", test)
    assert envbuild("test", "sample", "--fingerprint", str(file)).code == 5
    assert requests == [selftest_job.RunRequest(None, (), fingerprint=True)]
    assert file.read_bytes() == fingerprints.NEW.read_bytes()


@pytest.mark.parametrize(
    ("status", "sent", "code"), [("passed", {}, 5), ("passed", {"version": 1}, 5), ("skipped", {}, 4)]
)
def test_no_fingerprint_is_made_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str, sent: dict[str, int], code: int
) -> None:
    run = dataclasses.replace(passed_run(probe("fingerprint", status)), fingerprint=sent)
    monkeypatch.setattr(make_build_and_test, "test", lambda *_: made(run))
    done = envbuild("test", "sample", "--fingerprint", str(tmp_path / "card.json"), "--json")
    assert (done.code, list(tmp_path.iterdir())) == (code, [])
    assert done.document["probes"][0]["state"] == status


def test_the_probes_are_listed_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")
    result = envbuild("test", "--list")
    assert result.code == 0
    assert [row.split()[0] for row in result.stdout.splitlines()] == list(probe_catalogue_reader.known_probes())
    assert [row["name"] for row in envbuild("test", "--list", "--json").document["probes"]] == list(
        probe_catalogue_reader.known_probes()
    )


def reported(monkeypatch: pytest.MonkeyPatch, run: run_result.TestRun) -> tuple[CommandResult, dict[str, Any]]:
    """Return the output of `test`, and the document of `test --json`. The text has one line per probe."""
    monkeypatch.setattr(make_build_and_test, "test", lambda *_: made(run))
    plain = envbuild("test", "sample")
    assert len(plain.stdout.splitlines()) == len(run.results)
    result = envbuild("test", "sample", "--json")
    assert result.code == plain.code
    return result, result.document


UUID = "GPU-8f9a1c1e-4f0b-4c55-9d5e-0c1b2a3d4e5f"


@pytest.mark.parametrize(("words", "called"), [(["test"], "test"), (["test", "--record"], "prove"), (["make"], "make")])
@pytest.mark.parametrize(
    ("option", "gpus"),
    [
        ([], ()),
        (["--gpus", "1,2,3"], ("1", "2", "3")),
        (["--gpus", f"0, {UUID}"], ("0", UUID)),
        (["--gpus", f"MIG-{UUID}/1/0"], (f"MIG-{UUID}/1/0",)),
    ],
)
def test_the_gpus_that_are_named_reach_the_pipeline(
    monkeypatch: pytest.MonkeyPatch, words: list[str], called: str, option: list[str], gpus: tuple[str, ...]
) -> None:
    given: list[Any] = []

    def done(*arguments: Any) -> MakeResult:
        given.extend(arguments)
        return made(passed_run())

    monkeypatch.setattr(make_build_and_test, called, done)
    assert envbuild(*words, "sample", *option).code == 0
    assert {"make": lambda: given[1].request.gpus, "test": lambda: given[3].gpus, "prove": lambda: given[3]}[
        called
    ]() == gpus


@pytest.mark.parametrize("text", ["x", "0;1", "0,", ",", "1,1", "-1", "0 1", "GPU-1", "all", "$(id)", "99999"])
def test_an_unknown_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(make_build_and_test, "test", lambda *_: made(passed_run()))
    result = envbuild("test", "sample", f"--gpus={text}")
    assert result.code == 2 and "gpus" in result.stderr


@pytest.mark.parametrize("what", ["image", "builder"])
def test_a_file_of_two_profiles_is_downloaded_by_one_process_at_a_time(
    what: str, monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    """The tools that compile an extension are downloaded in this way too."""
    held: list[bool] = []

    def fetch(*_: Any) -> None:
        held.append(is_locked(user_folders.cache_folder("locks") / "_fetch.lock"))

    monkeypatch.setattr(wheel_resolution_and_download, "fetch_wheels", fetch)
    plan = MagicMock()
    plan.archives, plan.extension_toolchain.wanted = (), [MagicMock()]
    plan.extension_toolchain.wanted[0].extension.name = "apex"
    monkeypatch.setattr(extension_source_fetcher, "fetch_source", fetch)
    monkeypatch.setattr(archive_fetcher, "fetch_archives", fetch)
    locked, one = MagicMock(suite=None), MagicMock()
    one.name = "apex"
    if what == "image":
        build_downloads.fetch_image_parts(plan, locked, MagicMock())
    else:
        build_downloads.fetch_compiler_and_sources(plan, locked, one, MagicMock())
    assert held and all(held)


def test_a_builder_that_is_not_there_ends_what_has_nothing_to_build_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str | None] = []

    def refuse(engine: Any) -> None:
        calls.append(engine.builder)
        raise EngineError("unknown builder 'nope'")

    engine = "envbuild.pipeline.step_context.Engine"
    monkeypatch.setattr(engine, lambda builder: SimpleNamespace(builder=builder, require_bounds=list))
    monkeypatch.setattr(buildx, "require_builder", refuse)
    context = StepContext(cast(Listener, MagicMock()), "nope")
    for _ in range(2):  # the second time, it does not count as found either
        with pytest.raises(EngineError, match="unknown builder 'nope'"):
            _ = context.engine
    assert calls == ["nope", "nope"]
