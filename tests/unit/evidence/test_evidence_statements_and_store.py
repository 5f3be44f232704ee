from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envbuild.evidence import evidence_statements_and_store, proof_rules
from envbuild.evidence.proof_rules import EvidenceRequirements
from envbuild.evidence.run_record_schema import RunRecord, validate_record
from envbuild.facts import probe_catalogue_reader
from envbuild.lock.lock_file import Lock
from envbuild.testrun import run_result
from envbuild.testrun.run_result import RunLocation
from envbuild.testrun.selftest_job import selftest_id
from envbuild.util import user_folders
from envbuild.util.errors import CheckFailed
from unit.evidence.runs import documents, judged, lines, passed_run, probe, run_on
from unit.support import PROFILE, image_of, lock_for, plan_of, sha

IMAGE = image_of()
DAY = datetime.datetime(2026, 11, 21, 12, 0, 0, tzinfo=datetime.UTC)


@pytest.fixture
def locked(project: Path) -> Lock:
    return lock_for(plan_of(project, PROFILE))


def document_of(locked: Lock, run: run_result.TestRun | None = None, day: int = 0, **changes: Any) -> dict[str, Any]:
    finished = DAY + datetime.timedelta(days=day)
    made = json.loads(
        evidence_statements_and_store.run_record(
            IMAGE, required(locked), run or passed_run(), "docker 26.1.5", finished
        ).encoded
    )
    return {**made, **changes, "selftest": {**made["selftest"], **changes.get("selftest", {})}}


def record_of(locked: Lock, run: run_result.TestRun | None = None, day: int = 0, **changes: Any) -> RunRecord:
    return validate_record(document_of(locked, run, day, **changes))


def stated(record: RunRecord) -> Any:
    """Return, as JSON, the statement about a record with the digest d..."""
    return evidence_statements_and_store.test_statement(record, "d" * 64).document()


def older(**versions: int | None) -> dict[str, Any]:
    """Return the versions of a different self-test, with some changed; None: that self-test did not have the probe."""
    had = {**probe_catalogue_reader.versions(), **versions}
    kept = {name: version for name, version in had.items() if version is not None}
    return {"id": f"sha256:{'0' * 64}", "level": "full", "versions": kept}


def required(locked: Lock, require: tuple[str, ...] = ("env.libs",), **settings: bool) -> EvidenceRequirements:
    return EvidenceRequirements("sample", locked.id, "standard", require, {"allow_tf32": False, **settings})


def wanted(locked: Lock, level: str = "standard", require: tuple[str, ...] = ("env.libs",)) -> EvidenceRequirements:
    return dataclasses.replace(required(locked, require), level=level)


def state(locked: Lock, **changes: Any) -> tuple[str, str]:
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, wanted(locked, **changes))
    return proof.state, proof.reason


def failed_run() -> run_result.TestRun:
    return passed_run(probe("env.libs"), probe("gemm.crash", "failed"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h220", "unverified; unknown GPU h220: did you mean h20?"),
        ("h20", "unverified"),
        ("cpu", "unverified"),
        ("NVIDIA Prototype 7", "unverified"),
    ],
)
def test_a_misspelt_gpu_is_questioned(name: str, expected: str) -> None:
    assert proof_rules.untested(name).reason == expected


def test_the_record_says_what_machine_it_was_where_that_is_known(locked: Lock) -> None:
    machine = {"cpu": "a processor", "cores": 4, "memory": 1, "system": "Linux", "python": "3.11"}
    made = evidence_statements_and_store.run_record(IMAGE, required(locked), passed_run(), "docker", DAY, machine)
    assert json.loads(made.encoded)["machine"] == machine
    assert document_of(locked)["machine"] is None


PLACE: dict[str, Any] = {
    "runner": "kubernetes",
    "engine": "containerd",
    "job": "team/job-1",
    "node": "gpu-7.internal",
    "restarts": 0,
    "image": f"registry.internal/x@sha256:{'1' * 64}",
    "unconfined": ("the network is open",),
}


