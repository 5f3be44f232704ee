"""Output files of options: every command creates missing folders and reports this; `-` is stdout, or is refused."""

from __future__ import annotations

import ast
from pathlib import Path
from xml.etree import ElementTree

import pytest

from envbuild.pipeline import make_build_and_test
from envbuild.pipeline.model import MakeResult
from envbuild.repair import lock_installer
from envbuild.repair.install_plan import InstallPlan
from envbuild.repair.lock_installer import InstalledLock
from unit.evidence.runs import passed_run
from unit.support import PROFILE, envbuild, lock_of_this_python, write_profile

COMMANDS = Path(__file__).parents[3] / "envbuild" / "cli"


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch, project: Path) -> list[str]:
    """Run `envbuild test` without an engine; return the names of the tested profiles."""
    names: list[str] = []

    def test(name: str, *_: object) -> MakeResult:
        names.append(name)
        return MakeResult(name, run=passed_run())

    monkeypatch.setattr(make_build_and_test, "test", test)
    return names


COMMIT = f"git+https://git.example/envbuild@{'0123456789abcdef' * 2}01234567"
WRITING = [
    (["test", "sample", "--junit"], "j.xml"),
    (["export", "check", "sample", "-o"], "c.py"),
    (["export", "selftest", "-o"], "s.zip"),
    (["export", "requirements", "sample", "-o"], "r.txt"),
    (["export", "constraints", "sample", "-o"], "r.txt"),
    (["export", "schema", "--output"], "s.json"),
    (["export", "ci", "github", "sample", "--install", COMMIT, "--output"], "ci.yml"),
    (["show", "sample", "--html"], "r.html"),
    (["show", "sample", "-o"], "r.html"),
    (["keygen", "-o"], "team"),
]


@pytest.fixture
def ready(tested: list[str], project: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lock_of_this_python(project)
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", "a passphrase")
    return tested


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "name"), WRITING)
def test_a_missing_folder_is_made_and_said(ready: list[str], project: Path, arguments: list[str], name: str) -> None:
    for number, expected in enumerate(("made folder new/folder\n", "")):
        file = f"new/folder/{number}{name}"
        done = envbuild(*arguments, file)
        assert (done.code, expected in done.stderr, done.stderr.count("made folder")) == (0, True, 1 - number), (
            done.stderr
        )
        assert list((project / "new" / "folder").glob(f"{number}{name}*"))


@pytest.mark.parametrize(("arguments", "name"), WRITING)
def test_a_folder_that_cannot_be_made_is_reported_before_the_work(
    ready: list[str], project: Path, arguments: list[str], name: str
) -> None:
    (project / "file").write_text("", encoding="utf-8")
    done = envbuild(*arguments, f"file/{name}")
    assert (done.code, ready) == (6, [])
    assert "file: is not a folder" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "name"), WRITING)
def test_a_dash_is_stdout_or_refused(ready: list[str], project: Path, arguments: list[str], name: str) -> None:
    before = sorted(project.rglob("*"))
    done = envbuild(*arguments, "-")
    if name in ("s.zip", "team"):
        assert (done.code, "pass a file instead of -" in done.stderr) == (2, True)
    else:
        file = project.parent / name
        assert envbuild(*arguments, str(file)).code == done.code == 0
        assert done.stdout == file.read_text(encoding="utf-8"), "the document and nothing else"
        assert envbuild(*arguments, "-", "--json").code == 2
    assert sorted(project.rglob("*")) == before


def test_a_saved_image_goes_to_no_terminal(project: Path) -> None:
    write_profile(project, PROFILE)
    done = envbuild("save", "sample", "-o", "-")
    assert (done.code, "pass a file instead of -" in done.stderr) == (2, True)


@pytest.mark.parametrize("option", ["--junit", "--fingerprint"])
def test_a_dry_run_writes_no_report(ready: list[str], project: Path, option: str) -> None:
    before = sorted(project.rglob("*"))
    done = envbuild("test", "sample", "--on", "slurm", "--dry-run", option, "made/here.x")
    assert (done.code, "--dry-run runs nothing" in done.stderr) == (2, True)
    assert sorted(project.rglob("*")) == before


def test_stdout_holds_one_document(ready: list[str]) -> None:
    assert envbuild("test", "sample", "--junit", "-", "--fingerprint", "-").code == 2
    done = envbuild("test", "sample", "--junit", "-")
    assert ElementTree.fromstring(done.stdout.partition("\n")[2]).tag == "testsuites"


# These commands write files without an option that names them.
OWN_PLACES = {"docs", "pin_digests", "lock", "init", "output_files"}


@pytest.mark.parametrize("file", sorted(COMMANDS.glob("*.py")), ids=lambda file: file.stem)
def test_files_named_by_options_are_written_by_one_function(file: Path) -> None:
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    writes = [call for call in calls if call.endswith(("write_atomically", "write_text", "write_bytes"))]
    assert file.stem in OWN_PLACES or not writes


def test_an_output_of_test_must_be_named_by_its_kind(ready: list[str]) -> None:
    done = envbuild("test", "sample", "-o", "file")
    assert (done.code, ready) == (2, [])
    assert "hint: --junit file or --fingerprint file" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["one", "-o", "two"]])
def test_an_environment_has_one_folder(project: Path, arguments: list[str]) -> None:
    done = envbuild("install", "sample", *arguments)
    assert (done.code, "name one folder" in done.stderr, list(project.glob("one"))) == (2, True, [])


@pytest.mark.parametrize("arguments", [["new"], ["-o", "new"], ["--output", "new"]])
def test_the_folder_of_an_environment_may_be_named_by_an_option(
    project: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    folders: list[Path] = []

    def install(plan: InstallPlan, folder: Path, say: object) -> InstalledLock:
        folders.append(folder)
        return InstalledLock(plan.profile, "", str(folder), "up-to-date", "", (), ())

    lock_of_this_python(project)
    monkeypatch.setattr(lock_installer, "install_lock", install)
    done = envbuild("install", "sample", *arguments)
    assert (done.code, folders) == (0, [Path("new")]), done.stderr
