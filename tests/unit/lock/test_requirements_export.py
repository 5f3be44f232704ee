"""A lock as requirements and constraints: pip reads from them exactly the locked versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from envbuild.lock import lock_file, requirements_export
from envbuild.lock.lock_entry_types import Overridden
from envbuild.lock.lock_file import Lock
from unit.support import PROFILE, envbuild, lock_for, plan_of


@pytest.fixture
def locked(project: Path) -> Lock:
    made = lock_for(plan_of(project, PROFILE))
    lock_file.write(made, project / "profiles" / "sample.lock.yaml", "sample")
    return made


def lines(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", "").splitlines() if not line.startswith("#")]


def test_requirements_are_every_wheel_with_its_hash_but_pip(locked: Lock) -> None:
    found = dict(line.split(maxsplit=1) for line in lines(requirements_export.requirements(locked, "sample")))
    wheels = [item.wheel for item in locked.wheels if item.wheel.name != "pip"]
    assert found == {f"{wheel.name}=={wheel.version}": f"--hash=sha256:{wheel.sha256}" for wheel in wheels}


def test_constraints_are_every_version_but_pips(locked: Lock) -> None:
    found = [Requirement(line) for line in lines(requirements_export.constraints(locked, "sample"))]
    wanted = {name: version for name, version in locked.versions.items() if name != "pip"}
    assert {one.name: str(one.specifier) for one in found} == {name: f"=={v}" for name, v in wanted.items()}


def test_a_pin_that_pip_cannot_hold_is_in_a_comment(locked: Lock) -> None:
    overridden = replace(locked, overrides=(Overridden("numpy", "1.0", "==2.0"),))
    text = requirements_export.constraints(overridden, "sample")
    assert "# Not on PyPI: torch==2.13.0+cpu; add --extra-index-url or --find-links for them" in text
    assert "# Not pinned: numpy==1.0 (torch requires ==2.0)." in text and "numpy==1.0" not in lines(text)
    assert "#   pip install --no-deps numpy==1.0\n" in text
    assert "numpy==1.0" in lines(requirements_export.constraints(overridden, "sample", metadata_changed=True))
    assert "Not pinned" not in requirements_export.constraints(locked, "sample")


@pytest.mark.parametrize("kind", ["requirements", "constraints"])
def test_the_command_writes_what_the_lock_holds(locked: Lock, project: Path, kind: str) -> None:
    assert envbuild("export", kind, "sample").stdout == f"{kind}-sample.txt\n"
    assert (project / f"{kind}-sample.txt").read_text() == getattr(requirements_export, kind)(locked, "sample")


def test_a_stale_lock_is_not_exported(locked: Lock, project: Path) -> None:
    plan_of(project, {**PROFILE, "packages": ["numpy", "einops"]})
    done = envbuild("export", "requirements", "sample")
    assert (done.code, done.stdout) == (8, "")
    assert not list(project.glob("*.txt"))


def test_compiled_packages_are_left_out_and_listed(project: Path) -> None:
    kernels = {"name": "kernels", "git": "https://git.example/kernels", "commit": "c" * 40, "modules": ["kernels"]}
    made = lock_for(plan_of(project, {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [kernels]}))
    for text in (requirements_export.requirements(made, "sample"), requirements_export.constraints(made, "sample")):
        assert f"Left out: kernels, compiled from git {'c' * 40}" in text
        assert not [line for line in lines(text) if line.startswith("kernels")]
