"""Which files of a wheel belong to the virtual environment itself."""

from __future__ import annotations

import pytest

from envbuild.fetch.wheel_file_lists_and_clashes import ENVIRONMENT, replaces_environment


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


@pytest.mark.parametrize(
    ("path", "file", "folder"),
    [
        ("bin", True, False), ("lib", True, False), ("include/python3.11", True, False),
        ("lib/python3.11/site-packages", True, False), ("lib64", True, True), ("bin/python", True, True),
        ("bin/python3/x", True, True), ("pyvenv.cfg/x/y", True, True), ("bin/activate/x", True, True),
        ("bin/tool", False, False), ("bin/sub/tool", False, False), ("lib/x", False, False), ("share", False, False),
        ("site-packages/bin", False, False), ("site-packages/lib", False, False), ("include/site", False, False),
    ],
)  # fmt: skip
def test_files_and_folders_that_would_replace_the_environments_own(path: str, file: bool, folder: bool) -> None:
    assert (replaces_environment(path), replaces_environment(path, folder=True)) == (file, folder)
