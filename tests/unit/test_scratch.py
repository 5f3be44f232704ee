"""Temporary folders: gone however the process ends, and never another one's that is in use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envbuild import scratch
from envbuild.image import prune

# The command line, with work in its place that has a folder, says which, and waits for a program.
WORK = """
import signal, sys
from envbuild import cli, process, scratch

if sys.argv[1:] != ["nohup"]:  # whoever runs the tests may ignore these
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

def work(**_):
    with scratch.folder("build") as folder:
        (folder / "inside").mkdir()
        print(folder, flush=True)
        process.run(["sleep", "60"])

cli.cli.main = work
cli.main()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def at_work(temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has a folder."""
    process = subprocess.Popen([sys.executable, "-c", WORK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout and Path(process.stdout.readline().strip()).parent == temporary
        yield process
    finally:
        process.kill()
        process.communicate()


working = pytest.fixture(at_work)


def aged(temporary: Path) -> list[Path]:
    """All that is there, as if made an hour ago."""
    for path in temporary.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    return list(temporary.iterdir())


def killed(working: subprocess.Popen[str], temporary: Path) -> list[Path]:
    """What it leaves, once nobody holds it: a program that it was just starting does until it runs."""
    working.kill()
    working.wait(60)
    left, end = aged(temporary), time.monotonic() + 30
    while list(scratch.abandoned()) != left and time.monotonic() < end:
        time.sleep(0.01)
    return left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_command_leaves_nothing(
    working: subprocess.Popen[str], temporary: Path, number: signal.Signals
) -> None:
    working.send_signal(number)
    assert (working.wait(60), list(temporary.iterdir())) == (130, [])


def test_what_a_killed_one_left_goes_with_the_next(working: subprocess.Popen[str], temporary: Path) -> None:
    (left,) = killed(working, temporary)
    with scratch.folder("base") as folder:
        assert list(temporary.iterdir()) == [folder] and folder != left
    assert list(temporary.iterdir()) == []


def test_prune_tells_and_removes_it(working: subprocess.Popen[str], temporary: Path) -> None:
    assert list(prune.temporary()) == []
    (left,) = killed(working, temporary)
    (found,) = prune.temporary()
    assert (found.kind, found.name) == ("temporary", str(left))
    prune.remove(None, [found])
    assert list(temporary.iterdir()) == []


def test_what_is_in_use_young_or_not_ours_stays(working: subprocess.Popen[str], temporary: Path) -> None:
    (temporary / "envbuild-tmp-file").write_text("", encoding="utf-8")
    (temporary / "envbuild-tmp-link").symlink_to(temporary.parent)
    (temporary / "envbuild-other").mkdir()
    before = sorted(aged(temporary))
    young = temporary / "envbuild-tmp-build-young"
    young.mkdir()
    assert len(before) == 4
    scratch.sweep()
    assert sorted(temporary.iterdir()) == sorted([*before, young])


def test_a_command_goes_on_where_nohup_is_asked_for(temporary: Path) -> None:
    begin = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-c", WORK.replace("60", "1"), "nohup"]
    with subprocess.Popen(begin, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 0
