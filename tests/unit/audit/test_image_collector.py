"""The Python of an image that runs the collector."""

from __future__ import annotations

from typing import Any, cast

import pytest

from envbuild.audit import collected_environment, image_collector
from envbuild.image.docker_engine import Engine
from envbuild.runners import docker_runner
from envbuild.testrun.run_result import RawOutput
from envbuild.testrun.selftest_job import Job
from envbuild.util.errors import CheckFailed
from unit.support import image_of


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace containers, in which the program `python` is missing. Return the programs that the containers were to
    start."""
    found: list[str] = []

    def run(engine: object, job: Job) -> RawOutput:
        found.append(job.argv[0])
        return RawOutput(b"", "", 127 if job.argv[0] == "python" else 0, 1.0)

    monkeypatch.setattr(docker_runner, "run_in_container", run)
    return found


def test_python3_is_tried_if_python_is_missing(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    held: Any = object()
    monkeypatch.setattr(collected_environment, "read", lambda output, nonce, name: held)
    assert image_collector.collect_from_image(cast(Engine, None), image_of(), "an/image") is held
    assert tried == ["python", "python3"]


def test_an_image_without_a_python_is_reported(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_collector, "_NOT_THERE", (127, 0))
    with pytest.raises(CheckFailed, match="an/image has no Python on its PATH"):
        image_collector.collect_from_image(cast(Engine, None), image_of(), "an/image")
