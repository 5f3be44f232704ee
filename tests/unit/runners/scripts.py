"""Jobs and sites whose batch scripts are kept as golden files."""

from __future__ import annotations

import dataclasses
from pathlib import PurePosixPath

from envbuild.runners.slurm import batch_script, multi_node_script
from envbuild.runners.slurm.slurm_settings import SlurmSite
from envbuild.testrun.selftest_job import Job, Limits

ID = f"sha256:{'1' * 64}"
FETCHED = f"registry.example:5000/team/h20@sha256:{'2' * 64}"
ODD = """it's "$(touch /tmp/odd)" `id` \\ #"""
JOB = Job(ID, ("python", "-I", "-c", ODD), b"", "0" * 32, Limits(8 << 30, 900), True, (), ("h20",), 2)
CPU = dataclasses.replace(JOB, gpus=False, models=(), count=1)
FOLDER = PurePosixPath("/shared/envbuild-h20-1")
WHOLE = SlurmSite(
    "gpu", "team", "h20&nvlink", "30", qos="high", reservation="proofs", cpus_per_task="8", mem="64G",
    gres={"h20": "gpu:nvidia_h20"},
)  # fmt: skip
CASES: dict[str, tuple[Job, SlurmSite, tuple[str, ...]]] = {
    "cpu": (CPU, SlurmSite(), (ID, f"sha256:{'3' * 64}")),
    "docker": (JOB, WHOLE, (ID,)),
    "podman": (JOB, SlurmSite(container="podman", registry="r", requeue=True), (FETCHED,)),
    "apptainer": (
        JOB,
        SlurmSite(container="apptainer", registry="r", program="/opt/apptainer/bin/apptainer"),
        (FETCHED,),
    ),
    "pyxis": (JOB, SlurmSite(container="pyxis", registry="r"), (FETCHED,)),
    "nodes": (dataclasses.replace(JOB, nodes=4), SlurmSite(registry="r", interface="ib0"), (FETCHED,)),
}


def rendered(case: str) -> str:
    job, place, names = CASES[case]
    render = multi_node_script.render if job.nodes > 1 else batch_script.render
    return render(job, place, FOLDER, "envbuild-h20-1", names)
