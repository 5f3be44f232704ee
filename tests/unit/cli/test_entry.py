"""The command line: exit codes, `--json` of failures, help, and no traceback for any arguments."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from envbuild.audit.environment_audit import Expected
from envbuild.cli import audit, entry
from envbuild.image import container_definition_export
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.util import errors, package_data
from unit.support import PROFILE, CommandResult, as_yaml, envbuild, image_of, lock_for, plan_of, write_profile

NAMES = [name for group in entry.COMMANDS.values() for name in group]
ROOT = Path(entry.__file__).parents[2]


def spawned(*arguments: str, **env: str) -> CommandResult:
    command = [sys.executable, "-m", "envbuild", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    return CommandResult(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def locked(project: Path) -> Lock:
    """A project with one profile, its lock and its Dockerfile."""
    made = lock_for(plan_of(project, PROFILE))
    lock_file.write(made, project / "profiles" / "sample.lock.yaml", "sample")
    (project / "dockerfiles").mkdir()
    (project / "dockerfiles" / "sample.Dockerfile").write_text(
        container_definition_export.standalone_dockerfile(made, "sample"), encoding="utf-8"
    )
    return made


# help


def command(name: str) -> click.Command:
    found = importlib.import_module(f"envbuild.cli.{name.replace('-', '_')}").command
    assert isinstance(found, click.Command)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_with_an_example(name: str) -> None:
    done = CliRunner().invoke(entry.cli, [name, "--help"])
    assert done.exit_code == 0
    assert re.search(rf"^  Examples:\n(    \S.*\n)*    envbuild {name}\b", done.output, re.MULTILINE)


@pytest.mark.parametrize("name", ["requirements", "constraints", "check", "selftest", "ci", "schema"])
def test_every_export_has_help_with_an_example(name: str) -> None:
    done = CliRunner().invoke(entry.cli, ["export", name, "--help"])
    assert re.search(rf"^  Examples:\n    envbuild export {name}\b", done.output, re.MULTILINE)


# The first words of summaries: verbs in the imperative.
VERBS = {
    "Build",
    "Check",
    "Compare",
    "Create",
    "Find",
    "List",
    "Make",
    "Pin",
    "Push",
    "Remove",
    "Save",
    "Run",
    "Show",
    "Test",
    "Write",
}


def test_a_summary_begins_with_a_verb_and_takes_one_line() -> None:
    for group in entry.COMMANDS.values():
        for name, text in group.items():
            assert text.split()[0] in VERBS, name
            assert max(map(len, group)) + len(text) + 4 <= 78, f"{name}: click breaks lines at 78 columns"


def test_options_for_clusters_are_a_group() -> None:
    options, _, cluster = envbuild("test", "--help").stdout.partition("Cluster options:\n")
    names = {"--on", "--slurm", "--kubernetes", "--gpu", "--nodes", "--resume", "--dry-run"}
    assert set(re.findall(r"^  (--[a-z-]+)", cluster, re.MULTILINE)) == names
    assert not names & set(re.findall(r"^  (--[a-z-]+)", options, re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_the_short_help_is_the_commands_own(name: str) -> None:
    listed = {key: text for group in entry.COMMANDS.values() for key, text in group.items()}
    assert command(name).short_help == listed[name]
    assert command(name).name == name


def test_every_command_file_is_listed() -> None:
    folder = Path(entry.__file__).parent
    files = {file.stem for file in folder.glob("*.py")} - {
        "__init__",
        "entry",
        "command_options",
        "console",
        "document_schemas",
        "export_documents",
        "output_files",
        "probe_result_display",
        "multi_profile_loop",
        "fingerprint_difference_display",
        "show_html",
    }
    assert files == {name.replace("-", "_") for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_command_takes_json(name: str) -> None:
    found = command(name)
    for leaf in found.commands.values() if isinstance(found, click.Group) else [found]:
        assert "--json" in {option for parameter in leaf.params for option in parameter.opts}


def test_help_shows_the_groups() -> None:
    done = envbuild("--help")
    assert done.code == 0
    for title, group in entry.COMMANDS.items():
        assert f"{title}:" in done.stdout
        assert all(re.search(rf"^  {name}  ", done.stdout, re.MULTILINE) for name in group)


def test_help_lists_every_exit_code() -> None:
    documented = {int(code) for code in re.findall(r"(?:codes: |; |\n\s*)(\d+) ", envbuild("--help").stdout)}
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EnvbuildError)
    ]
    assert {kind.code for kind in kinds} - {errors.EnvbuildError.code} <= documented


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["status", "sam"], ["plain,sample"]),
        (["show", "rtx"], ["plain,rtx4090", "plain,rtx4090-cu12", "plain,rtx5090"]),
        (["lock", "sample", "h20"], ["plain,h20", "plain,h20-cu12", "plain,h200", "plain,h200-cu12"]),
        (["make", "profiles/"], ["file,profiles/"]),
        (["build", "nosuch"], []),
    ],
)
def test_a_shell_completes_names_of_profiles(project: Path, words: list[str], found: list[str]) -> None:
    write_profile(project, PROFILE)
    env = {
        "_ENVBUILD_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["envbuild", *words]),
        "COMP_CWORD": str(len(words)),
    }
    code = "import sys; from envbuild.cli import entry as cli; sys.argv = ['envbuild']; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip
    assert done.stdout.split() == found


# failures

CASES: list[tuple[list[str], int]] = [
    (["no-such-command"], 2),
    (["show", "--no-such-option"], 2),
    (["make"], 2),
    (["show", "nosuch", "other"], 3),
    (["show", "nosuch"], 3),
    (["show", "../etc/passwd"], 3),
    (["show", "nosuch.yaml"], 3),
    (["show", "/"], 3),
    (["show", "$(touch /tmp/x)"], 3),
    (["show", "sample\n"], 3),
    (["show", ""], 3),
    (["show", "\udcff"], 3),
    (["show", "\udcff.yaml"], 3),
    (["make", "nosuch", "--locked"], 3),
    (["make", "x/../nosuch.yaml"], 3),
    (["build", "--locked", "Sample"], 3),
    (["lock", "nosuch"], 3),
    (["lock", "nosuch", "--check"], 3),
    (["lock", "sample", "--upgrade", "nosuch"], 2),
    (["status", "sample"], 6),
    (["prune", "--images-only"], 6),
    (["test", "sample"], 6),
    (["test", "sample", "--gpus", "0,1"], 2),  # the profile is for the CPU
    (["test", "--record", "sample", "--gpus", "0"], 2),
    (["make", "sample", "--gpus", "0"], 2),
    (["make", "sample", "--gpus", "0;1"], 2),
    (["test"], 2),
    (["test", "sample", "--probe", "gemm.crsh"], 2),
    (["test", "sample", "--level", "deep"], 2),
    (["test", "--record", "sample", "--image", "x"], 6),
    (["diff", "a.json", "b.json"], 3),
    (["diff", "a.json"], 2),
    (["show", "nosuch", "--html", "x.html"], 3),
    (["show", "--html", "x.html"], 2),
    (["diff", "a.json", "sample"], 2),
    (["test", "sample", "--record", "--level", "quick"], 2),
    (["test", "sample", "--record", "--python", "."], 2),
    (["test", "sample", "other", "--image", "x"], 2),
    (["export", "check", "sample", "other", "-o", "x.py"], 2),
]


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")


@pytest.mark.parametrize(
    ("arguments", "code"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_failure_has_its_exit_code_and_one_document(
    locked: Lock, no_engine: None, arguments: list[str], code: int
) -> None:
    done = envbuild(*arguments)
    assert done.code == code
    assert done.stderr.startswith(("error: ", "  load profile", "  "))
    assert "error: " in done.stderr
    assert done.stdout == ""
    again = envbuild(*arguments, "--json")
    assert again.code == code
    error = again.document["error"]
    assert set(error) == {"code", "kind", "message", "hint", "faults"}
    assert error["code"] == code
    assert isinstance(error["kind"], str)
    assert isinstance(error["message"], str)
    assert all(set(fault) == {"file", "line", "field", "message"} for fault in error["faults"])


@pytest.mark.parametrize("allowed", [False, True])
def test_too_few_gpus_are_reported_before_any_other_fault(project: Path, no_engine: None, allowed: bool) -> None:
    write_profile(project, {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "gpu_count": 2})
    done = envbuild("make", "sample", "--locked", "--gpus", "0", "--json", *(["--allow-unproved"] if allowed else []))
    steps = [step["name"] for step in done.document["steps"]]
    assert (done.code, steps[2:]) == ((8, ["preflight"]) if allowed else (4, []))
    assert allowed or "uses 2 GPUs together, and --gpus names 1" in done.document["error"]["message"]


def pasted(project: Path, stderr: str, command: str) -> list[str]:
    """Return the words of the command in a hint, as a shell would read it."""
    (line,) = [line for line in stderr.splitlines() if f"envbuild {command} " in line]
    words = shlex.split(line.partition("envbuild ")[2])
    assert words[0] == command
    return words


@pytest.mark.parametrize("path", ["./dir/sample.yaml", "a dir/it's/sample.yaml"])
def test_a_hint_names_a_profile_as_it_was_given(project: Path, no_engine: None, path: str) -> None:
    file = project / path
    file.parent.mkdir(parents=True)
    file.write_text(as_yaml(PROFILE), encoding="utf-8")
    for arguments in (["make", path, "--locked"], ["lock", "--check", path], ["export", "check", path]):
        assert pasted(project, envbuild(*arguments).stderr, "lock") == ["lock", path], arguments
    made = lock_for(plan_of(project, PROFILE))
    lock_file.write(made, file.with_name("sample.lock.yaml"), "sample")
    done = envbuild("lock", path)
    assert (done.code, pasted(project, done.stderr, "status")) == (0, ["status", path]), "the next step"
    next(project.rglob("sample.Dockerfile")).unlink()
    assert pasted(project, envbuild("lock", "--check", path).stderr, "lock") == ["lock", path]
    file.write_text(as_yaml({**PROFILE, "apt": ["more"]}), encoding="utf-8")
    assert pasted(project, envbuild("make", path, "--locked").stderr, "lock") == ["lock", path]


def test_a_hint_to_lock_requirements_names_them(project: Path) -> None:
    write_profile(project, PROFILE)
    (project / "my app").mkdir()
    (project / "my app" / "requirements.txt").write_text("einops\n", encoding="utf-8")
    stderr = envbuild("make", "sample", "--locked", "--requirements", "my app/requirements.txt").stderr
    assert pasted(project, stderr, "lock") == ["lock", "sample", "--requirements", "my app/requirements.txt"]


@pytest.mark.parametrize("path", ["./own", "own/", "own", "."])
def test_a_folder_is_reported_with_the_profiles_in_it(project: Path, path: str) -> None:
    folder = project / path
    (folder / "profiles").mkdir(parents=True, exist_ok=True)
    done = envbuild("make", path)
    assert (done.code, f"{path} is a folder" in done.stderr, "it contains no profile" in done.stderr) == (3, True, True)
    for name in ("b.yaml", "b.lock.yaml", "profiles/a.yaml"):
        (folder / name).write_text(as_yaml(PROFILE), encoding="utf-8")
    done = envbuild("make", path)
    named = done.stderr.partition("name one of its profiles: ")[2].split(", ")
    assert [Path(word.strip()) for word in named] == [Path(path) / "b.yaml", Path(path) / "profiles" / "a.yaml"]
    (folder / "b.lock.yaml").unlink()
    assert all(envbuild("show", word.strip()).code == 0 for word in named)


def test_a_path_too_long_is_the_profiles_fault(project: Path) -> None:
    assert envbuild("show", "a" * 300 + ".yaml").code == 3


def test_a_name_too_long_is_the_profiles_fault(project: Path) -> None:
    assert envbuild("make", "a" * 300).code == 3


def test_faults_are_listed_with_their_places(project: Path) -> None:
    write_profile(project, {**PROFILE, "torh": "1", "apt": ["Less"]})
    done = envbuild("show", "sample")
    assert done.code == 3
    assert re.search(
        r"^  profiles/sample\.yaml:\d+: torh: unknown key \(did you mean torch\?\)$", done.stderr, re.MULTILINE
    )
    faults = envbuild("show", "sample", "--json").document["error"]["faults"]
    assert {fault["field"] for fault in faults} == {"torh", "apt[0]"}
    assert {fault["file"] for fault in faults} == {"profiles/sample.yaml"}


HOSTILE_FILES = [
    b"", b"\0", b"\xff\xfe", b"[", b"- a", b"a: &x [*x]", b"a: !!python/object:os.system x", b"a: " + b"[" * 9999,
    b"a: 1\na: 2", b"{}", b"extends: sample", b"a: " + b"x" * 2_000_000, b"%YAML 9.9\n---\na: 1", b"\xef\xbb\xbfa: 1",
]  # fmt: skip


@pytest.mark.parametrize("verb", ["show", "make", "lock", "status", "build", "test"])
def test_no_file_brings_a_traceback(project: Path, no_engine: None, verb: str) -> None:
    file = project / "profiles" / "sample.yaml"
    for content in HOSTILE_FILES:
        file.write_bytes(content)
        codes = {envbuild(verb, "sample").code, envbuild(verb, "profiles/sample.yaml", "--json").code}
        assert codes == {3}, content[:40]


@pytest.mark.parametrize("verb", ["show", "lock", "make", "test"])
def test_no_lock_brings_a_traceback(locked: Lock, project: Path, no_engine: None, verb: str) -> None:
    file = project / "profiles" / "sample.lock.yaml"
    for content in [content for content in HOSTILE_FILES if content != b"extends: sample"]:
        file.write_bytes(content)
        assert envbuild(verb, "sample").code == 3, content[:40]


def test_no_dockerfile_brings_a_traceback(locked: Lock, project: Path) -> None:
    (project / "dockerfiles" / "sample.Dockerfile").write_bytes(b"\xff\xfe")
    assert envbuild("lock", "--check", "sample").code == 8


def test_a_failure_of_make_says_what_was_done(locked: Lock, no_engine: None) -> None:
    done = envbuild("make", "sample", "--locked", "--json")
    document = done.document
    assert document["evidence"] == [] and document["image"] is None
    assert (done.code, document["error"]["code"], document["error"]["kind"]) == (6, 6, "engine")
    assert (document["profile"], document["state"], document["lock"]) == ("sample", "failed", None)
    assert [step["name"] for step in document["steps"]] == ["load profile", "resolve"]


# `show`, `lock` and `audit`


def test_show_prints_nvcc_and_forward_compatibility(project: Path) -> None:
    compat = {"sha256": "b" * 64, "url": "https://mirror.example/compat.deb"}
    driver = {"minimum": "550.54.14", "compat": compat}
    write_profile(project, {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "driver": driver})
    devel = envbuild("show", "sample-devel", "--json").document
    home = "/opt/venv/lib/python3.11/site-packages/nvidia/cu13"
    assert (devel["profile"], devel["variant"], devel["forward_compatibility"]) == ("sample-devel", "devel", "b" * 64)
    assert devel["nvcc"] == {"release": "13.0", "home": home}
    text = envbuild("show", "sample-devel").stdout
    assert "driver 550.54.14 or newer (forward-compatibility libraries" in text
    assert f"devel: nvcc of CUDA 13.0, {home}" in text
    runtime = envbuild("show", "sample", "--json").document
    assert (runtime["variant"], runtime["nvcc"]) == ("runtime", None)


def test_show_says_that_it_does_not_ask_an_index_for_a_pin(project: Path) -> None:
    write_profile(project, {**PROFILE, "gpus": ["h20"], "torch": "2.7.1"})

    def reason(name: str, version: str) -> str:
        document = envbuild("show", "sample", "--json", "--pin", f"{name}={version}").document
        assert document["pins"][name] == version
        return str(document["reasons"][name])

    unchecked = "; not checked: whether an index has it"
    assert reason("cublas", "12.6.9.9").endswith(unchecked)
    assert reason("numpy", "9.9").endswith(unchecked)
    assert unchecked not in reason("cublas", "12.5.3.2"), "the facts know that one"


def test_show_prints_the_remedy_of_a_warning(project: Path) -> None:
    changes = {"torch": "2.4.0", "gpus": ["a100"], "packages": ["numpy<2"]}
    write_profile(project, {**PROFILE, **changes, "accept": [{"advisory": "nccl-abort-hang", "reason": "known"}]})
    lines = envbuild("show", "sample").stdout.splitlines()
    (at,) = [index for index, line in enumerate(lines) if line.startswith("  warned: rmsnorm-half-torch-2.4: ")]
    assert lines[at + 1].startswith("    fix: torch 2.6 or newer")


def test_show_names_an_extension_that_is_left_out(project: Path) -> None:
    write_profile(project, {**PROFILE, "extensions": [{"name": "flash-attn", "none": "not here"}]})
    found = envbuild("show", "sample", "--json").document
    assert found["pins"]["flash-attn"] is None
    assert found["reasons"]["flash-attn"].endswith("none: not here")


def test_show_names_a_commit_by_twelve_digits_and_a_version_in_full(project: Path) -> None:
    entry = {"name": "kernels", "git": "https://git.example/k", "commit": "6424da3b" * 5, "modules": ["k"]}
    write_profile(project, {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [entry]})
    lines = envbuild("show", "sample").stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("  kernels ")]
    assert line.split()[1] == "6424da3b6424"
    assert envbuild("show", "sample", "--json").document["pins"]["kernels"] == "6424da3b" * 5


def test_show_prints_pins_and_reasons(locked: Lock) -> None:
    found = envbuild("show", "sample", "--json").document
    assert found["pins"]["torch"] == "2.13.0+cpu"
    assert found["pins"]["numpy"] == "1.0"
    assert found["reasons"]["torch"].startswith("profiles/sample.yaml:")
    assert list(found["reasons"]) == list(found["pins"])
    assert (found["lock"], found["lock_state"]) == (locked.id, "current")
    assert envbuild("show", "sample").code == 0


def test_show_lists_all_profiles_the_broken_ones_too(locked: Lock, project: Path) -> None:
    (project / "profiles" / "broken.yaml").write_text("- x\n", encoding="utf-8")
    done = envbuild("show", "--json")
    rows = {row["profile"]: row for row in done.document["profiles"]}
    assert done.code == 0
    assert (rows["sample"]["lock"], rows["sample"]["lock_state"]) == (locked.id, "current")
    assert (rows["sample"]["torch"], rows["sample"]["state"]) == ("2.13.0+cpu", "unverified")
    assert "not a mapping" in rows["broken"]["reason"]
    assert "not a mapping" in envbuild("show").stdout


def test_lock_check_is_offline_and_says_what_is_stale(
    locked: Lock, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert envbuild("lock", "--check", "sample").code == 0
    write_profile(project, {**PROFILE, "torch": "9.0", "env": {}})
    done = envbuild("lock", "--check", "sample")
    assert done.code == 8
    assert "wheels, environment changed" in done.stderr
    (project / "profiles" / "sample.lock.yaml").unlink()
    assert envbuild("lock", "--check", "sample").code == 8


@pytest.fixture
def elsewhere(locked: Lock, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and an installed envbuild with the profile `sample` and its lock."""
    root = project.parent / "site-packages" / "shipped"
    shutil.copytree(project / "profiles", root / "profiles")
    monkeypatch.setattr(package_data, "ROOT", root)
    monkeypatch.setattr(package_data, "PROFILES", root / "profiles")
    folder = project.parent / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_the_shipped_lock_is_good_in_an_empty_folder(locked: Lock, elsewhere: Path) -> None:
    shown = envbuild("show", "sample", "--json").document
    assert (shown["lock"], shown["lock_state"]) == (locked.id, "current")
    done = envbuild("lock", "--check", "sample", "--json")
    assert (done.code, [row["lock"] for row in done.document["profiles"]]) == (0, [locked.id])
    assert list(elsewhere.iterdir()) == []
    done = envbuild("lock", "sample")
    assert done.code == 0
    assert "  wrote profiles/sample.lock.yaml\n  wrote dockerfiles/sample.Dockerfile\n" in done.stdout
    assert done.stderr.endswith("next: envbuild make sample\n")
    assert sorted(str(file.relative_to(elsewhere)) for file in elsewhere.rglob("*") if file.is_file()) == [
        "dockerfiles/sample.Dockerfile", "profiles/sample.lock.yaml",
    ]  # fmt: skip
    (elsewhere / "dockerfiles" / "sample.Dockerfile").unlink()
    assert envbuild("lock", "--check", "sample").code == 8