def test_where_it_ran_is_kept_here_and_names_no_machine_in_what_is_published(locked: Lock) -> None:
    made = evidence_statements_and_store.run_record(
        IMAGE, required(locked), dataclasses.replace(passed_run(), where=RunLocation(**PLACE)), "containerd", DAY
    )
    published = {key: PLACE[key] for key in ("runner", "engine")}
    assert json.loads(made.encoded)["where"] == {**published, "unconfined": ["the network is open"]}
    path = evidence_statements_and_store.save(made, RunLocation(**PLACE))
    assert b"internal" not in evidence_statements_and_store.record_text(path) + path.read_bytes()
    place_file = path.with_name(path.name.replace(".statement.", ".where."))
    assert json.loads(place_file.read_text(encoding="utf-8")) == {**PLACE, "unconfined": ["the network is open"]}
    assert state(locked)[0] == "proved"


@pytest.mark.parametrize(
    ("where", "lacks"),
    [
        ({**PLACE, "unconfined": ["the network is open"]}, ("the network is open",)),
        ({"runner": "slurm", "unconfined": []}, ()),
        ({}, ()),
        (None, ()),
    ],
)
def test_a_proof_says_what_its_container_lacked(locked: Lock, where: Any, lacks: tuple[str, ...]) -> None:
    evidence_statements_and_store.save(record_of(locked, where=where))
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, wanted(locked))
    assert (proof.state, proof.unconfined) == ("proved", lacks)
    assert ("less confined than in Docker: the network is open" in proof.reason) == bool(lacks)


@pytest.mark.parametrize("lacks", ["x", [1], ["x" * 201], ["x"] * 21, None])
def test_missing_isolation_has_the_right_form(locked: Lock, lacks: Any) -> None:
    fitting({**document_of(locked), "where": {"unconfined": lacks}}, record_of(locked))
    assert state(locked)[0] == "missing"


# the statement


def test_script_output_is_not_published(locked: Lock) -> None:
    run = passed_run(probe("own.script", output="a secret"))
    assert run.results[0].output == "a secret"
    assert "a secret" not in record_of(locked, run).encoded


def test_the_statement_is_in_totos_with_a_test_result(locked: Lock) -> None:
    record = record_of(
        locked, passed_run(probe("env.libs"), probe("gemm.crash", "failed"), probe("train.step", "skipped"))
    )
    found = stated(record)
    assert set(found) == {"_type", "subject", "predicateType", "predicate"}
    assert found["_type"] == "https://in-toto.io/Statement/v1"
    assert found["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert found["subject"] == [{"name": "envbuild/sample", "digest": {"sha256": IMAGE.id.removeprefix("sha256:")}}]
    predicate = found["predicate"]
    # test-result v0.1: the first two are required, the others may be there
    assert {"result", "configuration"} <= set(predicate) <= {
        "result", "configuration", "url", "passedTests", "warnedTests", "failedTests"
    }  # fmt: skip
    assert predicate["result"] == "FAILED"
    assert predicate["passedTests"] == ["cpu/env.libs"]
    assert predicate["failedTests"] == ["cpu/gemm.crash"]
    # a resource descriptor has one of uri, digest or content
    for descriptor in predicate["configuration"]:
        assert set(descriptor) <= {"name", "uri", "digest", "content", "downloadLocation", "mediaType", "annotations"}
        assert len(descriptor["digest"]["sha256"]) == 64
    digests = {item["name"]: item["digest"]["sha256"] for item in predicate["configuration"]}
    assert digests == {"lock": locked.id[7:], "selftest": selftest_id()[7:], "run-record": "d" * 64}


def test_a_run_that_passed_is_reported_as_passed(locked: Lock) -> None:
    predicate = stated(record_of(locked))["predicate"]
    assert (predicate["result"], predicate["failedTests"]) == ("PASSED", [])
    assert len(predicate["passedTests"]) == 3


def test_nothing_passes_in_a_run_with_a_fault(locked: Lock) -> None:
    run = judged(lines(documents())[:-1])
    predicate = stated(record_of(locked, run))["predicate"]
    assert (predicate["result"], predicate["passedTests"]) == ("FAILED", [])


def test_a_run_in_which_nothing_passed_did_not_pass(locked: Lock) -> None:
    run = passed_run(probe("env.libs", "skipped"))
    assert stated(record_of(locked, run))["predicate"]["result"] == "FAILED"


def test_a_run_in_which_nothing_passed_proves_nothing(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, passed_run(probe("env.libs", "skipped"))))
    assert state(locked, require=()) == ("stale", "the self-test failed: no probe passed")
    assert not evidence_statements_and_store.ever_proved(IMAGE.id, "sample", {locked.id})


