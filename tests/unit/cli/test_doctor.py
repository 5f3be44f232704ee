"""`doctor --for` and `--torch-index`, from the command line to the answer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envbuild.doctor import cpu_memory_and_os, machine_reader
from envbuild.doctor.machine_readings import Host
from envbuild.fetch import index_config
from envbuild.image import container_definition_export
from envbuild.lock import lock_file
from unit.conftest import forget
from unit.support import Index, envbuild, serving, serving_locked

TORCH = "torch-2.13.0+cpu-py3-none-any.whl"


@pytest.fixture
def served(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index of the profile `sample`, on a machine without settings. The variable that --torch-index sets is restored
    afterwards."""
    monkeypatch.setenv(index_config.TORCH_INDEX, "")
    monkeypatch.setattr(machine_reader, "read", lambda root: Host("node", "", cpu_memory_and_os.unread()))
    with serving_locked(project, tmp_path / "served", monkeypatch) as found:
        yield found


def checks(*options: str) -> dict[str, dict[str, Any]]:
    """Return the checks of `doctor`, by id."""
    forget()
    envbuild("doctor", "-o", "doctor.json", *options)
    return {check["id"]: check for check in json.loads(Path("doctor.json").read_text(encoding="utf-8"))["checks"]}


def test_doctor_for_a_profile_checks_that_the_index_has_its_wheels(served: Index) -> None:
    assert "wheels" not in checks()
    found = checks("--for", "sample")
    assert (found["wheels"]["state"], "wheels:" in found["profile"]["detail"]) == ("ok", False)
    (served.folder / TORCH).unlink()
    found = checks("--for", "sample")
    assert (found["wheels"]["state"], found["profile"]["state"]) == ("fail", "fail")
    assert f"wheels: no configured index has {TORCH}" in found["profile"]["detail"]
    assert "--torch-index pytorch" in found["wheels"]["remedy"]


def test_doctor_creates_no_folder_in_the_cache(served: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert checks("--for", "sample")["wheels"]["state"] == "ok"
    assert not (tmp_path / "empty").exists()


def test_the_option_adds_pytorchs_index_for_torch(served: Index, tmp_path: Path) -> None:
    (tmp_path / "pytorch").mkdir()
    (served.folder / TORCH).rename(tmp_path / "pytorch" / TORCH)
    with serving(Index(tmp_path / "pytorch")) as mirror:
        assert checks("--for", "sample")["wheels"]["state"] == "fail"
        assert mirror.requests == []
        assert checks("--for", "sample", "--torch-index", mirror.address)["wheels"]["state"] == "ok"
        assert {line.split()[1] for line in mirror.requests} == {"/simple/torch/"}


@pytest.mark.parametrize("command", ["build", "doctor", "lock", "make"])
def test_an_invalid_torch_index_is_refused(command: str, served: Index) -> None:
    done = envbuild(command, "--torch-index", "pytroch")
    assert done.code == 2
    assert "'pytroch' is neither pytorch nor a URL" in done.stderr
    assert os.environ[index_config.TORCH_INDEX] == ""


def test_the_option_of_lock_takes_the_name_pytorch(served: Index) -> None:
    locked = lock_file.read(Path("profiles/sample.lock.yaml"))
    assert locked is not None
    Path("dockerfiles").mkdir()
    Path("dockerfiles/sample.Dockerfile").write_text(
        container_definition_export.standalone_dockerfile(locked, "sample"), encoding="utf-8"
    )
    assert envbuild("lock", "sample", "--check", "--torch-index", "pytorch").code == 0
    assert os.environ[index_config.TORCH_INDEX] == "pytorch"