def test_an_audit_knows_the_shipped_lock(locked: Lock, elsewhere: Path) -> None:
    assert audit._expected("sample").lock == locked
    labelled = audit.contents_by_label(dataclasses.replace(image_of(), labels={LOCK_LABEL: locked.id}))
    assert labelled is not None
    assert (labelled.profile, labelled.lock, labelled.claimed) == ("sample", locked, True)


@pytest.mark.parametrize("labelled", [True, False])
def test_an_audit_for_a_profile_knows_an_image_of_its_lock(
    locked: Lock, monkeypatch: pytest.MonkeyPatch, labelled: bool
) -> None:
    """Only such an image is fixed by `envbuild make`."""
    image = dataclasses.replace(image_of(), labels={LOCK_LABEL: locked.id if labelled else "another"})
    judged: list[Expected] = []
    monkeypatch.setattr("envbuild.image.docker_engine.Engine", lambda: SimpleNamespace(get=lambda reference: image))
    monkeypatch.setattr("envbuild.audit.image_collector.collect_from_image", lambda *arguments: None)
    monkeypatch.setattr(
        "envbuild.audit.environment_audit.assess", lambda reference, held, wanted: judged.append(wanted)
    )
    audit._image("it", audit._expected("sample"))
    assert [(wanted.claimed, wanted.image) for wanted in judged] == [(labelled, True)]


