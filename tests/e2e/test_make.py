"""The normal case: an image is built, verified and used. The tests also show which commands move the tag `verified`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from envbuild.lock import lock_file

from .broken import Workshop
from .support import ODD, Proved, docker, handle, inspect, machine_cache

pytestmark = pytest.mark.engine


def shape(value: Any) -> Any:
    """Return keys and types of a JSON value, with one type for all numbers; of a list, those of its first element."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


def test_make_gives_the_documented_document(quick: Proved) -> None:
    assert shape(quick.document) == {
        "profile": str,
        "state": str,
        "lock": str,
        "image": str,
        "tags": [str],
        "gpu": type(None),
        "evidence": [{"model": str, "state": str, "statement": str, "reason": str, "level": str, "unconfined": []}],
        "statement": str,
        "signed_statement": type(None),
        "advisories": [],
        "findings": [],
        "selftest": {"passed": float, "failed": float, "skipped": float, "seconds": float, "failures": []},
        "steps": [{"name": str, "seconds": float, "cached": bool}],
        "seconds": float,
        "notes": [],
        "reasons": [],
    }
    assert quick.document["state"] == "verified"
    assert quick.document["tags"] == [f"envbuild/{quick.name}:{quick.document['lock'][7:19]}", quick.verified]
    assert [step["name"] for step in quick.document["steps"]] == [
        "load profile", "resolve", "preflight", "lock", "render", "build", "load", "audit", "self-test", "evidence",
        "tag",
    ]  # fmt: skip
    assert quick.document["evidence"][0]["state"] == "verified"
    found = lock_file.read(quick.project.lock(quick.name))
    assert found and found.id == quick.document["lock"]


def test_the_evidence_is_of_this_image_and_its_record(quick: Proved) -> None:
    statement_file = Path(quick.document["statement"])
    statement = json.loads(statement_file.read_text(encoding="utf-8"))
    record_file = statement_file.with_name(statement_file.name.replace(".statement.", ".record."))
    record = json.loads(record_file.read_text(encoding="utf-8"))
    digests = {item["name"]: item["digest"]["sha256"] for item in statement["predicate"]["configuration"]}

    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert statement["subject"] == [{"name": f"envbuild/{quick.name}", "digest": {"sha256": quick.id[7:]}}]
    assert statement["predicate"]["result"] == "PASSED"
    assert digests["run-record"] == hashlib.sha256(record_file.read_bytes()).hexdigest()
    assert digests["lock"] == quick.document["lock"][7:]
    assert record["image"]["layers"] == inspect(quick.tag)["RootFS"]["Layers"]


def test_status_says_verified(quick: Proved) -> None:
    status = quick.project.run("status", quick.name, "--json")
    assert (status.code, status.document["state"]) == (0, "verified")
    assert status.document["image"] == quick.id


def test_a_second_make_has_nothing_to_do(quick: Proved) -> None:
    again = quick.project.run("make", quick.name, "--json")
    assert again.code == 0, again.stderr
    assert again.seconds < 60  # 12 s on a busy machine
    assert [step["name"] for step in again.document["steps"] if not step["cached"]] == ["load profile", "resolve"]
    assert again.document["image"] == quick.document["image"]
    assert again.document["statement"] is None  # of this run
    assert again.stderr.count("up to date") == 7


def test_a_dry_run_says_what_is_needed(quick: Proved, scratch: Path) -> None:
    proved = quick.project.run("make", quick.name, "--dry-run", "--json").document
    assert (proved["proof"], proved["fetch_bytes"], proved["disk_bytes"]) == ("proved", 0, 0)
    here = quick.copy(scratch)
    here.project.change(here.name, env={"ODD": "another"})
    before = here.project.lock(here.name).read_bytes()
    found = here.project.run("make", here.name, "--dry-run", "--json").document
    assert (found["proof"], found["lock_current"], found["gpus"]) == ("possible", False, [])
    assert found["disk_bytes"] > 1_000_000_000 and found["expected_minutes"] > 0
    assert here.project.lock(here.name).read_bytes() == before


@pytest.mark.parametrize("options", [[], ["--user", "4242", "--read-only", "--network", "none"]], ids=" ".join)
def test_torch_runs_as_any_user(quick: Proved, options: list[str]) -> None:
    output = docker("run", "--rm", *options, quick.verified, "python", "-c", "import torch; print(torch.ones(3).sum())")
    assert output == "tensor(3.)\n"