def test_a_run_without_a_required_probe_is_a_warning(locked: Lock) -> None:
    """Such a run is neither a failure nor valid evidence."""
    record = record_of(locked, passed_run(probe("gemm.crash"), probe("env.libs", "skipped")))
    assert stated(record)["predicate"]["result"] == "WARNED"
    evidence_statements_and_store.save(record)
    assert state(locked) == ("stale", "required probes did not run: env.libs")
    assert state(locked, require=())[0] == "proved"
    assert not evidence_statements_and_store.ever_proved(IMAGE.id, "sample", {locked.id})


# evidence on disk


def test_a_proof_is_found_again(locked: Lock) -> None:
    path = evidence_statements_and_store.save(record_of(locked))
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, wanted(locked))
    assert (proof.model, proof.state, proof.evidence) == ("cpu", "proved", path)
    assert proof.reason == "proved on the CPU, 2026-11-21"
    assert sorted(file.name.partition(".")[2] for file in path.parent.iterdir()) == ["record.json", "statement.json"]
    assert path.parent == user_folders.state_folder("evidence") / IMAGE.id.removeprefix("sha256:")


def test_the_run_is_found_again(locked: Lock) -> None:
    path = evidence_statements_and_store.save(record_of(locked))
    run = evidence_statements_and_store.run_of(path, IMAGE.id)
    assert run.passed
    assert run.by_status("passed") == ["env.libs", "gemm.crash", "train.step"]
    with pytest.raises(FileNotFoundError):
        evidence_statements_and_store.run_of(path, image_of("other").id)


def test_without_evidence_nothing_is_proved(locked: Lock) -> None:
    assert state(locked) == ("missing", "unverified")


def test_evidence_is_of_one_image(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked))
    (proof,) = evidence_statements_and_store.newest_proofs(image_of("other").id, wanted(locked))
    assert proof.state == "missing"


def test_evidence_moved_to_another_image_is_not_counted(locked: Lock) -> None:
    path = evidence_statements_and_store.save(record_of(locked))
    other = image_of("other").id
    path.parent.rename(path.parent.with_name(other.removeprefix("sha256:")))
    (proof,) = evidence_statements_and_store.newest_proofs(other, wanted(locked))
    assert proof.state == "missing"


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("kind", ["record", "statement"])
def test_a_changed_byte_is_not_counted(locked: Lock, kind: str) -> None:
    path = evidence_statements_and_store.save(record_of(locked))
    file = path if kind == "statement" else path.with_name(path.name.replace("statement", "record"))
    whole = file.read_bytes()
    for at in [index for index in range(0, len(whole), 53) if not whole[index : index + 1].isspace()]:
        flip(file, at)
        assert state(locked)[0] == "missing", at
        file.write_bytes(whole)
    assert state(locked)[0] == "proved"


def spoil(change: Callable[[Path, Path], object]) -> Callable[[Lock], None]:
    def on(locked: Lock) -> None:
        path = evidence_statements_and_store.save(record_of(locked))
        change(path, path.with_name(path.name.replace("statement", "record")))

    return on


@pytest.mark.parametrize(
    "change",
    [
        lambda statement, record: record.unlink(),
        lambda statement, record: statement.unlink(),
        lambda statement, record: record.write_bytes(b""),
        lambda statement, record: record.write_bytes(b"\xff"),
        lambda statement, record: record.write_text("[]", encoding="utf-8"),
        lambda statement, record: statement.write_text("[]", encoding="utf-8"),
        lambda statement, record: statement.write_text(statement.read_text(encoding="utf-8")[:-2], encoding="utf-8"),
        lambda statement, record: record.write_text(record.read_text(encoding="utf-8") + "\n", encoding="utf-8"),
        lambda statement, record: statement.rename(statement.with_name("0" * 64 + ".statement.json")),
        lambda statement, record: (record.unlink(), record.mkdir()),
    ],
)
def test_damaged_evidence_is_not_counted(locked: Lock, change: Callable[[Path, Path], object]) -> None:
    spoil(change)(locked)
    assert state(locked)[0] == "missing"


def test_damaged_evidence_hides_no_other(locked: Lock) -> None:
    first = evidence_statements_and_store.save(record_of(locked))
    second = evidence_statements_and_store.save(record_of(locked, day=1))
    second.write_text("{", encoding="utf-8")
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, wanted(locked))
    assert (proof.state, proof.evidence) == ("proved", first)


def fitting(record: object, meant: RunRecord | None = None) -> None:
    """Store a record with arbitrary content, and a statement about it. The record and the statement match, as if an
    older envbuild or another user with write access had written them."""
    text = json.dumps(record, indent=1, sort_keys=True)
    digest = sha(text)
    folder = user_folders.state_folder("evidence") / IMAGE.id.removeprefix("sha256:")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{digest}.record.json").write_text(text, encoding="utf-8")
    made = evidence_statements_and_store.test_statement(meant, digest).document() if meant else {}
    (folder / f"{digest}.statement.json").write_text(json.dumps(made), encoding="utf-8")


@pytest.mark.parametrize("record", [{}, [], 5, "x", None, {"results": 1}, {"image": {"id": "x"}}])
def test_an_invalid_record_is_not_counted(locked: Lock, record: object) -> None:
    fitting(record)
    assert state(locked)[0] == "missing"


SELFTEST: dict[str, Any] = {"id": selftest_id(), "level": "full", "require": [], "settings": {"allow_tf32": False}}


@pytest.mark.parametrize(
    "change",
    [
        {"finished": None},
        {"selftest": {**SELFTEST, "level": "turbo"}},
        {"selftest": {key: value for key, value in SELFTEST.items() if key != "level"}},
        {"selftest": {**SELFTEST, "require": "env.libs"}},
        {"selftest": {**SELFTEST, "settings": {"allow_tf32": 0}}},
        {"selftest": {**SELFTEST, "own": {"script": 5}}},
        {"before": None},
        {"profile": 5},
        {"seconds": None},
        {"version": 0},
        {"version": "2"},
        {"finished": "2026-11-30T12:00:00+01:00"},
        {"results": [{"probe": "env.libs"}]},
        {"results": [{"probe": "env.libs", "status": "PASSED"}]},
        {"errors": None},
        {"lock": None},
        {"image": {"id": 5}},
        {"image": {"id": {"a": "b"}}},
    ],
)
def test_a_record_of_another_shape_is_not_counted(locked: Lock, change: dict[str, Any]) -> None:
    evidence_statements_and_store.save(record_of(locked, day=3))
    fitting({**document_of(locked, day=9), **change}, record_of(locked, day=9))
    assert state(locked)[0] == "proved"


# valid evidence


def test_a_failed_run_never_proves(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, failed_run()))
    assert state(locked) == ("stale", "the self-test failed: gemm.crash")


def test_a_run_with_a_fault_never_proves(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, judged(lines(documents()), exit_code=139)))
    found, reason = state(locked)
    assert found == "stale"
    assert "exit code 139" in reason


def test_another_lock_is_stale(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked))
    other = dataclasses.replace(locked, environment={"A": "1"})
    assert state(other) == ("stale", "proved for another lock")


def test_an_older_selftest_is_stale(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, selftest=older(harness=None)))
    assert state(locked) == ("stale", "proved by a different version of the self-test")


def test_a_selftest_with_the_same_versions_counts(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, selftest=older()))
    assert state(locked, level="full")[0] == "proved"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"harness": 0}, "proved by a different version of the self-test"),
        ({"harness": None}, "proved by a different version of the self-test"),
        ({"harness": 999}, "proved by a different version of the self-test"),
        ({"conv": 999}, "proved by a different version of the self-test (changed probes: conv)"),
        (
            {"gemm.crash": 0, "conv": None},
            "proved by a different version of the self-test (changed probes: gemm.crash, conv)",
        ),
    ],
)
def test_a_selftest_with_other_versions_is_stale(locked: Lock, changed: dict[str, int | None], reason: str) -> None:
    evidence_statements_and_store.save(record_of(locked, selftest=older(**changed)))
    assert state(locked, level="standard") == ("stale", reason)


def test_only_the_versions_of_what_is_wanted_matter(locked: Lock) -> None:
    """The probe conv is part of level standard and above."""
    evidence_statements_and_store.save(record_of(locked, selftest=older(conv=0)))
    assert state(locked, level="quick")[0] == "proved"
    evidence_statements_and_store.save(record_of(locked, selftest=older(conv=0)))
    reason = "proved by a different version of the self-test (changed probes: conv)"
    assert state(locked, level="quick", require=("conv",))[1] == reason