def test_lock_names_the_file_that_it_means(elsewhere: Path) -> None:
    (row,) = envbuild("lock", "sample", "--json").document["profiles"]
    assert (elsewhere / row["lock_file"]).is_file()


@pytest.mark.parametrize("arguments", [["export", "check", "sample"], ["status", "sample", "--outdated"]])
def test_every_command_reports_a_missing_lock_in_the_same_way(
    locked: Lock, project: Path, arguments: list[str]
) -> None:
    (project / "profiles" / "sample.lock.yaml").unlink()
    error = envbuild(*arguments, "--json").document["error"]
    assert (error["code"], error["message"], error["hint"]) == (
        8, "profiles/sample.lock.yaml is missing", "run: envbuild lock sample",
    )  # fmt: skip


def test_lock_leaves_a_current_lock_alone(locked: Lock, project: Path) -> None:
    file = project / "profiles" / "sample.lock.yaml"
    before = file.read_bytes()
    assert "(unchanged)" in envbuild("lock", "sample").stdout
    assert file.read_bytes() == before


def test_lock_check_sees_a_changed_dockerfile_and_writes_nothing(locked: Lock, project: Path) -> None:
    file = project / "dockerfiles" / "sample.Dockerfile"
    assert envbuild("lock", "--check", "sample").code == 0
    file.write_text("FROM scratch\n", encoding="utf-8")
    done = envbuild("lock", "--check", "sample")
    assert (done.code, "dockerfiles/sample.Dockerfile does not match the lock" in done.stderr) == (8, True)
    assert file.read_text(encoding="utf-8") == "FROM scratch\n"
    done = envbuild("lock", "sample")
    assert "wrote dockerfiles/sample.Dockerfile" in done.stdout
    assert "next: envbuild status sample\n" in done.stderr, "the lock is the same"
    assert envbuild("lock", "--check", "sample").code == 0
    file.unlink()
    done = envbuild("lock", "--check", "sample")
    assert (done.code, "dockerfiles/sample.Dockerfile is missing" in done.stderr) == (8, True)
    assert not file.exists()


