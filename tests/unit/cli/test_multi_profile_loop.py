"""Commands that take several profiles: what is printed, which exit code counts, and one document for `--json`."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbuild.pipeline import make_build_and_test
from envbuild.pipeline.model import MakeResult
from envbuild.util.errors import BuildError, CheckFailed
from unit.evidence.runs import passed_run
from unit.support import PROFILE, envbuild, image_of, lock_of_this_python, write_profile


@pytest.fixture
def three(project: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run `build` or `test` for the profiles good, wrong and missing; return the processed names."""
    calls: list[str] = []

    def run(name: str, *_: object) -> MakeResult:
        calls.append(name)
        if name == "missing":
            raise BuildError("missing is not built", hint="run: envbuild build missing")
        if name == "wrong":
            raise CheckFailed("the self-test of wrong failed")
        return MakeResult(name, image=image_of(), run=passed_run())

    for function in ("test", "prove", "build_only"):
        monkeypatch.setattr(make_build_and_test, function, run)
    return calls


@pytest.mark.parametrize("command", [("build",), ("test",), ("test", "--record")])
def test_a_failure_stops_no_other_and_the_worst_exit_code_counts(three: list[str], command: tuple[str, ...]) -> None:
    done = envbuild(*command, "missing", "wrong", "good", "good")
    assert (done.code, three) == (5, ["missing", "wrong", "good"])
    assert "error: missing is not built\n  hint: run: envbuild build missing\n" in done.stderr
    assert done.stderr.splitlines()[-1] == "error: 2 of 3 profiles failed: missing, wrong"


def test_a_document_of_several_is_a_list(three: list[str]) -> None:
    done = envbuild("build", "good", "other", "--json")
    assert (done.code, [row["profile"] for row in done.document["profiles"]]) == (0, ["good", "other"])
    failed = envbuild("build", "good", "missing", "--json")
    assert failed.code == 6
    good, missing = failed.document["profiles"]
    assert ("error" in good, missing["profile"], missing["error"]["code"]) == (False, "missing", 6)
    assert failed.document["error"]["kind"] == "profiles"


def test_a_file_that_cannot_be_written_stops_no_other(three: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, *_: object) -> MakeResult:
        if name == "closed":
            raise PermissionError(13, "Permission denied", "closed.json")
        return MakeResult(name, image=image_of())

    monkeypatch.setattr(make_build_and_test, "build_only", run)
    done = envbuild("build", "closed", "good", "--json")
    closed, good = done.document["profiles"]
    assert (done.code, closed["error"]["message"]) == (6, "closed.json: Permission denied")
    assert good["profile"] == "good"


def test_a_single_profile_gives_its_document_without_a_list(three: list[str]) -> None:
    assert envbuild("build", "good", "good", "--json").document["profile"] == "good"


def test_show_takes_several(project: Path) -> None:
    write_profile(project, PROFILE)
    write_profile(project, {**PROFILE, "description": "another"}, "other")
    text = envbuild("show", "sample", "other").stdout
    assert text.index("sample: ") < text.index("other: another")
    rows = envbuild("show", "sample", "other", "--json").document["profiles"]
    assert [row["profile"] for row in rows] == ["sample", "other"]


def test_export_writes_a_file_for_each(project: Path) -> None:
    lock_of_this_python(project)
    (project / "profiles" / "other.yaml").write_text("extends: sample\n", encoding="utf-8")
    (project / "profiles" / "other.lock.yaml").write_bytes((project / "profiles" / "sample.lock.yaml").read_bytes())
    done = envbuild("export", "requirements", "sample", "other")
    assert (done.code, done.stdout.split()) == (0, ["requirements-sample.txt", "requirements-other.txt"])
    assert (project / "requirements-other.txt").is_file()
