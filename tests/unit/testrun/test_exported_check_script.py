"""The exported check: the same bytes for the same lock, and a damaged file never passes."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from envbuild.facts import database
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.testrun import exported_check_script, selftest_job
from envbuild.util.host_processes import Completed, run
from unit.support import PROFILE, envbuild, lock_for, lock_of_this_python, plan_of, profile_of

TORCHLESS = ("-I", "-S")


def rendered(folder: Path, **changes: Any) -> str:
    data = {**PROFILE, **changes}
    return exported_check_script.render(profile_of(folder, data), lock_for(plan_of(folder, data)))


def payload(text: str, mark: str) -> str:
    return "".join(line[3:] for line in text.splitlines() if line.startswith(mark))


def document_in(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(payload(text, "#- "))
    return found


def started(file: Path, *options: str, after: tuple[str, ...] = ()) -> Completed:
    return run([sys.executable, *options, file, *after], timeout=120)


def test_the_same_lock_gives_the_same_bytes(project: Path) -> None:
    first = rendered(project)
    assert rendered(project, description="a lock does not contain the description") == first
    assert rendered(project, packages=["numpy==1.5"]) != first
    assert first.isascii()


def test_it_holds_the_selftest_and_what_the_profile_expects(project: Path) -> None:
    text = rendered(project, gpus=["h20"], torch="2.7.1", selftest={"require": ["env.libs", "train.step"]})
    assert base64.b64decode(payload(text, "#+ ")) == selftest_job.selftest_zip()
    document = document_in(text)
    job = document["job"]
    assert (document["profile"], job["level"], job["device"]) == ("sample", "quick", "cuda")
    assert job["require"] == ["env.identity", "env.libs"], "only what the quick level has"
    assert set(job["expect"]["distributions"]) == {"torch", "numpy"}, "pip computes nothing"
    assert job["expect"]["gpus"] == list(database.gpus()["h20"].all_names)


def test_a_script_of_the_profiles_own_is_left_out_though_it_is_required(project: Path) -> None:
    """Otherwise no environment could pass, because the file does not contain the script."""
    (project / "profiles").mkdir(exist_ok=True)
    (project / "profiles" / "smoke.py").write_text("print(1)\n", encoding="utf-8")
    selftest = {"level": "quick", "script": "smoke.py", "require": ["env.libs", "own.script"]}
    job_of = document_in(rendered(project, selftest=selftest))["job"]
    assert job_of["require"] == ["env.libs"] and not job_of.get("script")


def test_the_remedies_are_those_of_the_advisories_that_a_result_names(project: Path) -> None:
    rows = document_in(rendered(project))["remedies"]
    known = [keys for advisory in database.advisories() for keys in advisory.signature]
    signatures = [{key: pattern.pattern for key, pattern in keys.items()} for keys in known]
    assert [row["when"] for row in rows[: len(known)]] == signatures
    fpe = next(row for row in rows if row["when"] == {"probe": "gemm.crash", "signal": "SIGFPE"})
    assert "12.4.5.8" in fpe["remedy"] and "cublas-hopper-fpe" in fpe["remedy"]
    assert rows[-1]["when"] == {}, "there is one for whatever it is"


@pytest.mark.slow
def test_cut_short_anywhere_it_is_never_a_pass(project: Path, tmp_path: Path) -> None:
    """Without torch, a complete file exits with 5, so an unnoticed cut would exit with 5 too."""
    text = rendered(project)
    file = tmp_path / "check.py"
    ends = [position for position, letter in enumerate(text) if letter == "\n"]
    code = [end for end in ends if end < text.index("\n#- ")]
    for cut in (*code, ends[len(ends) // 2], len(text) - 30, len(text) - 3):
        file.write_text(text[: cut + 1], encoding="utf-8")
        done = started(file, *TORCHLESS)
        assert done.code in (1, 3), f"cut at {cut}: {done}"
        if cut >= code[-1]:
            assert (done.code, done.stdout) == (3, "")
            assert done.stderr == (
                "envbuild check: this file is not usable: it is incomplete or was changed; export it again\n"
            )
        else:
            assert "SyntaxError" in done.stderr
            assert sys.version_info < (3, 10) or "this file is truncated; export it again" in done.stderr
    for cut in range(1, text.index("#")):
        file.write_text(text[:cut], encoding="utf-8")
        assert started(file, *TORCHLESS).code == 1, f"cut at {cut}"


def test_it_says_what_it_is_and_refuses_other_arguments(project: Path, tmp_path: Path) -> None:
    file = tmp_path / "check.py"
    file.write_text(rendered(project), encoding="utf-8")
    helped = [started(file, *TORCHLESS, after=(word,)) for word in ("-h", "--help")]
    assert [(done.code, done.stderr) for done in helped] == [(0, "")] * 2
    assert helped[0].stdout.startswith("Check whether this environment matches envbuild's profile sample")
    assert len(helped[0].stdout.splitlines()) == 7
    refused = started(file, *TORCHLESS, after=("--level",))
    assert (refused.code, refused.stdout) == (2, "")
    assert refused.stderr == "envbuild check: invalid arguments: --level\n" + helped[0].stdout
    hostile = started(file, *TORCHLESS, after=("\x1b[2J", "ü"))
    assert hostile.stderr.splitlines()[0].endswith(r"invalid arguments: \x1b[2J \xfc")


def test_one_byte_changed_is_noticed(project: Path, tmp_path: Path) -> None:
    file = tmp_path / "check.py"
    file.write_text(rendered(project).replace('"level": "quick"', '"level": "quicj"'), encoding="utf-8")
    assert started(file, *TORCHLESS).code == 3


def test_a_missing_torch_is_reported(project: Path, tmp_path: Path) -> None:
    file = tmp_path / "check.py"
    file.write_text(rendered(project), encoding="utf-8")
    done = started(file, *TORCHLESS)
    assert (done.code, done.stdout) == (5, "")
    head, why, remedy = done.stderr.splitlines()
    assert head == "envbuild check: sample: check failed"
    assert why == f"  torch cannot be imported by {sys.executable}: No module named 'torch'"
    assert remedy.startswith(
        "    fix: run in the image of sample (envbuild make sample), or install the locked versions"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1", "No module named 'torch."),
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12: cannot open"),
    ],
)
def test_a_broken_torch_is_not_reported_as_missing(project: Path, tmp_path: Path, text: str, why: str) -> None:
    """Its Python imports a torch.py that is next to the file."""
    file = tmp_path / "check.py"
    file.write_text(rendered(project), encoding="utf-8")
    stray = tmp_path / "torch.py"
    stray.write_text(text, encoding="utf-8")
    done = started(file)
    assert (done.code, done.stdout, len(done.stderr.splitlines())) == (5, "", 3), done.stderr
    assert why in done.stderr and f"(torch is installed but broken: {stray})" in done.stderr


# the command, and its file run by the Python that runs the tests


@pytest.mark.slow
def test_an_environment_as_locked_passes_with_one_line(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its level, the job runs two probes, one of which computes."""
    of_level = selftest_job.document

    def document(*arguments: Any) -> dict[str, object]:
        found = of_level(*arguments)
        assert (found["level"], found["probes"]) == ("quick", None)
        return {**found, "probes": ["env.libs", "gemm.exact"]}

    monkeypatch.setattr(selftest_job, "document", document)
    lock_of_this_python(project, selftest={"level": "full", "require": ["env.libs", "train.step"]})
    assert envbuild("export", "check", "sample").stdout == "check-sample.py\n"
    done = started(project / "check-sample.py")
    assert (done.code, len(done.stdout.splitlines())) == (0, 1), done.stderr
    assert done.stdout.startswith("envbuild check: sample: 2 passed")


