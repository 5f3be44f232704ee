"""What a finished self-test means for the pipeline and for the commands that report it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from envbuild import pipeline
from envbuild.errors import CheckFailed, NotProved
from envbuild.proof import job
from envbuild.proof.evidence import Proof
from envbuild.steps import Made
from unit.proof.runs import documents, judged, lines, passed_run, probe
from unit.support import Said, envbuild, image_of


def made(run: job.TestRun | None) -> Made:
    return Made("sample", image=image_of(), run=run)


def skipped(*required: str) -> job.TestRun:
    found = documents(probe("env.libs"), probe("gemm.crash", "skipped", reason="needs a GPU"))
    return judged(lines(found), required)


def test_a_run_that_passed_is_let_through() -> None:
    pipeline.require_passed(made(None))
    pipeline.require_passed(made(passed_run()))
    pipeline.require_passed(made(skipped("env.libs")))


def test_a_required_probe_that_was_skipped_is_not_proved_and_named_with_its_reason() -> None:
    with pytest.raises(NotProved, match="sample is built, and not proved: a required probe was skipped") as caught:
        pipeline.require_passed(made(skipped("env.libs", "gemm.crash")))
    assert (caught.value.code, caught.value.kind) == (4, "not-proved")
    assert caught.value.hint == "gemm.crash: needs a GPU"


def test_a_failure_is_a_failed_check_whatever_was_skipped() -> None:
    found = documents(probe("env.libs", "failed"), probe("gemm.crash", "skipped"), probe("train.step"))
    run = judged(lines(found), ["gemm.crash"], exit_code=5)
    assert run.skipped_required == ("gemm.crash",)
    with pytest.raises(CheckFailed, match=r"self-test of sample failed: env\.libs") as caught:
        pipeline.require_passed(made(run))
    assert (caught.value.code, caught.value.hint) == (5, "env.libs: signal at a step: why")


def test_a_required_probe_that_is_absent_is_a_failed_check() -> None:
    run = judged(lines(documents(probe("env.libs"))), ["gemm.crash"])
    with pytest.raises(CheckFailed, match=r"required probe gemm\.crash is not among the results"):
        pipeline.require_passed(made(run))


def test_a_run_that_was_stopped_is_a_failed_check_that_names_the_probe() -> None:
    run = judged(lines(documents()[:2]), exit_code=None, timed_out=True, seconds=900.2)
    with pytest.raises(CheckFailed, match=r"failed: gemm\.crash$") as caught:
        pipeline.require_passed(made(run))
    assert "the self-test was stopped after 900 s" in str(caught.value.hint).splitlines()


def test_a_run_that_nothing_came_of_says_why_in_its_message() -> None:
    run = judged(b"", exit_code=1, stderr="x\nno python")
    with pytest.raises(
        CheckFailed, match="self-test of sample failed: the self-test ended with exit code 1: no python"
    ):
        pipeline.require_passed(made(run))


@pytest.mark.parametrize(
    ("run", "proofs", "status"),
    [
        (None, [], "built"),
        (skipped("gemm.crash"), ["stale"], "built"),
        (passed_run(), ["proved"], "verified"),
        (passed_run(), ["proved", "missing"], "built"),
        (passed_run(probe("env.libs", "failed")), ["stale"], "failed"),
        (passed_run(probe("env.libs", "skipped")), ["stale"], "failed"),
    ],
)
def test_the_status_of_what_was_made(run: job.TestRun | None, proofs: list[str], status: str) -> None:
    found = made(run)
    found.proofs = tuple(Proof("cpu", state, None, "") for state in proofs)
    assert found.status == found.document()["status"] == status


# the commands, with a pipeline that is done at once


def unproved(*_: Any) -> Made:
    found = made(skipped("gemm.crash"))
    try:
        pipeline.require_passed(found)
    except NotProved as error:
        error.partial = found.document()
        raise
    return found


def test_make_says_what_was_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "make", unproved)
    done = envbuild("make", "sample")
    assert (done.code, done.stdout) == (4, "")
    assert "hint: gemm.crash: needs a GPU" in done.stderr
    done = envbuild("make", "sample", "--json")
    assert (done.code, done.document["status"], done.document["error"]["kind"]) == (4, "built", "not-proved")


def test_make_may_be_allowed_not_to_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "make", unproved)
    done = envbuild("make", "sample", "--allow-unproved", "--json")
    assert (done.code, done.document["status"]) == (0, "built")
    assert "error" not in done.document
    assert envbuild("make", "sample", "--allow-unproved").code == 0


@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_test_reports_every_probe(monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    run = passed_run(probe("env.libs"), probe("gemm.crash", outcome))
    said, document = reported(monkeypatch, run)
    assert said.code == (0 if outcome == "passed" else 5)
    assert [(item["probe"], item["status"]) for item in document["probes"]] == [
        ("env.libs", "passed"), ("gemm.crash", outcome),
    ]  # fmt: skip
    assert ("error" in document) is (outcome == "failed")


def test_test_reports_a_required_probe_that_was_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    said, document = reported(monkeypatch, skipped("gemm.crash"))
    assert (said.code, document["error"]["kind"], document["skipped"]) == (4, "not-proved", 1)
    assert [item["status"] for item in document["probes"]] == ["passed", "skipped"]


def reported(monkeypatch: pytest.MonkeyPatch, run: job.TestRun) -> tuple[Said, dict[str, Any]]:
    """What `test --json` says, and its one document; for a person it has as many lines as there were probes."""
    monkeypatch.setattr(pipeline, "test", lambda *_: made(run))
    plain = envbuild("test", "sample")
    assert len(plain.stdout.splitlines()) == len(run.results)
    said = envbuild("test", "sample", "--json")
    assert said.code == plain.code
    return said, json.loads(said.stdout)