@pytest.mark.parametrize("version", [1, None])
def test_a_required_probe_that_this_selftest_lacks_proves_nothing(locked: Lock, version: int | None) -> None:
    evidence_statements_and_store.save(record_of(locked, selftest=older(**{"new.probe": version})))
    reason = "proved by a different version of the self-test (changed probes: new.probe)"
    assert state(locked, level="quick", require=("new.probe",)) == ("stale", reason)


@pytest.mark.parametrize(
    ("level", "required", "expected"),
    [
        (has, wants, i >= j)
        for i, has in enumerate(("quick", "standard", "full"))
        for j, wants in enumerate(("quick", "standard", "full"))
    ],
)
def test_a_lower_level_is_stale(locked: Lock, level: str, required: str, expected: bool) -> None:
    evidence_statements_and_store.save(record_of(locked, selftest={"id": selftest_id(), "level": level}))
    assert (state(locked, level=required)[0] == "proved") is expected


@pytest.mark.parametrize("names", [("attention.math",), ("env.libs", "attention.math")])
def test_a_required_probe_that_is_missing_is_stale(locked: Lock, names: tuple[str, ...]) -> None:
    evidence_statements_and_store.save(record_of(locked))
    assert state(locked, require=names) == ("stale", "required probes did not run: attention.math")


def test_a_required_probe_that_was_skipped_is_stale(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, passed_run(probe("gemm.crash"), probe("env.libs", "skipped"))))
    assert state(locked)[0] == "stale"


def test_the_newest_that_counts_is_taken(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, day=1))
    newest = evidence_statements_and_store.save(record_of(locked, day=2))
    evidence_statements_and_store.save(record_of(locked, day=0))
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, wanted(locked))
    assert proof.evidence == newest


def test_the_newest_reason_is_given_where_none_counts(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, failed_run(), day=0))
    evidence_statements_and_store.save(record_of(locked, selftest=older(harness=None), day=1))
    assert state(locked) == ("stale", "proved by a different version of the self-test")


def test_a_later_failure_takes_an_earlier_proof_away(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, day=0))
    evidence_statements_and_store.save(record_of(locked, failed_run(), day=1))
    assert state(locked) == ("stale", "the self-test failed since: gemm.crash")


@pytest.mark.parametrize("run", ["failed", "skipped"])
def test_a_pass_before_a_failure_does_not_count_after_a_stale_run_either(locked: Lock, run: str) -> None:
    evidence_statements_and_store.save(record_of(locked, day=0))
    evidence_statements_and_store.save(record_of(locked, passed_run(probe("env.libs", run)), day=1))
    evidence_statements_and_store.save(record_of(locked, selftest=older(harness=None), day=2))
    expected = {"failed": "env.libs, no probe passed", "skipped": "no probe passed"}[run]
    assert state(locked) == ("stale", f"the self-test failed since: {expected}")
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, wanted(locked))
    assert proof.failed
    assert evidence_statements_and_store.ever_proved(IMAGE.id, "sample", {locked.id})


@pytest.mark.parametrize("days", [(0, 1), (1, 0), (0, 0)])
def test_no_clock_decides_whether_a_failure_came_later(locked: Lock, days: tuple[int, int]) -> None:
    evidence_statements_and_store.save(record_of(locked, day=days[0]))
    evidence_statements_and_store.save(record_of(locked, failed_run(), day=days[1]))
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, wanted(locked))
    assert (proof.state, proof.failed) == ("stale", True)


@pytest.mark.parametrize("day", [-1, -2])
def test_no_clock_decides_whether_a_pass_came_later(locked: Lock, day: int) -> None:
    evidence_statements_and_store.save(record_of(locked, day=0))
    evidence_statements_and_store.save(record_of(locked, failed_run(), day=-1))
    evidence_statements_and_store.save(record_of(locked, day=day))
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, wanted(locked))
    assert (proof.state, proof.failed) == ("proved", False)


def test_whether_an_image_was_ever_proved_is_asked_of_whole_evidence_alone(locked: Lock) -> None:
    def ever(name: str = "sample", lock: str = locked.id) -> bool:
        return evidence_statements_and_store.ever_proved(IMAGE.id, name, {lock})

    assert not ever()
    evidence_statements_and_store.save(record_of(locked, failed_run()))
    assert not ever()
    path = evidence_statements_and_store.save(
        record_of(locked, day=1, selftest={**older(harness=None), "level": "quick"})
    )
    assert ever()
    assert not ever(name="other")
    assert not ever(lock=f"sha256:{'0' * 64}")
    path.write_text("{", encoding="utf-8")
    assert not ever()


