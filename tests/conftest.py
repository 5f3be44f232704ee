"""Settings for tests that run at the same time, and fixtures that several folders share."""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

# The tests of the engine that share images, by a word in the name of their file.
_SHARED = {
    "GPU images": ("gpu", "apex", "compiled", "test_images"),
    "stand-ins for torch": ("extensions", "toolchain", "layout_readers"),
    "Debian packages": ("apt", "dockerfile"),
    # About half of the other tests of the engine: a single worker would run them longer than all other workers.
    "clusters and faults": ("slurm", "kubernetes", "endurance", "clones", "debian", "interrupt", "faults", "container"),
}
# The files that share nothing with another file.
_ALONE = ("environments", "several", "install", "locked_wheels", "engines")
# The longest files begin first, so that at the end all workers are busy. The campaigns have their own engine; builds in
# the shared engine on the same base wait for each other.
_FIRST = ("images", "clusters and faults", "GPU images", "Debian packages", "tests/chaos/", "stand-ins for torch",
          "tests/e2e/", "tests/pretend/", "tests/selftest/", "tests/wrong_kernels/", "tests/fuzz/")  # fmt: skip


@functools.cache
def _turn(file: str) -> int:
    return next((turn for turn, scope in enumerate(_FIRST) if _scope(file).startswith(scope)), len(_FIRST))


@functools.cache
def _scope(file: str) -> str:
    """Return the group of tests that one worker runs: a file, or several engine tests that share their images."""
    name = Path(file).stem
    if not file.startswith("tests/e2e/") or name.removeprefix("test_") in _ALONE:
        return file
    return next((scope for scope, words in _SHARED.items() if any(word in name for word in words)), "images")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A file is run by one worker, so that what its tests share is made once. Tests of the engine share their images in
    the same way.

    `--dist loadgroup` would say the same with marks: pytest-xdist 3.8 cannot with pytest 9.2, whose node ids it means
    to extend.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid.partition("::")[0])

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collection, which would take as long as the rest: the millions of new objects
    stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first, and attach the row of the attack table to its test, so that xdist's workers send it
    along with the result."""
    items.sort(key=lambda item: _turn(item.nodeid.partition("::")[0]))
    for item in items:
        for kind in ("attack", "legitimate"):
            mark = item.get_closest_marker(kind)
            if mark is not None:
                item.user_properties.append((kind, mark.args))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of attacks: who, what is tried, how envbuild answers, and whether the test passed."""
    rows = sorted(
        {
            (kind, *texts, outcome)
            for outcome in ("passed", "failed", "error", "skipped")
            for report in terminalreporter.stats.get(outcome, [])
            for kind, texts in getattr(report, "user_properties", [])
            if kind in ("attack", "legitimate")
        }
    )
    if rows:
        terminalreporter.section("attacks and legitimate cases")
        for kind, who, tries, answer, outcome in rows:
            terminalreporter.write_line(f"{kind:<10}  {who}: {tries} -> {answer}: {outcome}")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty temporary folder."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder
