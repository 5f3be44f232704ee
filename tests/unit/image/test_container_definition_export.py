"""The exported Dockerfile, Apptainer definition and devcontainer.json: golden files, and their commands run here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from envbuild.image import container_definition_export
from envbuild.lock import lock_file, project_and_conda_export, requirements_export
from envbuild.lock.lock_file import Lock
from envbuild.profile.model import Profile
from envbuild.resolve import profile_reader_and_overrides
from unit import oracle
from unit.lock.overridden import (
    CUBLAS,
    NEW,
    OVERRIDE,
    installed,
    installed_tool,
    overridden_lock,
    venv_with_pip,
    write_wheels,
)
from unit.support import PROFILE, deb, profile_of

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = ("cpu", "hostile-env", "image-base", "extensions")
KINDS = ("dockerfile", "apptainer", "devcontainer", "uv", "poetry", "conda", "requirements", "constraints")


def rendered(kind: str, lock: Lock, profile: Profile, name: str) -> str:
    files = {
        "dockerfile": lambda: container_definition_export.standalone_dockerfile(lock, name),
        "apptainer": lambda: container_definition_export.apptainer_definition(lock, profile, name),
        "devcontainer": lambda: container_definition_export.devcontainer(lock, profile, name),
        "uv": lambda: project_and_conda_export.uv_project(lock, name),
        "poetry": lambda: project_and_conda_export.poetry_project(lock, name),
        "conda": lambda: project_and_conda_export.conda_environment(lock, name),
        "requirements": lambda: requirements_export.requirements(lock, name),
        "constraints": lambda: requirements_export.constraints(lock, name),
    }
    return files[kind]()


def golden_case(name: str) -> tuple[Lock, Profile]:
    """A golden lock with its profile; `override` is `cpu` with an override of numpy."""
    folder = GOLDEN / ("cpu" if name == "override" else name)
    found = lock_file.read(folder / "lock.yaml")
    assert found is not None
    profile = profile_reader_and_overrides.load(str(folder / "profile.yaml")).profile
    return replace(
        found, overrides=(replace(OVERRIDE, name="numpy", version="1.0"),)
    ) if name == "override" else found, profile


def golden_text(name: str) -> str:
    """Every exported file of a case, each under its kind."""
    lock, profile = golden_case(name)
    return "".join(f"==> {kind}\n{rendered(kind, lock, profile, name)}" for kind in KINDS)


@pytest.mark.parametrize("name", (*CASES, "override"))
def test_the_exported_files_are_the_golden_ones(name: str) -> None:
    assert golden_text(name) == (GOLDEN / "exports" / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", (*CASES, "override"))
def test_nothing_of_a_lock_becomes_an_instruction(name: str) -> None:
    lock, profile = golden_case(name)
    found = oracle.parse(rendered("dockerfile", lock, profile, name))
    variables = {"PYTHONDONTWRITEBYTECODE": "1", **lock.environment}
    expected = ["ARG", "FROM", "USER", "ENTRYPOINT", *([] if lock.image else ["COPY", "ARG", "RUN"]), "COPY", "RUN"]
    expected += ["ARG", "RUN", *(["RUN"] * 2 if lock.overrides else []), *["ENV"] * len(variables), "LABEL", "CMD"]
    assert [one.keyword for one in found] == expected
    assert {one.arguments[0]: one.arguments[1] for one in found if one.keyword == "ENV"} == variables
    assert [one.arguments for one in found if one.keyword == "LABEL"] == [("io.envbuild.lock", lock.id)]
    assert found[0].arguments == (f"BASE={lock.image or f'debian:{lock.suite}-slim'}",)


def test_every_package_is_listed_once_by_its_version_or_hash() -> None:
    lock, profile = golden_case("apt-layer")
    text = rendered("dockerfile", lock, profile, "sample")
    packages = text.partition("<<'PACKAGES' /opt/packages.txt\n")[2].partition("\nPACKAGES\n")[0].splitlines()
    pins = {f"{deb.name}={deb.version}" for deb in (*lock.base, *lock.apt)}
    assert packages == sorted(pins), "no Python in this base"
    python = deb(f"python{lock.python}", "3.13.5-2")
    whole = rendered("dockerfile", replace(lock, base=(*lock.base, python)), profile, "sample")
    assert f"\n{python.name}=3.13.5-2\n{python.name}-venv=3.13.5-2\n" in whole
    wheels = text.partition("<<'REQUIREMENTS' /opt/requirements.txt\n")[2].partition("\nREQUIREMENTS\n")[0].splitlines()
    hashes = (one.wheel for one in lock.wheels)
    assert wheels == sorted(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}" for pin in hashes)


@pytest.mark.parametrize(
    ("versions", "code", "installed"),
    [("locked", 0, ["b=2", "a=1"]), ("newest", 0, ["b", "a"]), ("none", 0, None), ("latest", 2, None)],
)
def test_the_versions_of_debian_packages_can_be_chosen(
    tmp_path: Path, versions: str, code: int, installed: list[str] | None
) -> None:
    """The instruction runs here, with a stand-in for apt-get."""
    lock, profile = golden_case("apt-layer")
    text = rendered("dockerfile", lock, profile, "sample").partition("\nRUN case")[2].partition("\nCOPY")[0]
    (tmp_path / "apt-get").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/apt.txt\n')
    (tmp_path / "apt-get").chmod(0o755)
    (tmp_path / "packages.txt").write_text("b=2\na=1\n")
    script = f"case{text}".replace("/opt/packages.txt", f"{tmp_path}/packages.txt").replace(
        "/var/lib", f"{tmp_path}/var"
    )
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DEBIAN_VERSIONS": versions}
    assert subprocess.run(["sh", "-c", script], env=environment, capture_output=True).returncode == code
    calls = (tmp_path / "apt.txt").read_text().splitlines() if (tmp_path / "apt.txt").exists() else []
    assert [call.split()[-2:] for call in calls[1:]] == ([installed] if installed else [])


@pytest.mark.parametrize("name", CASES)
def test_the_sections_of_the_definition_are_shell_scripts(name: str, tmp_path: Path) -> None:
    """The environment that %environment sets is the lock's."""
    lock, profile = golden_case(name)
    text = rendered("apptainer", lock, profile, name)
    sections = sections_of(text)
    assert list(sections) == ["post", "environment", "runscript"]
    head = [line for line in text.partition("%post")[0].splitlines() if line and not line.startswith("#")]
    assert head == ["Bootstrap: docker", f"From: {lock.image or f'debian:{lock.suite}-slim'}"]
    for content in sections.values():
        assert subprocess.run(["sh", "-n"], input=content, text=True).returncode == 0
    printed = subprocess.run(
        ["/bin/sh", "-c", f"{sections['environment']}\n/usr/bin/env -0"], env={}, capture_output=True, text=True
    ).stdout
    found = dict(row.split("=", 1) for row in printed.split("\0") if row)
    expected = {key: value for key, value in lock.environment.items() if key not in ("HOME", "USER")}
    assert expected.items() <= found.items()


