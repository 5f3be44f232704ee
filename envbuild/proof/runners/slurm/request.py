"""What a job asks Slurm for, told to whoever does not get it: each with where it comes from. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.proof.job import Job
from envbuild.proof.runners.slurm.site import Site

_SET = ("partition", "account", "qos", "reservation", "constraint", "time", "cpus_per_task", "mem")


def told(job: Job, site: Site, profile: str, origins: Mapping[str, str]) -> str:
    """Lines. `origins`: a setting, or gres.MODEL -> where it is set; one that is not there is nobody's."""
    lines = [f"{key} {value}{_by(origins.get(key))}" for key in _SET if (value := getattr(site, key))]
    if job.gpus:
        model = job.models[0]
        name = origins.get(f"gres.{model}", f"{model}'s own name, where slurm: {{gres: ...}} has no other")
        lines.insert(
            0, f"gres {site.gres_of(model, job.count)} (the count: gpu_count of profile {profile}; the name: {name})"
        )
    if job.nodes > 1:
        lines.insert(0, f"nodes {job.nodes} (--nodes)")
    shown = "sinfo -o '%P %l %D %G %f' shows what there is: partition, time, nodes, gres, features"
    return "\n".join(["it asked for", *(f"  {line}" for line in lines), shown]) if lines else shown


def _by(origin: str | None) -> str:
    return f" ({origin})" if origin else ""
