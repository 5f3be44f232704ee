"""A base image gives a release of Python that no Debian suite has; wheels are chosen for that release."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbuild.lock import lock_creation_and_update
from envbuild.util.errors import ProfileError
from unit.support import PROFILE, Index, image_of, plan_of, quick_pip, serving, write_wheel

BASE = {"image": f"registry.example/library/python@{image_of().id}"}


@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_wheels_are_chosen_for_the_python_of_the_base_image(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    quick_pip(monkeypatch)
    folder = tmp_path / "links"
    write_wheel(folder, "pip", "26.0")
    write_wheel(folder, "torch", "2.13.0")
    for number in ("310", "311", "312"):
        write_wheel(folder, "alpha", "1.0", tag=f"cp{number}-cp{number}-manylinux_2_17_x86_64")
    data = {**PROFILE, "base": BASE, "python": python, "torch": "2.13.0", "packages": ["alpha"], "apt": []}
    with serving(Index(folder)) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.address)
        lock = lock_creation_and_update.update_lock(plan_of(project, data), None)
    number = python.replace(".", "")
    assert [item.wheel.file for item in lock.wheels if item.wheel.name == "alpha"] == [
        f"alpha-1.0-cp{number}-cp{number}-manylinux_2_17_x86_64.whl"
    ]
    assert (lock.python, lock.suite, lock.image, lock.base) == (python, None, BASE["image"], ())


def test_a_suite_has_no_other_python(project: Path) -> None:
    with pytest.raises(ProfileError) as caught:
        plan_of(project, {**PROFILE, "base": {"bootstrap": "bookworm"}, "python": "3.12"})
    assert "3.11" in f"{caught.value.hint} {[*map(str, caught.value.faults)]}"