@pytest.mark.parametrize("value", ["{{ x }}", "{{x}}", "{{{ x }}}", "it's {{ x }}'{{ y }}", "{'{ x }}"])
def test_apptainer_finds_no_build_argument_in_a_variable(project: Path, value: str) -> None:
    """Apptainer 1.2 and newer refuses a definition with `{{ x }}` if no argument x is given."""
    lock, profile = golden_case("cpu")
    lock = replace(lock, environment={"TEMPLATE": value})
    text = container_definition_export.apptainer_definition(lock, profile, "sample")
    assert "{{" not in text
    script = sections_of(text)["environment"] + 'printf %s "$TEMPLATE"'
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == value


PARSE = """
import json, sys
from spython.main.parse.parsers import SingularityParser
(found,) = SingularityParser(sys.argv[1]).recipe.values()
print(json.dumps([found.fromHeader, found.environ, found.install, found.cmd]))
"""


@pytest.fixture(scope="module")
def spython(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed_tool(tmp_path_factory.mktemp("spython"), "spython>=0.3.14,<0.4") / "python"


@pytest.mark.parametrize("name", CASES)
def test_another_parser_of_definitions_reads_the_same(name: str, spython: Path, tmp_path: Path) -> None:
    """spython, a client of Singularity, which has the same format; Apptainer is not installed here. spython splits a
    value with a line break, so only the names of the variables are compared."""
    lock, profile = golden_case(name)
    (tmp_path / "sample.def").write_text(rendered("apptainer", lock, profile, name), encoding="utf-8")
    command = [str(spython), "-c", PARSE, str(tmp_path / "sample.def")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    base, variables, post, start = json.loads(done.stdout)
    assert base == (lock.image or f"debian:{lock.suite}-slim")
    assert {one.partition("=")[0] for one in variables} >= set(lock.environment) - {"HOME", "USER"}
    hashes = [line for line in post if " --hash=sha256:" in line]
    assert len(hashes) == len({one.wheel.name for one in lock.wheels} - {"pip"})
    assert start == 'exec python "$@"'


def sections_of(text: str) -> dict[str, str]:
    parts = re.split(r"(?m)^%([a-z]+)\n", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_devcontainer_builds_the_dockerfile_and_passes_the_gpus(project: Path) -> None:
    lock, profile = golden_case("cpu")
    for gpus in ((), ("h20",)):
        text = container_definition_export.devcontainer(lock, profile.model_copy(update={"gpus": gpus}), "sample")
        comments = [line for line in text.splitlines() if line.startswith("//")]
        document = json.loads("".join(line for line in text.splitlines() if not line.startswith("//")))
        assert document["build"] == {"dockerfile": "Dockerfile-sample"}
        assert document.get("runArgs") == (["--gpus", "all"] if gpus else None)
        assert set(document) <= {"name", "build", "runArgs", "hostRequirements"}
        assert "//   envbuild export dockerfile sample -o .devcontainer/Dockerfile-sample" in comments


# the commands of the files, on this machine: its Python, a folder instead of /opt, no apt-get


@pytest.fixture
def prepared(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Lock]:
    wheels = write_wheels(tmp_path / "wheels")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    stand_in = tmp_path / "bin" / "apt-get"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/apt.txt\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(stand_in.parent), prepend=":")
    (tmp_path / "opt").mkdir()
    return tmp_path.resolve(), overridden_lock(project, wheels)


def moved(script: str, folder: Path) -> str:
    return script.replace("/opt/", f"{folder}/opt/").replace("/var/lib/apt", f"{folder}/apt")


def without_venv(script: str, folder: Path) -> str:
    """Return the moved script without the command that makes an environment with pip, which takes five seconds; make
    such an environment."""
    venv_with_pip(folder / "opt" / "venv")
    rest, count = re.subn(r"(?m)^ +python3\.\d+ -m venv /opt/venv\n", "", script)
    assert count == 1
    return moved(rest, folder)


@pytest.mark.slow
def test_post_of_the_definition_makes_the_environment(prepared: tuple[Path, Lock], project: Path) -> None:
    folder, lock = prepared
    profile = profile_of(project, PROFILE).profile
    text = container_definition_export.apptainer_definition(lock, profile, "sample")
    subprocess.run(["sh"], input=moved(sections_of(text)["post"], folder), text=True, check=True)
    venv = folder / "opt" / "venv"
    assert {name: installed(venv, name) for name in lock.versions} == lock.versions
    subprocess.run([venv / "bin" / "pip", "install", "--quiet", "torchvision"], check=True)
    assert installed(venv) == NEW, "a later pip install keeps the override"
    update, packages = (folder / "apt.txt").read_text().splitlines()
    assert update == "update" and {"python3-venv", "less"} < set(packages.split())


@pytest.mark.slow
def test_an_override_that_does_not_hold_fails_in_the_definition(prepared: tuple[Path, Lock], project: Path) -> None:
    folder, lock = prepared
    text = container_definition_export.apptainer_definition(lock, profile_of(project, PROFILE).profile, "sample")
    post = re.sub(r"(?m)^    sed .*\n", "", without_venv(sections_of(text)["post"], folder))
    done = subprocess.run(["sh"], input=post, text=True, capture_output=True)
    assert done.returncode == 1 and f"torch 2.3.1 has requirement {CUBLAS}==" in done.stdout


@pytest.mark.slow
def test_a_changed_hash_fails_in_the_definition_and_in_the_dockerfile(
    prepared: tuple[Path, Lock], project: Path
) -> None:
    folder, lock = prepared
    profile = profile_of(project, PROFILE).profile
    sha256 = next(locked.wheel.sha256 for locked in lock.wheels if locked.wheel.name == CUBLAS)
    post = sections_of(container_definition_export.apptainer_definition(lock, profile, "sample"))["post"]
    script = without_venv(post.replace(sha256, "0" * 64), folder)
    done = subprocess.run(["sh"], input=script, text=True, capture_output=True)
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr
    dockerfile = container_definition_export.standalone_dockerfile(lock, "sample")
    assert all(command in post for command in re.findall(r"(?m)^RUN ((?:sed|if) .*)$", dockerfile))
    (folder / "opt" / "requirements.txt").write_text(
        dockerfile.partition("requirements.txt\n")[2].partition("\nREQUIREMENTS")[0].replace(sha256, "0" * 64)
    )
    download = re.search(r"bin/pip (download .*?) && ", dockerfile)
    assert download
    arguments = moved(download[1], folder).replace("/var/cache", f"{folder}/cache").split()
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], text=True, capture_output=True)
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr


def test_buildkit_accepts_the_dockerfile(prepared: tuple[Path, Lock], project: Path) -> None:
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker Engine responds: docker build --check was not run")
    if b"--check" not in subprocess.run(["docker", "build", "--help"], capture_output=True).stdout:
        pytest.skip("this docker has no build --check")
    text = container_definition_export.standalone_dockerfile(prepared[1], "sample")
    done = subprocess.run(["docker", "build", "--check", "-"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
