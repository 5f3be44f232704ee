"""A lock whose cuBLAS overrides what torch requires, its small wheels, and environments to install them in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pip
import pytest
from packaging.utils import parse_wheel_filename

from envbuild.fetch.locked_wheel_types import LockedWheel, Wheel
from envbuild.fetch.sha256_file_store import file_digest
from envbuild.lock.lock_entry_types import Overridden
from envbuild.lock.lock_file import Lock
from unit.repair.test_repair_run import recorded
from unit.support import PROFILE, lock_for, plan_of

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
OLD, NEW = "12.1.3.1", "12.4.5.8"
CUBLAS = "nvidia-cublas-cu12"
OVERRIDE = Overridden(CUBLAS, NEW, f"=={OLD}")


def write_wheels(folder: Path) -> Path:
    """torch, both versions of cuBLAS, einops, and torchvision, which is not locked and requires torch."""
    for version in (OLD, NEW):
        recorded(folder, CUBLAS, version)
    recorded(folder, "torch", "2.3.1", [f'{CUBLAS} (=={OLD}) ; platform_system == "Linux"'])
    recorded(folder, "einops", "0.8.0")
    recorded(folder, "torchvision", "0.18.1", ["torch==2.3.1"])
    return folder


def overridden_lock(project: Path, wheels: Path) -> Lock:
    listed = []
    for stem in (f"{CUBLAS.replace('-', '_')}-{NEW}", "torch-2.3.1", "einops-0.8.0"):
        file = next(wheels.glob(f"{stem}-*.whl"))
        name, version, _, _ = parse_wheel_filename(file.name)
        wheel = Wheel(name, str(version), file.name, file_digest(file))
        listed.append(LockedWheel(wheel, file.stat().st_size, "torch"))
    whole = lock_for(plan_of(project, PROFILE))
    return replace(whole, python=PYTHON, wheels=tuple(listed), overrides=(OVERRIDE,), extensions=())


def comment_commands(text: str, beginning: str) -> list[str]:
    """Return the commands in an exported file's comments that begin with `beginning`."""
    found = (line.lstrip("#/ ") for line in text.splitlines() if line.startswith(("#", "//")))
    return [line for line in found if line.startswith(beginning)]


def shell(command: str, venv: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with an activated environment."""
    script = f'. "{venv}/bin/activate"; {command}'
    return subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, text=True)


def run_ok(command: str, venv: Path, folder: Path) -> str:
    done = shell(command, venv, folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def installed(venv: Path, name: str = CUBLAS) -> str | None:
    """The installed version."""
    found = sorted(venv.glob(f"lib/python3.*/site-packages/{name.replace('-', '_')}-*.dist-info"))
    assert len(found) < 2, found
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else None


def installed_tool(folder: Path, requirement: str) -> Path:
    """Install a tool from the configured index in an environment of its own, and return its folder of programs. Skip
    the test if the index does not have the tool."""
    quiet([sys.executable, "-m", "venv", "--without-pip", folder / "venv"])
    program = [sys.executable, "-m", "pip", "--python", str(folder / "venv" / "bin" / "python")]
    command = [*program, "install", "--quiet", "--no-compile", "--retries", "0", "--only-binary", ":all:", requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{requirement} cannot be installed from the configured index: {error}")
    return folder / "venv" / "bin"


def venv_with_pip(folder: Path) -> Path:
    """Create an environment whose pip is that of this Python: installing pip takes five seconds."""
    quiet([sys.executable, "-m", "venv", "--without-pip", folder])
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    program = folder / "bin" / "pip"
    program.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m pip "$@"\n')
    program.chmod(0o755)
    return folder


def quiet(words: Sequence[object]) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)