def test_a_failure_under_another_profile_counts_against_the_image_too(locked: Lock) -> None:
    """A failed probe counts for every profile. A fault of the run, such as too little memory, counts only for the
    profile that caused it."""
    other = {"profile": "other"}
    evidence_statements_and_store.save(record_of(locked))
    evidence_statements_and_store.save(record_of(locked, judged(lines(documents())[:-1]), day=1, **other))
    evidence_statements_and_store.save(record_of(locked, passed_run(probe("env.libs", "skipped")), day=1, **other))
    assert state(locked)[0] == "proved"
    evidence_statements_and_store.save(record_of(locked, failed_run(), day=1, **other))
    assert state(locked) == ("stale", "the self-test failed since: gemm.crash")


# evidence of two profiles with one image: `sample` has no script, `child` adds one

CHILD: dict[str, Any] = {"profile": "child", "selftest": {"own": {"script": "1" * 64}}}


def of_child(locked: Lock, script: str = "1" * 64) -> tuple[str, str, bool]:
    required = wanted(locked, require=("env.libs", "own.script"))
    required = dataclasses.replace(required, profile="child", own={"script": script})
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, required)
    return proof.state, proof.reason, proof.failed


def script_run(script: str = "failed", crash: str = "passed") -> run_result.TestRun:
    return passed_run(probe("env.libs"), probe("gemm.crash", crash), probe("own.script", script))


def test_a_script_that_a_profile_does_not_run_says_nothing_of_it(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, script_run(), **CHILD))
    assert state(locked) == ("missing", "unverified")
    evidence_statements_and_store.save(record_of(locked, day=1))
    evidence_statements_and_store.save(record_of(locked, script_run(), day=2, **CHILD))
    assert state(locked) == ("proved", "proved on the CPU, 2026-11-22")
    assert of_child(locked) == ("stale", "the self-test failed: own.script", True)


def test_a_failed_script_of_both_counts_against_both(locked: Lock) -> None:
    other = {**CHILD, "profile": "other"}
    evidence_statements_and_store.save(record_of(locked, script_run("passed"), **CHILD))
    assert of_child(locked)[0] == "proved"
    evidence_statements_and_store.save(record_of(locked, script_run(), day=1, **other))
    assert of_child(locked) == ("stale", "the self-test failed since: own.script", True)
    assert of_child(locked, "2" * 64)[1:] == ("proved with another script", False)


@pytest.mark.parametrize("script", ["failed", "passed"])
def test_a_failed_probe_of_both_counts_against_both_with_any_other_failures(locked: Lock, script: str) -> None:
    evidence_statements_and_store.save(record_of(locked))
    evidence_statements_and_store.save(record_of(locked, script_run(script, crash="failed"), day=1, **CHILD))
    assert state(locked) == ("stale", "the self-test failed since: gemm.crash")


def test_a_failure_of_the_plain_profile_counts_for_one_with_a_script_too(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, script_run("passed"), **CHILD))
    evidence_statements_and_store.save(record_of(locked, failed_run(), day=1))
    assert of_child(locked) == ("stale", "the self-test failed since: gemm.crash", True)


def test_the_own_shape_of_another_profile_counts_in_a_probe_that_both_run(locked: Lock) -> None:
    """A probe that crashed at that shape did not reach the cases of both profiles."""
    evidence_statements_and_store.save(record_of(locked))
    died = passed_run(probe("env.libs"), probe("gemm.crash", "failed", at="own matmul bf16 2x64x96 nn"))
    evidence_statements_and_store.save(
        record_of(locked, died, day=1, profile="child", selftest={"own": {"shapes": "3" * 64}})
    )
    assert state(locked) == ("stale", "the self-test failed since: gemm.crash")


def test_a_failure_is_the_newest_answer_until_the_profiles_own_script_passes(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, script_run(), **CHILD))
    evidence_statements_and_store.save(record_of(locked, day=1))  # without the script
    evidence_statements_and_store.save(
        record_of(locked, script_run("passed"), day=2, profile="other", selftest={"own": TWO})
    )
    assert of_child(locked) == ("stale", "the self-test failed: own.script", True)
    evidence_statements_and_store.save(record_of(locked, script_run("skipped"), day=3, **CHILD))
    assert of_child(locked)[2]
    evidence_statements_and_store.save(record_of(locked, script_run("passed"), day=4, **CHILD))
    assert of_child(locked)[::2] == ("proved", False)