def test_the_configuration_of_the_image(quick: Proved) -> None:
    found = inspect(quick.verified)
    environment = dict(item.partition("=")[::2] for item in found["Config"]["Env"])
    assert found["Id"] == quick.id
    assert found["Config"]["Labels"] == {"io.envbuild.lock": quick.document["lock"]}
    assert environment["ODD"] == ODD  # unchanged: no shell and no template has interpreted it
    assert environment["PATH"].startswith("/opt/venv/bin:")
    assert (found["Config"]["User"], found["Config"]["Entrypoint"], found["Config"]["Cmd"]) == ("", None, ["python"])
    assert f"{found['Os']}/{found['Architecture']}" == "linux/amd64"


def test_no_address_and_no_path_of_the_host_is_in_the_image(quick: Proved) -> None:
    """If neither the configuration nor the history contains an address, no credential in an address can have leaked."""
    output = docker("history", "--no-trunc", quick.verified) + json.dumps(inspect(quick.verified)["Config"])
    assert "://" not in output
    assert str(machine_cache("wheels").parent) not in output
    inside = docker("run", "--rm", quick.verified, "python", "-m", "pip", "config", "list")
    assert inside == ""


def test_a_failed_selftest_leaves_verified_where_it_was(
    quick: Proved, broken: Workshop, verified: str, scratch: Path
) -> None:
    """The image of the lock is defective; to make this possible, the build record is forged."""
    here = quick.copy(scratch)
    for record in here.records():
        record.write_text(broken.record("forged", of=record), encoding="utf-8")
    made = here.project.run("make", here.name, "--json")
    assert made.code == 5
    assert made.document["state"] == "failed"
    assert handle(quick.verified) == verified
    statement = json.loads(Path(made.document["statement"]).read_text(encoding="utf-8"))
    assert statement["predicate"]["result"] == "FAILED"
    assert statement["predicate"]["passedTests"] == []


def test_a_required_probe_that_cannot_run_here_proves_nothing(
    quick: Proved, broken: Workshop, verified: str, scratch: Path
) -> None:
    """The torch in the image has no flash attention; to make this possible, the build record is forged."""
    here = quick.copy(scratch).with_required_alone()
    here.project.change(here.name, selftest={"level": "quick", "require": ["env.libs", "attention.flash"]})
    for record in here.records():
        record.write_text(broken.record("flashless", of=record), encoding="utf-8")
    made = here.project.run("make", here.name, "--json")
    assert (made.code, made.error["kind"], made.document["state"]) == (4, "not-proved", "unverified")
    assert "a required probe was skipped" in made.error["message"]
    assert made.error["hint"].startswith("attention.flash: no flash attention on this device: ")
    assert made.document["selftest"]["failures"] == []
    assert made.document["selftest"]["passed"] > 0
    statement = json.loads(Path(made.document["statement"]).read_text(encoding="utf-8"))
    assert statement["predicate"]["result"] == "WARNED"
    assert handle(quick.verified) == verified
    status = here.project.run("status", here.name, "--json")
    assert status.code != 0
    assert "required probes did not run: attention.flash" in status.words


def test_a_probe_that_this_profile_can_never_run_may_not_be_required(quick: Proved, scratch: Path) -> None:
    here = quick.copy(scratch)
    here.project.change(here.name, selftest={"level": "quick", "require": ["attention.cudnn"]})
    made = here.project.run("make", here.name, "--json")
    assert (made.code, made.error["kind"]) == (3, "profile")
    assert [fault["field"] for fault in made.error["faults"]] == ["selftest.require[0]"]
    assert "attention.cudnn needs a GPU" in made.error["faults"][0]["message"]


def test_one_of_two_concurrent_makes_waits(quick: Proved, scratch: Path) -> None:
    first = quick.project.hold(scratch / "holding", "load profile start", "make", quick.name)
    second = quick.project.start("make", quick.name)
    second.says(f"another envbuild is working on {quick.name}; waiting for it")
    assert second.alive() and "load profile" not in second.stderr
    (scratch / "holding").unlink()
    assert (first.finish().code, second.finish().code) == (0, 0)


def test_prove_refuses_an_image_that_envbuild_did_not_build(quick: Proved, broken: Workshop, verified: str) -> None:
    before = quick.project.statements()
    refused = quick.project.run("test", "--record", quick.name, "--image", broken.image("forged"), "--json")
    assert refused.code == 5
    assert "was not built by this envbuild from the lock" in refused.error["message"]
    assert handle(quick.verified) == verified
    assert quick.project.statements() == before
