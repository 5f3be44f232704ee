"""Which files of a wheel belong to the virtual environment itself."""

from __future__ import annotations

import pytest

from envbuild.fetch.wheel_file_lists_and_clashes import ENVIRONMENT


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("bin/activate", True), ("bin/activate.fish", True), ("bin/activate_this.py", True),
        ("bin/Activate.ps1", True), ("bin/python3.11", True), ("pyvenv.cfg", True),
        ("bin/activate-global-python-argcomplete", False), ("bin/python-argcomplete-check-easy-install-script", False),
    ],
)  # fmt: skip
def test_scripts_of_packages_are_no_files_of_the_environment(path: str, own: bool) -> None:
    """argcomplete, which many tools require, installs activate-global-python-argcomplete."""
    assert bool(ENVIRONMENT.fullmatch(path)) == own