def test_a_failure_of_the_plain_profile_is_not_forgotten_where_only_another_script_passes(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, failed_run()))
    evidence_statements_and_store.save(record_of(locked, script_run("passed"), day=1, **CHILD))
    assert state(locked) == ("stale", "the self-test failed: gemm.crash")


def test_a_changed_script_is_failed_until_the_new_one_passes(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, script_run("passed"), **CHILD))
    evidence_statements_and_store.save(record_of(locked, script_run(), day=1, profile="child", selftest={"own": TWO}))
    assert of_child(locked) == ("stale", "the self-test failed since: own.script", True)  # a run of `child` itself
    assert of_child(locked, "2" * 64)[1:] == ("the self-test failed: own.script", True)
    evidence_statements_and_store.save(
        record_of(locked, script_run("passed"), day=2, profile="child", selftest={"own": TWO})
    )
    assert of_child(locked, "2" * 64)[0] == "proved"


def test_an_interrupted_run_of_another_profile_is_not_reported(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, judged(lines(documents())[:-1]), profile="other"))
    assert state(locked) == ("missing", "unverified")


def test_other_settings_of_torch_are_stale(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, selftest={"settings": {"allow_tf32": True}}))
    assert state(locked) == ("stale", "proved with different settings of torch")


@pytest.mark.parametrize(
    ("proved", "required", "reason"),
    [
        ({}, {"gpu_count": 4}, "proved with fewer than the required 4 GPUs that work together"),
        ({"gpu_count": 8}, {"gpu_count": 4}, None),
        ({}, {"transport": "p2p"}, "proved without requiring the transport p2p"),
        ({"transport": "shm"}, {"transport": "p2p"}, "proved without requiring the transport p2p"),
        ({"transport": "p2p"}, {"transport": "p2p"}, None),
        ({"transport": "p2p"}, {}, None),
    ],
)
def test_measurements_between_gpus_must_match_the_request(
    locked: Lock, proved: dict[str, Any], required: dict[str, Any], reason: str | None
) -> None:
    base = wanted(locked)
    record = evidence_statements_and_store.run_record(
        IMAGE, dataclasses.replace(base, **proved), passed_run(), "docker 26.1.5", DAY
    )
    evidence_statements_and_store.save(record)
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, dataclasses.replace(base, **required))
    assert proof.state == ("stale" if reason else "proved")
    assert not reason or proof.reason == reason


def test_a_record_from_before_transports_were_measured_counts_for_one_gpu(locked: Lock) -> None:
    document = document_of(locked)
    selftest = {key: value for key, value in document["selftest"].items() if key not in ("gpu_count", "transport")}
    evidence_statements_and_store.save(validate_record({**document, "selftest": selftest}))
    assert state(locked)[0] == "proved"


ONE, TWO = {"script": "1" * 64}, {"script": "2" * 64}
SHAPES = {"shapes": "3" * 64}


@pytest.mark.parametrize(
    ("made_with", "asked_for", "expected"),
    [
        ({}, {}, None),
        (ONE, ONE, None),
        (ONE | SHAPES, ONE | SHAPES, None),
        (ONE, TWO, "proved with another script"),
        ({}, ONE, "proved with another script"),
        (ONE, {}, "proved with another script"),
        (SHAPES, {"shapes": "4" * 64}, "proved with other shapes"),
        ({}, ONE | SHAPES, "proved with another script and other shapes"),
    ],
)
def test_additions_of_the_profile_are_part_of_a_proof(
    locked: Lock, made_with: dict[str, str], asked_for: dict[str, str], expected: str | None
) -> None:
    evidence_statements_and_store.save(record_of(locked, selftest={"own": made_with}))
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, dataclasses.replace(wanted(locked), own=asked_for))
    assert (proof.state, expected in (proof.reason, None)) == ("stale" if expected else "proved", True)


def test_a_record_from_before_profiles_could_add_anything_counts_for_those_that_do_not(locked: Lock) -> None:
    document = document_of(locked)
    del document["selftest"]["own"]
    fitting(document, record_of(locked))
    ((_, read),) = evidence_statements_and_store.stored(IMAGE.id)
    assert read.selftest.own == {}
    assert state(locked)[0] == "proved"
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, dataclasses.replace(wanted(locked), own=ONE))
    assert proof.reason == "proved with another script"


