"""Has an image collect what it holds, in a container of it."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.audit import environment_audit, environment_contents
from envbuild.audit.environment_contents import Holdings
from envbuild.image.docker_engine import Engine, Image
from envbuild.runners import docker_runner
from envbuild.util.errors import CheckFailed

_NOT_THERE = (126, 127)  # of the container's init, where it cannot start the program


def collect_from_image(
    engine: Engine, image: Image, name: str, wheels: Mapping[str, Mapping[str, str]] | None = None
) -> Holdings:
    """`name` is what messages call it; `wheels` as in audit.job.

    Raises CheckFailed where it has no Python, or one that brings no result.
    """
    for python in ("python", "python3"):
        job = environment_audit.collector_job(image.handle, python, wheels)
        output = docker_runner.run_in_container(engine, job)
        if output.exit_code not in _NOT_THERE:
            return environment_contents.read(output, job.nonce, name)
    raise CheckFailed(f"{name} has no Python on its PATH: no torch here, nothing to look at")