def test_a_pin_that_is_only_tried_writes_no_dockerfile(
    locked: Lock, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (project / "dockerfiles" / "sample.Dockerfile").read_bytes()
    other = dataclasses.replace(locked)
    monkeypatch.setattr("envbuild.lock.lock_creation_and_update.update_lock", lambda *_, **__: other)
    monkeypatch.setattr("envbuild.image.container_definition_export.standalone_dockerfile", lambda *_: "FROM scratch\n")
    assert envbuild("lock", "sample", "--pin", "numpy=1.0").code == 0
    assert (project / "dockerfiles" / "sample.Dockerfile").read_bytes() == before


def test_lock_check_reports_all_that_is_invalid_and_out_of_date(locked: Lock, project: Path) -> None:
    profiles = project / "profiles"
    (profiles / "broken.yaml").write_text("extends: sample\ntorhc: 2.7.1\n", encoding="utf-8")
    (profiles / "new.yaml").write_text("extends: sample\n", encoding="utf-8")
    (profiles / "odd.yaml").write_text("extends: sample\n", encoding="utf-8")
    (profiles / "odd.lock.yaml").write_text("format: [\n", encoding="utf-8")
    done = envbuild("lock", "--check")
    assert done.code == 3, "of several the worst counts: 3 before 8"
    assert done.stderr.startswith("error: invalid: 2 of 4 profiles; out of date: 1\n")
    assert "profiles/broken.yaml:2: torhc: unknown key" in done.stderr
    assert "profiles/odd.lock.yaml:2: " in done.stderr and "new" in done.stderr
    assert "hint: correct the errors; then envbuild lock" in done.stderr


def test_audit_takes_one_thing_at_a_time() -> None:
    both = envbuild("audit", "--here", "--python", ".venv")
    assert (both.code, "more than one target: --python and --here" in both.stderr) == (2, True)
    assert "nothing to audit: give" in envbuild("audit").stderr


@pytest.mark.parametrize(("number", "expected"), [(0, "0 tries"), (1, "1 try"), (2, "2 tries")])
def test_one_item_is_singular(number: int, expected: str) -> None:
    assert errors.some(number, "try", "tries") == expected
    assert errors.some(number, "block") == f"{number} block{'' if number == 1 else 's'}"


NOT_THERE = [
    ["show", "nosuch.yaml"], ["lock", "cpu", "--requirements", "nosuch.txt"], ["explain", "nosuch.log"],
    ["diff", "nosuch.json", "nosuch.json"], ["docs", "nosuch.md"], ["pin-digests", "nosuch"],
    ["verify", "r.example/a:b", "--policy", "nosuch.yaml"], ["verify", "r.example/a:b", "--key", "nosuch.pub"],
    ["verify", "--evidence", "nosuch.json", "--key", "nosuch.pub"], ["doctor", "--cluster", "nosuch.yaml"],
    ["bisect", "cpu", "--pin", "numpy", "--script", "nosuch.py"], ["load", "nosuch.tar"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", NOT_THERE, ids=" ".join)
def test_an_unreadable_file_exits_with_3_in_every_command(project: Path, arguments: list[str]) -> None:
    done = envbuild(*arguments)
    assert (done.code, "nosuch" in done.stderr) == (3, True), done.stderr
    assert "Errno" not in done.stderr


@pytest.mark.parametrize("arguments", NOT_THERE, ids=" ".join)
def test_a_file_that_is_not_text_exits_with_3_in_every_command(project: Path, arguments: list[str]) -> None:
    for name in {argument for argument in arguments if argument.startswith("nosuch")}:
        (project / name).write_bytes(b"\x7fELF\x02\xff\xfe\x00\x01" * 9)
    done = envbuild(*arguments)
    assert done.code == (5 if arguments[0] == "load" else 3), done.stderr  # a saved image is verified, and fails


def test_schema_prints_the_schema() -> None:
    assert envbuild("export", "schema").document["title"] == "envbuild profile"


# commands in a separate process


@pytest.mark.slow
def test_real_processes_exit_with_their_code_and_no_traceback(locked: Lock, project: Path) -> None:
    with ThreadPoolExecutor() as pool:
        shown = pool.submit(spawned, "show", "sample", "--json")
        unknown = pool.submit(spawned, "show", "nosuch", "--json")
        status = pool.submit(spawned, "status", "sample", DOCKER_HOST="unix:///no/such.sock")
    assert shown.result().document["profile"] == "sample"
    done = unknown.result()
    assert (done.code, done.document["error"]["kind"], done.stderr) == (3, "profile", "")
    done = status.result()
    assert (done.code, done.stdout) == (6, "")
    assert "no Docker Engine answers at unix:///no/such.sock" in done.stderr and "Traceback" not in done.stderr


def test_odd_bytes_as_arguments_cause_no_traceback(project: Path) -> None:
    command: list[str | bytes] = [sys.executable, "-m", "envbuild", "show", b"\xff\n\x1b[2J.yaml"]
    done = subprocess.run(
        command, capture_output=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C"}
    )
    assert done.returncode == 3
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("where", ["message", "hint", "faults"])
def test_foreign_text_reaches_no_terminal_raw(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such text is, for example, a container's last output, a file name in a foreign layer, or a registry's answer."""
    hostile: Any = "one\ttwo\x1b[2J\nthree\u202efour\udcff"
    given: Any = {"message": "it failed"} | {where: [errors.Fault(hostile)] if where == "faults" else hostile}

    def fail() -> None:
        raise errors.CheckFailed(**given)

    monkeypatch.setattr(entry.cli, "main", lambda **_: fail())
    result = envbuild("show")
    assert result.code == errors.CheckFailed.code
    lines = result.stderr.splitlines()
    assert all(line.replace("\t", "").isprintable() for line in lines)
    assert "one\ttwo\N{REPLACEMENT CHARACTER}[2J" in result.stderr
    assert next(line for line in lines if "three" in line).strip() == "three\ufffdfour\ufffd"
    assert json.loads(envbuild("show", "--json").stdout)["error"]["kind"] == "check"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["export schema", "show", "show cpu", "status --help", "advisories"])
@pytest.mark.parametrize("lines", ["c 0", "n 1"])
def test_a_closed_output_is_not_a_fault(project: Path, command: str, lines: str) -> None:
    script = f"set -o pipefail; '{sys.executable}' -m envbuild {command} | head -{lines}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0
    assert done.stderr == ""


CLOSED_OUTPUT = (
    (["export", "schema"], 0),
    (["show", "nosuch"], 3),
    (["show", "nosuch", "--json"], 3),
    (["make", "nosuch", "none"], 3),
    (["make", "nosuch", "none", "--json"], 3),
)


@pytest.mark.slow
@pytest.mark.parametrize("stderr", [False, True], ids=["stdout", "both"])
def test_a_closed_output_keeps_the_exit_code(project: Path, tmp_path: Path, stderr: bool) -> None:
    """If stderr is closed too, the first progress line ends the command with exit code 1."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DOCKER_HOST": "tcp://127.0.0.1:9"}
    every = json.dumps([arguments for arguments, _ in CLOSED_OUTPUT])
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", FORKED, every, tmp_path / "codes"], stdout=write,
            stderr=write if stderr else subprocess.PIPE, text=True, timeout=60, env=env,
        )  # fmt: skip
    finally:
        os.close(write)
    codes = json.loads((tmp_path / "codes").read_text())
    for (arguments, code), found in zip(CLOSED_OUTPUT, codes, strict=True):
        assert found in ((code, 1) if stderr else (code,)), arguments
    assert "Traceback" not in (done.stderr or "") and "Exception" not in (done.stderr or "")


# Imports envbuild once, without an engine. Each command runs in a forked process, which ends as Python always ends.
FORKED = """
import json, os, sys, types
from envbuild.cli import entry
from envbuild.pipeline.step_context import StepContext
StepContext.engine = types.SimpleNamespace(cpus=1, memory_bytes=0)
_, every, file = sys.argv
codes = []
for arguments in json.loads(every):
    child = os.fork()
    if child == 0:
        sys.argv[1:] = arguments
        entry.main()
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with open(file, "w") as written:
    json.dump(codes, written)
"""


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (OSError(28, "No space left on device", "/x"), 6),
        (PermissionError(13, "Permission denied", "/x"), 6),
    ],
)
@pytest.mark.parametrize("wants_json", [False, True])
def test_faults_of_the_machine_cause_no_traceback(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, wants_json: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(entry.cli, "main", fail)
    done = envbuild("show", *(["--json"] if wants_json else []))
    assert done.code == code
    assert "Traceback" not in done.stderr
    assert not wants_json or json.loads(done.stdout)["error"]["code"] == code
    if code == 130 and not wants_json:
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: interrupted: ") and line.endswith("; run the same command again")


def test_errors_have_kinds_of_their_own() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EnvbuildError)
    ]
    assert len({kind.kind for kind in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (errors.Fault("m"), "m"),
        (errors.Fault("m", "f"), "f: m"),
        (errors.Fault("m", "f", 3), "f:3: m"),
        (errors.Fault("m", "f", 3, "a.b"), "f:3: a.b: m"),
        (errors.Fault("m", None, 3, "a"), "a: m"),
    ],
)
def test_a_fault_reads_as_file_line_field_message(fault: errors.Fault, text: str) -> None:
    assert str(fault) == text


