"""Requirement files that lead nowhere, or everywhere: each is a fault with its line, and reading ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbuild.errors import ProfileError
from envbuild.plan import requirements


def told(file: Path, text: str) -> list[str]:
    file.write_text(text, encoding="utf-8")
    return list(map(str, requirements.read(file)[1]))


@pytest.mark.parametrize(
    ("name", "words"),
    [("a\0b.txt", "embedded null byte"), ("circle.txt", "circle.txt cannot be read"), ("x" * 300, "cannot be read"),
     ("requirements.txt", "includes itself")],
)  # fmt: skip
def test_an_include_that_cannot_be_read_is_a_fault_of_its_line(project: Path, name: str, words: str) -> None:
    (project / "circle.txt").symlink_to("circle.txt")
    (fault,) = told(project / "requirements.txt", f"numpy\n-r {name}\n")
    assert fault.startswith("requirements.txt:2: ")
    assert words in fault


def test_files_that_include_each_other_without_end_are_counted(project: Path) -> None:
    """Thirty small files, each naming the next one twice, would be read a billion times."""
    for number in range(30):
        (project / f"{number}.txt").write_text(f"-r {number + 1}.txt\n" * 2, encoding="utf-8")
    faults = told(project / "30.txt", "numpy\n") + list(map(str, requirements.read(project / "0.txt")[1]))
    assert faults and all("more than 100 files are included" in fault for fault in faults)


@pytest.mark.parametrize("depth", [50, 100_000])
def test_a_deeply_nested_pyproject_is_refused(project: Path, depth: int) -> None:
    file = project / "pyproject.toml"
    file.write_text(f"a = {'[' * depth}", encoding="utf-8")
    with pytest.raises(ProfileError, match=r"not a usable pyproject\.toml"):
        requirements.read(file)
