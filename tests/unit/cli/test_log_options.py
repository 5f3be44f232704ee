"""-v, --debug and --version, at any position on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "envbuild", *arguments]
    env = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=env)


@pytest.mark.parametrize(
    "arguments", [["-v", "init", "mine", "--from", "cpu"], ["init", "mine", "--from", "cpu", "-v"]]
)
def test_v_is_accepted_before_and_after_the_command(arguments: list[str], tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 0 and f"wrote {tmp_path}/" in done.stderr


def test_v_is_known_below_a_group() -> None:
    assert run("advisories", "-vv").returncode == 0


@pytest.mark.slow
def test_debug_prints_the_traceback_in_addition_to_the_error() -> None:
    plain, debug = run("show", "nosuch"), run("show", "nosuch", "--debug")
    assert plain.returncode == debug.returncode == 3
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr and debug.stderr.endswith(plain.stderr)


def test_the_log_goes_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "log"
    done = run("init", "two", "--from", "cpu", cwd=tmp_path, ENVBUILD_LOG=str(file))
    assert done.returncode == 0 and "wrote" not in done.stderr
    assert "wrote" in file.read_text(encoding="utf-8")


def test_a_log_that_cannot_be_written_is_an_error() -> None:
    done = run("export", "schema", ENVBUILD_LOG="/nosuch/folder/log")
    assert done.returncode == 3 and "ENVBUILD_LOG" in done.stderr and "Traceback" not in done.stderr


def test_json_before_a_command_is_refused() -> None:
    done = run("--json", "show", "cpu")
    assert done.returncode == 2 and "put --json after the command" in done.stdout


def test_versions_for_a_bug_report() -> None:
    plain, found = run("--version"), json.loads(run("--version", "--json").stdout)
    assert plain.stdout == f"envbuild, version {found['envbuild']}\n"
    assert set(found) == {"envbuild", "python", "system", "facts", "selftest", "packages"}
    assert found["packages"]["click"] and "pytest" not in found["packages"]
