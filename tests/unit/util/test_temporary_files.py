"""Temporary folders: removed after any end of the process, and never those of a running process."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envbuild.image import image_and_cache_pruning
from envbuild.util import temporary_files

pytestmark = pytest.mark.usefixtures("temporary")

# The command line with replaced work: it creates a temporary folder, prints its name, and waits for a program.
WORK = """
import signal, sys
from envbuild.cli import entry
from envbuild.util import host_processes, temporary_files

if sys.argv[1:] != ["nohup"]:  # whoever runs the tests may ignore these
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

def work(**_):
    with temporary_files.folder("build") as folder:
        (folder / "inside").mkdir()
        print(folder, flush=True)
        host_processes.run(["sleep", "60"])

entry.cli.main = work
entry.main()
"""


def at_work(temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A running process that has a temporary folder."""
    process = subprocess.Popen([sys.executable, "-c", WORK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout and Path(process.stdout.readline().strip()).parent == temporary
        yield process
    finally:
        process.kill()
        process.communicate()


working = pytest.fixture(at_work)


def aged(temporary: Path) -> list[Path]:
    """Make all existing folders look an hour old."""
    for path in temporary.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    return list(temporary.iterdir())


def killed(working: subprocess.Popen[str], temporary: Path) -> list[Path]:
    """Kill the process, and return the files that it leaves as soon as no program uses them: a program that the process
    was just starting may use them for a moment."""
    working.kill()
    working.wait(60)
    left, end = aged(temporary), time.monotonic() + 30
    while list(temporary_files.abandoned()) != left and time.monotonic() < end:
        time.sleep(0.01)
    return left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_command_leaves_nothing(
    working: subprocess.Popen[str], temporary: Path, number: signal.Signals
) -> None:
    working.send_signal(number)
    assert (working.wait(60), list(temporary.iterdir())) == (130, [])


def test_leftovers_of_a_killed_run_are_removed_by_the_next(working: subprocess.Popen[str], temporary: Path) -> None:
    (left,) = killed(working, temporary)
    with temporary_files.folder("base") as folder:
        assert list(temporary.iterdir()) == [folder] and folder != left
    assert list(temporary.iterdir()) == []


def test_prune_reports_and_removes_it(working: subprocess.Popen[str], temporary: Path) -> None:
    assert list(image_and_cache_pruning.temporary()) == []
    (left,) = killed(working, temporary)
    (found,) = image_and_cache_pruning.temporary()
    assert (found.kind, found.name) == ("temporary", str(left))
    image_and_cache_pruning.remove_items(None, [found])
    assert list(temporary.iterdir()) == []


def test_files_in_use_or_of_others_stay(working: subprocess.Popen[str], temporary: Path) -> None:
    (temporary / "envbuild-tmp-file").write_text("", encoding="utf-8")
    (temporary / "envbuild-tmp-link").symlink_to(temporary.parent)
    (temporary / "envbuild-other").mkdir()
    before = sorted(temporary.iterdir())
    assert len(before) == 4
    temporary_files.sweep()
    assert sorted(temporary.iterdir()) == before


@pytest.mark.parametrize("inside", [False, True])
def test_one_that_is_swept_before_it_is_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """A folder that was just created cannot be distinguished from a folder that a killed process left."""
    place, lock = temporary if inside else None, fcntl.flock
    names: list[str] = []

    def late(handle: int, how: int) -> None:
        if not names:  # the sweep happens between creating and locking the folder
            names.append(next(path for path in temporary.iterdir()).name)
            temporary_files.sweep(place)
            assert list(temporary.iterdir()) == []
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with temporary_files.folder("build", place) as folder:
        assert names and folder.is_dir() and folder.name != names[0]


def test_a_file_that_a_killed_process_left_goes_with_the_next(temporary: Path) -> None:
    left, other = temporary / ".envbuild-tmp-abcdefgh", temporary / ".other-abcdefgh"
    left.write_text("half a", encoding="utf-8")
    other.write_text("mine", encoding="utf-8")
    with temporary_files.file(temporary) as (stream, file):
        assert sorted(temporary.iterdir()) == sorted([file, other])
        stream.write(b"whole")
        stream.flush()
        file.replace(temporary / "file")
    assert sorted(temporary.iterdir()) == [other, temporary / "file"]


def test_a_file_that_is_being_written_stays(temporary: Path) -> None:
    with temporary_files.file(temporary) as (_, file), temporary_files.file(temporary) as (_, second):
        assert sorted(temporary.iterdir()) == sorted([file, second])


def test_a_command_goes_on_where_nohup_is_asked_for(temporary: Path) -> None:
    begin = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-c", WORK.replace("60", "1"), "nohup"]
    with subprocess.Popen(begin, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 0
