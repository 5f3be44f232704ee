"""How tests run beside each other, and what those of several folders share."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

_GPU = ("audit", "gpu", "extensions", "toolchain", "apex", "test_images")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """One worker has a file at a time, so what its tests share is made once; those of the engine share their images.

    Two workers have those: one the tests of small images, one those of GPU images and of what is compiled for them.

    `--dist loadgroup` would say the same with marks: pytest-xdist 3.8 cannot with pytest 9.2, whose node ids it means
    to extend.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if not file.startswith("tests/e2e/"):
                return file
            return "GPU images" if any(word in file for word in _GPU) else "images"

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Attach the row of the attack table to its test, so that xdist's workers send it along with the result."""
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
    """An empty /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder
