"""Folders of the self-test are removed with their process, but never while in use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import envbuild
from envbuild.selftest.harness import locked_temporary_folder

pytestmark = pytest.mark.usefixtures("temporary")

WORK = """
import time
from envbuild.selftest.harness import locked_temporary_folder
with locked_temporary_folder.temporary_folder("envbuild-ranks-") as folder:
    (folder / "inside").mkdir()
    print(folder, flush=True)
    time.sleep(60)
"""


def age(folder: Path) -> None:
    before = time.time() - 2 * locked_temporary_folder._YOUNG
    os.utime(folder, (before, before))


def test_files_of_killed_processes_are_removed_and_of_running_ones_kept(
    temporary: Path,
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(envbuild.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-c", WORK], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout
        left = Path(process.stdout.readline().strip())
        assert left.parent == temporary
        age(left)
        with locked_temporary_folder.temporary_folder("envbuild-ranks-"):
            assert left.is_dir(), "it is in use"
        process.send_signal(signal.SIGKILL)
        process.wait()
        age(left)
        with locked_temporary_folder.temporary_folder("envbuild-ranks-") as own:
            assert own.is_dir() and not left.exists()
        assert list(temporary.iterdir()) == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("make", ["young", "link", "other"])
def test_new_and_foreign_folders_stay(temporary: Path, make: str, tmp_path: Path) -> None:
    place = temporary / ("other-x" if make == "other" else "envbuild-ranks-x")
    if make == "link":
        (tmp_path / "precious").mkdir()
        place.symlink_to(tmp_path / "precious")
    else:
        place.mkdir()
    if make != "young":
        age(place)
    with locked_temporary_folder.temporary_folder("envbuild-ranks-"):
        assert place.exists()
