"""Collects the contents of an image in a container of the engine, or in a job of a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.audit import collected_environment, environment_audit
from envbuild.audit.collected_environment import Holdings
from envbuild.image.docker_engine import Engine, Image
from envbuild.runners import docker_runner
from envbuild.runners.runner_interface import Scheduled, Watch
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


def collect_on_cluster(runner: Scheduled, name: str, wheels: Mapping[str, Mapping[str, str]], watch: Watch) -> Holdings:
    """Run the collector in a job of a cluster, with the command `python` of the runner's image. `name`, `wheels`: as in
    collect_from_image. If the hashes of the wheels do not fit into the job's input, the files are compared with RECORD
    alone, and `watch` gets a message.

    Raises what the runner raises, and CheckFailed if the collector gives no result.
    """
    job = environment_audit.collector_job(runner.image, wheels=wheels)
    if runner.max_input is not None and len(job.stdin) > runner.max_input:
        watch.say(
            f"the audit compares files with RECORD instead of the wheels: the hashes of their files, "
            f"{len(job.stdin) / 1e6:.1f} MB, do not fit into a job's input of {runner.max_input / 1e6:.1f} MB"
        )
        job = environment_audit.collector_job(runner.image)
    return collected_environment.read(runner.run(job, watch), job.nonce, name)
