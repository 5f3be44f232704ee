"""The exported files, installed by the real tools: pip, uv and Poetry observe what an exported file states, and nothing
more.

conda is not installed here: rattler, a different implementation of conda's formats and solver, solves the packages of
conda in the file, and pip installs its part.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from envbuild.fetch import wheel_resolution_and_download
from envbuild.lock import project_and_conda_export, requirements_export
from envbuild.lock.lock_file import Lock
from unit.repair.test_repair_run import recorded
from unit.support import Index, serving

from .overridden import (
    CUBLAS,
    NEW,
    OLD,
    comment_commands,
    installed,
    installed_tool,
    overridden_lock,
    run_ok,
    shell,
    venv_with_pip,
    write_wheels,
)

pytestmark = pytest.mark.slow

UV = wheel_resolution_and_download.uv_binary()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(autouse=True)
def local_index(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)


@pytest.fixture
def lock(wheels: Path, tmp_path: Path) -> Lock:
    return overridden_lock(tmp_path / "project", wheels)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An empty environment with pip."""
    return venv_with_pip(tmp_path.resolve() / "venv")


# requirements and constraints, with pip


def test_pip_installs_the_requirements_and_a_broken_pin_fails(lock: Lock, venv: Path, tmp_path: Path) -> None:
    text = requirements_export.requirements(lock, "sample")
    (tmp_path / "FILE").write_text(text)
    command = comment_commands(text, "pip install")[0].partition("   ")[0]
    assert command == "pip install --no-deps --require-hashes -r FILE"
    run_ok(command, venv, tmp_path)
    assert installed(venv) == NEW
    (tmp_path / "FILE").write_text(text.replace(f"=={NEW}", f"=={OLD}"))
    done = shell(command, venv, tmp_path)
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr
    assert installed(venv) == NEW


def test_the_command_of_the_requirements_makes_pip_keep_the_override(lock: Lock, venv: Path, tmp_path: Path) -> None:
    text = requirements_export.requirements(lock, "sample")
    (tmp_path / "FILE").write_text(text)
    run_ok("pip install --no-deps --require-hashes -r FILE", venv, tmp_path)
    run_ok("pip install torchvision", venv, tmp_path)
    assert installed(venv) == OLD, "pip brings torch's own version back: what the file warns of"
    run_ok(f"pip uninstall -y torchvision; pip install --no-deps {CUBLAS}=={NEW}", venv, tmp_path)
    [command] = comment_commands(text, "sed")
    run_ok(command, venv, tmp_path)
    run_ok("pip install torchvision; pip check", venv, tmp_path)
    assert installed(venv) == NEW


def test_the_command_of_the_constraints_changes_every_package_that_requires_another_version(
    lock: Lock, venv: Path, tmp_path: Path
) -> None:
    """The command also changes a package whose requirement spells the name differently and adds an extra, in an
    environment without torch."""
    recorded(tmp_path, "kernels", "1", ["NVIDIA_cublas.cu12[all]<12.4 ; python_version > '3'", f"{CUBLAS}-extra<1"])
    run_ok(f"pip install --no-deps {tmp_path}/kernels-*.whl {CUBLAS}=={NEW}", venv, tmp_path)
    [command] = comment_commands(requirements_export.constraints(lock, "sample"), "sed")
    done = shell(command, venv, tmp_path)
    assert done.returncode == 1, "another requirement of the package is not met"
    [metadata] = venv.glob("lib/python3.*/site-packages/kernels-*.dist-info/METADATA")
    assert f"Requires-Dist: NVIDIA_cublas.cu12[all]=={NEW} ; python" in metadata.read_text()
    metadata.write_text(re.sub("Requires-Dist: .*-extra.*\n", "", metadata.read_text()))
    run_ok(command, venv, tmp_path)


def test_pip_takes_the_constraints_of_a_lock_with_overrides(lock: Lock, venv: Path, tmp_path: Path) -> None:
    text = requirements_export.constraints(lock, "sample")
    (tmp_path / "FILE").write_text(text)
    run_ok("pip install -c FILE torchvision einops", venv, tmp_path)
    assert installed(venv, "einops") == "0.8.0"
    [after] = comment_commands(text, "pip install --no-deps")
    run_ok(after, venv, tmp_path)
    assert installed(venv) == NEW
    [command] = comment_commands(text, "sed")
    run_ok(f"{command}; pip install -c FILE --force-reinstall --no-deps torchvision", venv, tmp_path)
    run_ok("pip install -c FILE torchvision; pip check", venv, tmp_path)
    assert installed(venv) == NEW
    refused = shell("pip install -c FILE einops==0.9", venv, tmp_path)
    assert refused.returncode, "a constraint holds"


def test_pip_refuses_the_override_as_a_constraint(lock: Lock, venv: Path, tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text(requirements_export.constraints(lock, "sample", metadata_changed=True))
    refused = shell("pip install -c FILE torchvision", venv, tmp_path)
    assert refused.returncode and "ResolutionImpossible" in refused.stderr, "the reason for leaving it out"


def test_uv_takes_the_constraints_with_a_file_of_overrides(
    lock: Lock, venv: Path, wheels: Path, tmp_path: Path
) -> None:
    text = requirements_export.constraints(lock, "sample")
    (tmp_path / "FILE").write_text(text)
    (tmp_path / "OVERRIDES").write_text(f"{CUBLAS}=={NEW}\n")
    [command] = comment_commands(text, "uv pip install")
    command = command.replace("uv ", f"{UV} ", 1).replace("PACKAGE", "torchvision")
    run_ok(f"{command} --no-index --find-links {wheels}", venv, tmp_path)
    assert installed(venv) == NEW


# uv


@pytest.fixture
def uv_project(lock: Lock, wheels: Path, tmp_path: Path) -> Path:
    """A folder with the exported project, which takes wheels from the test's folder."""
    folder = tmp_path.resolve() / "uv"
    folder.mkdir()
    text = project_and_conda_export.uv_project(lock, "sample")
    (folder / "pyproject.toml").write_text(f'{text}no-index = true\nfind-links = ["{wheels}"]\n')
    return folder


def uv(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(UV), *words, "--no-progress", "--python", sys.executable]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_uv_holds_every_pin_also_when_something_is_added(
    uv_project: Path, lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_NO_CONFIG")
    for words in (("sync",), ("add", "torchvision"), ("lock", "--upgrade"), ("sync",)):
        done = uv(uv_project, *words)
        assert done.returncode == 0, done.stderr
        for name, version in lock.versions.items():
            assert installed(uv_project / ".venv", name) == version
    done = uv(uv_project, "add", f"{CUBLAS}=={OLD}")
    assert installed(uv_project / ".venv") == NEW, "the override holds"


def test_without_the_override_uv_refuses(uv_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_NO_CONFIG")
    file = uv_project / "pyproject.toml"
    file.write_text(file.read_text().replace("override-dependencies", "constraint-dependencies"))
    done = uv(uv_project, "sync")
    assert done.returncode and "No solution found" in done.stderr


# Poetry


@pytest.fixture(scope="module")
def poetry_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the program of Poetry: the installed one, else one from the configured index."""
    found = shutil.which("poetry")
    if found:
        return found
    return str(installed_tool(tmp_path_factory.mktemp("poetry"), "poetry>=2,<3") / "poetry")


@pytest.fixture
def served(wheels: Path) -> Iterator[Index]:
    with serving(Index(wheels)) as index:
        yield index


def test_poetry_holds_what_its_file_says_and_not_the_override(
    poetry_program: str, lock: Lock, served: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POETRY_VIRTUALENVS_IN_PROJECT", "true")
    monkeypatch.setenv("POETRY_VIRTUALENVS_USE_POETRY_PYTHON", "true")
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.null.Keyring")
    folder = tmp_path.resolve() / "poetry"
    folder.mkdir()
    source = f'\n[[tool.poetry.source]]\nname = "local"\nurl = "{served.address}"\npriority = "primary"\n'
    text = project_and_conda_export.poetry_project(lock, "sample")

    def poetry(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([poetry_program, *words, "-n"], cwd=folder, capture_output=True, text=True, timeout=300)

    (folder / "pyproject.toml").write_text(text + source)
    for words in (("env", "use", sys.executable), ("install",)):
        done = poetry(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    venv = folder / ".venv"
    assert (installed(venv, "torch"), installed(venv, "einops"), installed(venv)) == ("2.3.1", "0.8.0", OLD)
    [command] = comment_commands(text, "poetry run")
    done = subprocess.run([poetry_program, *command.split()[1:]], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and installed(venv) == NEW, done.stderr
    poetry("install")
    assert installed(venv) == OLD, "Poetry brings torch's own version back: what the file warns of"
    # with the override as a dependency, Poetry finds no solution
    (folder / "pyproject.toml").write_text(
        text.replace('    "torch==', f'    "{CUBLAS}=={NEW}",\n    "torch==') + source
    )
    done = poetry("lock")
    assert done.returncode and "version solving failed" in done.stdout + done.stderr


# conda


def test_pip_installs_the_wheels_of_the_conda_environment(lock: Lock, venv: Path, tmp_path: Path) -> None:
    text = project_and_conda_export.conda_environment(lock, "sample")
    document = yaml.safe_load(text)
    assert set(document) == {"name", "channels", "dependencies"} and document["name"] == "sample"
    *specs, with_pip = document["dependencies"]
    assert specs == [f"python={lock.python}", "pip"]
    (tmp_path / "listed.txt").write_text("".join(f"{line}\n" for line in with_pip["pip"]))
    [create] = comment_commands(text, "PIP_NO_DEPS")
    assert create == "PIP_NO_DEPS=1 conda env create -f FILE"
    refused = shell("pip install -U -r listed.txt", venv, tmp_path)
    assert refused.returncode and "ResolutionImpossible" in refused.stderr
    run_ok("PIP_NO_DEPS=1 pip install -U -r listed.txt", venv, tmp_path)
    assert {name: installed(venv, name) for name in lock.versions} == lock.versions
    [command] = comment_commands(text, "sed")
    run_ok(f"{command}; pip install torchvision; pip check", venv, tmp_path)
    assert installed(venv) == NEW


# os._exit, because rattler's threads sometimes crash Python while it ends.
SOLVE = """
import asyncio, json, os, sys
from rattler import MatchSpec, solve
specs = [MatchSpec(text, strict=True) for text in sys.argv[2:]]
try:
    found = asyncio.run(solve([sys.argv[1]], specs, platforms=["linux-64", "noarch"], virtual_packages=[]))
except Exception as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)
print(json.dumps({one.name.normalized: str(one.version) for one in found}), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def rattler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed_tool(tmp_path_factory.mktemp("rattler"), "py-rattler>=0.28,<0.29") / "python"


def write_channel(folder: Path, *packages: tuple[str, str, list[str]]) -> str:
    """Write a channel of conda with only an index, and return its URL. `packages`: name, version, requirements."""
    rows = {
        f"{name}-{version}-0.conda": {
            "name": name, "version": version, "build": "0", "build_number": 0, "depends": depends,
            "subdir": "linux-64", "md5": "0" * 32, "sha256": "0" * 64, "size": 1,
        }
        for name, version, depends in packages
    }  # fmt: skip
    for subdir, listed in (("linux-64", rows), ("noarch", {})):
        (folder / subdir).mkdir(parents=True)
        index = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": listed, "repodata_version": 1}
        (folder / subdir / "repodata.json").write_text(json.dumps(index))
    return folder.as_uri()


def test_rattler_solves_the_packages_of_the_conda_environment(lock: Lock, rattler: Path, tmp_path: Path) -> None:
    """A newer Python and pip of a channel are not taken instead of the lock's Python."""
    document = yaml.safe_load(project_and_conda_export.conda_environment(lock, "sample"))
    specs = [one for one in document["dependencies"] if isinstance(one, str)]
    packages = [("python", f"{lock.python}.1", []), ("python", "3.99.0", []), ("pip", "24.0", ["python"])]
    channel = write_channel(tmp_path / "channel", *packages)
    command = [str(rattler), "-c", SOLVE, channel, *specs]
    done = subprocess.run(command, capture_output=True, text=True, env={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"python": f"{lock.python}.1", "pip": "24.0"}
    other = write_channel(tmp_path / "other", ("python", "3.99.0", []), ("pip", "24.0", ["python"]))
    refused = subprocess.run([*command[:3], other, *specs], capture_output=True, text=True, env={"HOME": str(tmp_path)})
    assert refused.returncode and f"python {lock.python}" in refused.stderr


@pytest.mark.parametrize("name", ["4090", "true", "null", "1e3", "sample"])
def test_the_name_of_the_conda_environment_is_text(lock: Lock, name: str) -> None:
    assert yaml.safe_load(project_and_conda_export.conda_environment(lock, name))["name"] == name


def test_a_lock_without_overrides_needs_no_comment_on_them(lock: Lock) -> None:
    plain = Lock(**{**vars(lock), "overrides": ()})
    for text in (
        requirements_export.constraints(plain, "sample"),
        project_and_conda_export.uv_project(plain, "sample"),
        project_and_conda_export.poetry_project(plain, "sample"),
        project_and_conda_export.conda_environment(plain, "sample"),
    ):
        assert "sed" not in text and "verrid" not in text
    assert CUBLAS in project_and_conda_export.poetry_project(plain, "sample")
    assert tomllib.loads(project_and_conda_export.uv_project(plain, "sample"))["tool"]["uv"]["package"] is False