@pytest.mark.slow
def test_another_version_than_locked_and_a_torch_without_gpu_code_are_reported_with_remedies(project: Path) -> None:
    """The profile is for a GPU, so that only the probes that need no GPU run."""
    torch = pytest.importorskip("torch")
    lock_of_this_python(project, torch="2.7.1", packages=["nosuch==1"], gpus=["h20"])
    assert envbuild("export", "check", "sample", "-o", "out.py").code == 0
    done = started(project / "out.py")
    assert (done.code, done.stdout) == (5, "")
    assert "    nosuch is absent, but 1 is locked\n" in done.stderr
    assert "    fix: run in the image of sample (envbuild make sample), or install the locked versions\n" in done.stderr
    assert done.stderr.splitlines()[1] == "  env.libs: version", "what differs comes first: it needs no GPU"
    assert f"    torch is {torch.__version__}, but 1.0 is locked\n" in done.stderr
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch has GPU code")
    assert "  env.identity: skipped\n" in done.stderr
    assert "fix: run in the image of sample (envbuild make sample), or install the locked torch" in done.stderr


def test_the_command_prints_what_it_wrote(project: Path) -> None:
    made = lock_of_this_python(project)
    document = envbuild("export", "check", "sample", "--json").document
    assert (document["profile"], document["lock"], document["file"]) == ("sample", made.id, "check-sample.py")
    document = envbuild("export", "selftest", "--json").document
    assert (document["file"], document["selftest"]) == ("selftest.zip", selftest_job.selftest_id())
    assert (project / "selftest.zip").read_bytes() == selftest_job.selftest_zip()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["sample"], 8),
        (["nosuch"], 3),
        (["sample", "-o", "profiles"], 2),
        (["sample", "-o", "profiles/sample.yaml/x"], 6),
    ],
)
def test_missing_files_for_an_export_are_errors(project: Path, arguments: list[str], code: int) -> None:
    lock_of_this_python(project)
    if code == 8:
        (project / "profiles" / "sample.lock.yaml").unlink()
    assert envbuild("export", "check", *arguments).code == code


def test_no_profile_is_named_what_could_break_the_script() -> None:
    assert profile_and_lock_name_lookup.NAME.fullmatch("a-b-1") and not profile_and_lock_name_lookup.NAME.fullmatch(
        'x"""'
    )
