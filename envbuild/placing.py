"""Which runner takes a self-test, and by what name it knows the image."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from envbuild import settings
from envbuild.attest import pushing
from envbuild.attest.registry import Repository
from envbuild.errors import NetworkError, UsageError
from envbuild.image.engine import Engine, Image
from envbuild.making import Options
from envbuild.plan import facts
from envbuild.plan.profile import Profile
from envbuild.proof.runners.kubernetes import site as kubernetes_site
from envbuild.proof.runners.kubernetes.runner import ALONE, Kubernetes
from envbuild.proof.runners.local import Local
from envbuild.proof.runners.protocol import Runner
from envbuild.proof.runners.slurm import nodes
from envbuild.proof.runners.slurm import site as slurm_site
from envbuild.proof.runners.slurm.runner import Slurm

# By what a site says under which name its scheduler knows a card.
_CALLED = {"slurm": "slurm: {gres: ...}", "kubernetes": "kubernetes: {products: ...}"}


def runner(
    options: Options, engine: Engine, image: Image, name: str, on_line: Callable[[str], None], *, dry: bool = False
) -> Runner:
    """The one that is asked for, else the site's (setting `on`), else the engine's own: one of names.RUNNERS.

    Pushes the image where the runner fetches it from a registry, unless `dry`: its script is only shown then, and where
    the registry lacks the image, with a digest of zeros, which `on_line` is told. Raises UsageError for what does not
    go together, SettingsError for what is at fault in the site's settings.
    """
    on = options.on
    chosen = on.runner or settings.setting("on") or "local"
    for other in on.given:
        if other != chosen:
            raise UsageError(f"--{other} is for --on {other}")
    if on.resume and chosen == "local":
        raise UsageError("--resume is for --on slurm and --on kubernetes")
    if on.nodes > 1 and chosen != "slurm":
        raise UsageError("--nodes is for --on slurm", hint="it starts ranks on several nodes by srun")
    if on.nodes > 1 and on.resume:
        raise UsageError("--resume takes up one job, and --nodes makes two", hint="leave --nodes out, or run anew")
    if chosen == "local":
        return Local(engine, image)
    if options.asked.gpus:
        raise UsageError(
            "--gpus names GPUs of the engine's machine; a scheduler hands out its own",
            hint=f"--gpu MODEL says which card, gpu_count in the profile how many, {_CALLED[chosen]} what it is called",
        )
    given, known = on.given.get(chosen, {}), facts.gpus().__contains__
    fetched = _known if dry else _fetched
    if chosen == "slurm":
        cluster = settings.read("slurm", partial(slurm_site.parse, knows=known), given)
        if on.nodes > 1:  # told now, and not after the self-test on one
            nodes.network(cluster)
        reference = fetched(cluster.registry, engine, image, on_line)
        return Slurm(cluster, image, reference, name, on.resume, origins=settings.origins("slurm", given))
    place = settings.read("kubernetes", partial(kubernetes_site.parse, knows=known), given)
    if dry and not place.registry:  # a run says so itself
        on_line(ALONE)
    return Kubernetes(place, image, fetched(place.registry, engine, image, on_line), name, on.resume)


def _fetched(registry: str | None, engine: Engine, image: Image, on_line: Callable[[str], None]) -> str | None:
    """By which name a node gets the image from a registry, where it is now; None without one."""
    if not registry:
        return None
    place = Repository(pushing.repository(registry))
    return f"{place.reference.repository}@{pushing.pushed(engine, place, image, on_line)[0].digest}"


def _known(registry: str | None, engine: Engine, image: Image, on_line: Callable[[str], None]) -> str | None:
    """The same name where the registry has the image already; nothing is pushed."""
    if not registry:
        return None
    place = Repository(pushing.repository(registry))
    name = place.reference.repository
    try:
        found = pushing.there(place, image)
    except NetworkError as error:
        on_line(f"{name} could not be asked: {error.message}")
        found = None
    if found is None:
        on_line(f"the image is not in {name}, where a run puts it first: zeros stand for its digest")
    return f"{name}@{found.digest if found else f'sha256:{0:064}'}"


def models(profile: Profile, gpu: str | None) -> tuple[str, ...]:
    """The GPUs on one of which the self-test is to run. Raises UsageError if `gpu` is none of the profile's."""
    if gpu is None:
        return tuple(profile.gpus)
    if gpu not in profile.gpus:
        raise UsageError(f"the profile is not for {gpu}", hint=f"its GPUs: {', '.join(profile.gpus) or 'none'}")
    return (gpu,)
