"""Collects the contents of an image in a container."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.audit import collected_environment, environment_audit
from envbuild.audit.collected_environment import Holdings
from envbuild.image.docker_engine import Engine, Image
from envbuild.runners import docker_runner
from envbuild.util.errors import CheckFailed

_NOT_THERE = (126, 127)  # exit codes if the container cannot start the program


def collect_from_image(
    engine: Engine, image: Image, name: str, wheels: Mapping[str, Mapping[str, str]] | None = None
) -> Holdings:
    """Run the collector in a container of the image. `name`: the image's name in messages; `wheels`: as in
    environment_audit.collector_job.

    Raises CheckFailed if the image has no Python, or if its Python gives no result.
    """
    for python in ("python", "python3"):
        job = environment_audit.collector_job(image.handle, python, wheels)
        output = docker_runner.run_in_container(engine, job)
        if output.exit_code not in _NOT_THERE:
            return collected_environment.read(output, job.nonce, name)
    raise CheckFailed(f"{name} has no Python on its PATH: there is no torch to audit")
