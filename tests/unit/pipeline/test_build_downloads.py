"""Downloads and preparations during the download of an image's parts."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from envbuild.pipeline import build_downloads
from envbuild.util.errors import BuildError, HashMismatch
from envbuild.util.host_processes import run


def test_both_are_done_and_what_is_ahead_is_waited_for() -> None:
    done: list[str] = []
    ready = threading.Event()

    def work() -> None:
        assert ready.wait(10)
        time.sleep(0.1)
        done.append("ahead")

    with build_downloads.in_parallel(work):
        done.append("fetched")
        ready.set()
    assert done == ["fetched", "ahead"]


def test_a_failed_download_in_advance_is_left_to_the_build() -> None:
    def work() -> None:
        raise BuildError("no")

    with build_downloads.in_parallel(work):
        pass


def test_a_damaged_file_that_was_removed_in_advance_is_reported() -> None:
    """Doing the same work again in the foreground would only report a missing file."""

    def work() -> None:
        raise HashMismatch("the base was damaged")

    with pytest.raises(HashMismatch, match="damaged"), build_downloads.in_parallel(work):
        pass


def test_an_interrupted_fetch_ends_what_runs_ahead(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(60)"
    begin = time.monotonic()

    def work() -> None:
        run([sys.executable, "-c", code])

    with pytest.raises(KeyboardInterrupt), build_downloads.in_parallel(work):
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert time.monotonic() - begin < 50
    assert run([sys.executable, "-c", "print(1)"]).stdout == "1\n"