def test_the_statement_names_what_the_profile_adds(locked: Lock) -> None:
    predicate = stated(record_of(locked, selftest={"own": ONE | SHAPES}))["predicate"]
    digests = {item["name"]: item["digest"]["sha256"] for item in predicate["configuration"]}
    assert (digests["script"], digests["shapes"]) == ("1" * 64, "3" * 64)


@pytest.mark.parametrize(
    ("demanded", "reason"),
    [
        (None, "proved with lower requirements for gemm, burn"),
        ({}, "proved with lower requirements for gemm, burn"),
        ({"gemm": 0.6, "burn": 30.0}, "proved with lower requirements for burn"),
        ({"gemm": 0.6, "burn": 60.0}, None),
        ({"gemm": 0.7, "burn": 90.0, "memory": 0.1}, None),
    ],
)
def test_a_proof_had_as_much_asked_of_it(locked: Lock, demanded: dict[str, float] | None, reason: str | None) -> None:
    document = document_of(locked, selftest={"demands": demanded})
    if demanded is None:
        del document["selftest"]["demands"]
    evidence_statements_and_store.save(validate_record(document))
    asking = dataclasses.replace(wanted(locked), demands={"gemm": 0.6, "burn": 60.0})
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, asking)
    assert (proof.state, proof.reason) == ("stale", reason) if reason else proof.state == "proved"


def test_a_proof_after_a_failure_counts(locked: Lock) -> None:
    evidence_statements_and_store.save(record_of(locked, failed_run(), day=0))
    evidence_statements_and_store.save(record_of(locked, day=1))
    assert state(locked)[0] == "proved"


def test_a_proof_after_a_failure_counts_although_it_lacks_the_failed_probe(locked: Lock) -> None:
    asking = dataclasses.replace(wanted(locked), require=("env.libs",))
    evidence_statements_and_store.save(record_of(locked, failed_run(), day=0))
    evidence_statements_and_store.save(record_of(locked, passed_run(probe("env.libs")), day=1))
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE.id, asking)
    assert (proof.state, proof.failed) == ("proved", False)


# a record that is read and written again


GOLDEN = Path(__file__).parents[2] / "golden"
KEPT = sorted(GOLDEN.glob("**/*.record.json"))


@pytest.mark.parametrize("file", KEPT, ids=lambda file: file.name[:12])
def test_a_released_record_keeps_its_bytes_and_its_statement(file: Path) -> None:
    raw = file.read_bytes()
    record = validate_record(json.loads(raw))
    assert record.encoded.encode() == raw
    digest = file.name.partition(".")[0]
    made = evidence_statements_and_store.test_statement(record, digest).document()
    statement = file.with_name(f"{digest}.statement.json")
    assert json.dumps(made, indent=1, sort_keys=True).encode() == statement.read_bytes()


def test_there_are_released_records() -> None:
    assert KEPT


def hung_run() -> run_result.TestRun:
    return judged(lines(documents())[:2], exit_code=None, timed_out=True)


@pytest.mark.parametrize(
    "run",
    [passed_run(), failed_run(), run_on("NVIDIA H20"), run_on("a GPU that nobody knows"), hung_run(),
     passed_run().leaving_out({"own.script": "why"}), dataclasses.replace(passed_run(), where=RunLocation(**PLACE))],
)  # fmt: skip
def test_a_record_keeps_its_bytes_and_what_a_newer_envbuild_adds(locked: Lock, run: run_result.TestRun) -> None:
    document = document_of(locked, run)
    for part in (document, document["image"], document["selftest"], *document["results"]):
        part["of a newer envbuild"] = [{"a": None}]
    text = json.dumps(document, indent=1, sort_keys=True)
    assert validate_record(json.loads(text)).encoded == text


def test_content_that_a_record_cannot_hold_is_an_error(locked: Lock) -> None:
    run = passed_run(probe("env.identity", traits={"gpus": [{"name": "NVIDIA H20", "\ud800": 1}]}))
    with pytest.raises(CheckFailed, match="cannot be recorded: gpu: "):
        record_of(locked, run)


def test_a_gpu_whose_name_and_driver_are_anything_is_recorded(locked: Lock) -> None:
    traits = {"gpus": [{"name": ["\ud800"], "model": 5}], "driver": 5}
    found = record_of(locked, passed_run(probe("env.identity", traits=traits))).gpu
    assert found and (found.driver, found.count) == ("5", 1)
