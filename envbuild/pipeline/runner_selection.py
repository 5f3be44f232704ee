"""Selects the runner of a self-test, and the name under which the runner finds the image.

A scheduler's modules are imported only when it is selected: most self-tests run on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from envbuild.facts import database
from envbuild.image import registry_push
from envbuild.image.docker_engine import Image
from envbuild.pipeline.image_stores.image_store import ImageStore
from envbuild.pipeline.model import RunnerOptions, SelfTestOrder
from envbuild.profile.model import Profile
from envbuild.registry.registry_client import Repository
from envbuild.runners.docker_runner import DockerRunner
from envbuild.runners.runner_interface import Runner, Scheduled
from envbuild.testrun.selftest_job import RunRequest
from envbuild.util import settings
from envbuild.util.errors import NetworkError, UsageError

# The setting that gives the scheduler's name of a GPU model.
_CALLED = {"slurm": "slurm: {gres: ...}", "kubernetes": "kubernetes: {products: ...}"}


@dataclass(frozen=True)
class SelectedCluster:
    """A cluster that runs jobs, as the options and the site's settings describe it. `name`: slurm or kubernetes.
    `registry`: the repository from which its nodes pull images; None: the engines of the nodes must have them.
    `runner_for`: returns the runner for an image, its reference in the registry, and the id of the job to resume."""

    name: str
    registry: str | None
    runner_for: Callable[[Image, str | None, str | None], Scheduled]


def selected_cluster(on: RunnerOptions, profile: str, request: RunRequest) -> SelectedCluster | None:
    """Return the cluster that the options request, otherwise that of the setting `on`; None for this machine. Raises
    UsageError for incompatible options, SettingsError for invalid site settings."""
    chosen = on.runner or settings.setting("on") or "local"
    for other in on.given:
        if other != chosen:
            raise UsageError(f"--{other} is for --on {other}")
    if on.resume and chosen == "local":
        raise UsageError("--resume is for --on slurm and --on kubernetes")
    if on.nodes > 1 and chosen != "slurm":
        raise UsageError("--nodes is for --on slurm", hint="it starts ranks on several nodes by srun")
    if on.nodes > 1 and on.resume:
        raise UsageError(
            "--resume and --nodes exclude each other: --resume continues one job, --nodes submits two",
            hint="leave --nodes out, or submit a new job",
        )
    if chosen == "local":
        return None
    refuse_selected_gpus(chosen, request)
    return _slurm(on, profile) if chosen == "slurm" else _kubernetes(on, profile)


def _slurm(on: RunnerOptions, profile: str) -> SelectedCluster:
    from envbuild.runners.slurm import multi_node_script, slurm_settings
    from envbuild.runners.slurm.slurm_runner import Slurm

    given = on.given.get("slurm", {})
    site = settings.read("slurm", partial(slurm_settings.parse, knows=database.gpus().__contains__), given)
    if on.nodes > 1:  # raised now, not after the self-test on one node
        multi_node_script.network(site)
    origins = settings.origins("slurm", given)
    return SelectedCluster(
        "slurm",
        site.registry,
        lambda image, reference, job: Slurm(site, image, reference, profile, job, origins=origins),
    )


def _kubernetes(on: RunnerOptions, profile: str) -> SelectedCluster:
    from envbuild.runners.kubernetes import kubernetes_settings
    from envbuild.runners.kubernetes.kubernetes_runner import Kubernetes

    given = on.given.get("kubernetes", {})
    site = settings.read("kubernetes", partial(kubernetes_settings.parse, knows=database.gpus().__contains__), given)
    return SelectedCluster(
        "kubernetes", site.registry, lambda image, reference, job: Kubernetes(site, image, reference, profile, job)
    )


def runner(
    order: SelfTestOrder,
    images: ImageStore,
    image: Image,
    on_line: Callable[[str], None],
    *,
    dry: bool = False,
    validate: Callable[[Scheduled], None] = lambda runner: None,
) -> Runner:
    """Return the runner of the selected cluster, otherwise that of the local engine.

    Pushes the image if the runner pulls it from a registry. With `dry` nothing is pushed: only the script is shown,
    with a digest of zeros if the registry lacks the image, and `on_line` receives a message about that. `validate`
    is called before a push with a runner of such a placeholder image, to raise errors that would otherwise occur only
    after the push. Raises what `selected_cluster` raises.
    """
    cluster = selected_cluster(order.on, order.loaded.name, order.request)
    if cluster is None:
        return DockerRunner(images.engine, image)
    registry, resume = cluster.registry, order.on.resume
    if dry:
        if cluster.name == "kubernetes" and not registry:  # a real run reports this itself
            from envbuild.runners.kubernetes.kubernetes_runner import ALONE

            on_line(ALONE)
        return cluster.runner_for(image, _reference_without_push(registry, image, on_line), resume)
    validate(placeholder_runner(cluster, image, resume))
    return cluster.runner_for(image, _pushed_reference(registry, images, image, on_line), resume)


_ZEROS = f"sha256:{0:064}"  # placeholder digest of an image that is not pushed yet
UNKNOWN_IMAGE = Image(_ZEROS, _ZEROS, (), {}, {}, 0)  # stands for an image that is not built yet


def placeholder_runner(cluster: SelectedCluster, image: Image, resume: str | None) -> Scheduled:
    """Return the runner for an image whose digest in the registry is not known yet, to validate its jobs."""
    registry = cluster.registry
    reference = f"{_repository(registry).reference.repository}@{_ZEROS}" if registry else None
    return cluster.runner_for(image, reference, resume)


def refuse_selected_gpus(runner: str, request: RunRequest) -> None:
    """Raise UsageError if GPUs are selected by number for a cluster."""
    if request.gpus:
        raise UsageError(
            "--gpus names GPUs of the engine's machine; a scheduler assigns its own",
            hint=f"--gpu MODEL selects the GPU model; gpu_count in the profile sets the number of GPUs\n"
            f"{_CALLED[runner]} sets the name that the cluster uses",
        )


def _repository(registry: str) -> Repository:
    return Repository(registry_push.parse_repository(registry))


def _pushed_reference(
    registry: str | None, images: ImageStore, image: Image, on_line: Callable[[str], None]
) -> str | None:
    """Push the image if needed and return the name by which a node pulls it from the registry; None without a
    registry."""
    if not registry:
        return None
    place = _repository(registry)
    return f"{place.reference.repository}@{images.push(place, image, on_line).digest}"


def _reference_without_push(registry: str | None, image: Image, on_line: Callable[[str], None]) -> str | None:
    """Return the name that `_pushed_reference` would return, without pushing. If the registry lacks the image, zeros
    stand for its digest."""
    if not registry:
        return None
    place = _repository(registry)
    name = place.reference.repository
    try:
        found = registry_push.find_pushed(place, image.id)
    except NetworkError as error:
        on_line(f"{name} did not answer: {error.message}")
        found = None
    if found is None:
        on_line(f"the image is not in {name} yet (a real run pushes it): zeros stand for its digest")
    return f"{name}@{found.digest if found else _ZEROS}"


def models_to_test(profile: Profile, gpu: str | None) -> tuple[str, ...]:
    """Return the GPU models on one of which the self-test must run. Raises UsageError if `gpu` is not in the
    profile."""
    if gpu is None:
        return tuple(profile.gpus)
    if gpu not in profile.gpus:
        raise UsageError(f"the profile is not for {gpu}", hint=f"its GPUs: {', '.join(profile.gpus) or 'none'}")
    return (gpu,)
