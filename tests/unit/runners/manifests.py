"""Jobs and sites whose manifests are kept as golden files."""

from __future__ import annotations

import yaml

from envbuild.runners.kubernetes import job_manifest
from envbuild.runners.kubernetes.kubernetes_settings import KubernetesSite
from envbuild.testrun.selftest_job import Job
from unit.runners.scripts import CPU, FETCHED, ID, JOB

FULL = KubernetesSite(
    namespace="proofs", registry="r", runtime_class="nvidia", priority_class="low", queue=30,
    pull_secrets=("one", "two"), tolerations=("team=x:NoSchedule", "spot"),
    labels={"kueue.x-k8s.io/queue-name": "team"}, annotations={"team.example/why": 'a "proof": #1'}, cpu=8,
    nodes={"pool": "gpu", "zone.example/a": "b"}, products={"h20": ("NVIDIA-H20", "NVIDIA-H20-SHARED")},
)  # fmt: skip
CASES: dict[str, tuple[Job, KubernetesSite, str]] = {
    "cpu": (CPU, KubernetesSite(), ID),
    "h20": (JOB, KubernetesSite(registry="r"), FETCHED),
    "full": (JOB, FULL, FETCHED),
}


def objects(case: str) -> tuple[job_manifest.Object, job_manifest.Object]:
    job, place, image = CASES[case]
    return job_manifest.render(job, place, f"envbuild-{case}-1", image)


def rendered(case: str) -> str:
    return str(yaml.safe_dump_all(objects(case), sort_keys=False))