def test_yaml_of_the_tests_is_yaml() -> None:
    assert as_yaml({"a": "\x85"}) == '{\n "a": "\\u0085"\n}'


def test_a_mistyped_command_is_named() -> None:
    done = envbuild("mkae", "cpu")
    assert (done.code, "did you mean make?" in done.stderr) == (2, True)
    assert "did you mean" not in envbuild("zzzzzz").stderr
    assert "(`bundle export` is now `save`, `bundle import` is now `load`)" in envbuild("bundle", "--help").stderr


# names in the previous release


def test_every_old_name_works_and_says_the_new_one(locked: Lock, project: Path, no_engine: None) -> None:
    commit = f"git+https://git.example/envbuild@{'0123456789' * 4}"
    fingerprint = str(ROOT / "tests" / "golden" / "report" / "nosuch.json")
    calls = {
        "bundle export": (["sample", "-o", "a.tar", "--unsigned"], 6),
        "bundle import": (["nosuch.tar"], 3),
        "ci": (["github", "sample", "--install", commit], 0),
        "compare": ([fingerprint, fingerprint], 3),
        "facts advisories": ([], 0),
        "new": (["mine", "--from", "sample"], 0),
        "pin": (["nosuch"], 3),
        "prove": (["sample"], 6),
        "render": (["sample", "--check"], 0),
        "report": (["sample", "-o", "page.html"], 0),
        "schema": ([], 0),
    }
    assert set(calls) == set(entry.OLD_NAMES)
    for old, (arguments, code) in calls.items():
        done = envbuild(*old.split(), *arguments)
        new = "show --html" if old == "report" else entry.OLD_NAMES[old]
        assert done.stderr.splitlines()[0] == f"note: `envbuild {old}` is now `envbuild {new}`"
        assert done.code == code, done.stderr
        assert "note: " not in done.stdout
    assert (project / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_help_lists_no_old_name() -> None:
    assert not {old.split()[0] for old in entry.OLD_NAMES} & set(NAMES)


# These files may still name old commands: evidence and image ids are computed from the files, so a text in them is only
# changed together with other changes.
KEPT = {
    "envbuild/selftest/model.py",
    "envbuild/selftest/numerics/fingerprint_document.py",
    "dockerfiles/extension.Dockerfile.j2",
}
NAMED = re.compile(rf"envbuild (?:{'|'.join(map(re.escape, entry.OLD_NAMES))})(?![\w-])|`(?:prove|bundle|render) --")


def test_no_text_names_an_old_command() -> None:
    listed = (
        "README.md",
        "CONTRIBUTING.md",
        "Makefile",
        ".pre-commit-hooks.yaml",
        "docs",
        "envbuild",
        "evidence",
        "profiles",
    )
    files = [
        path for name in listed for path in ((ROOT / name).rglob("*") if (ROOT / name).is_dir() else [ROOT / name])
    ]
    found = []
    for file in files:
        name = str(file.relative_to(ROOT))
        if file.suffix == ".pyc" or not file.is_file() or name in KEPT or "docs/decisions/" in name:
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        found += [f"{name}: {match[0]}" for match in NAMED.finditer(text)]
    assert found == []


def test_the_old_report_needs_its_file(project: Path) -> None:
    assert envbuild("report", "cpu", "-opage.html").code == 0
    assert Path("page.html").exists()
    done = envbuild("report", "cpu")
    assert (done.code, done.stdout) == (2, "")
    assert "`envbuild report` needs -o" in done.stderr


@pytest.mark.parametrize("option", ["--line", "--driver"])
def test_an_option_of_make_alone_is_explained(option: str) -> None:
    done = envbuild("show", "h20", option, "cu12")
    assert done.code == 2 and "--line and --driver are options of make" in done.stderr
