"""Which runner takes a self-test, and by what name it knows the image."""

from __future__ import annotations

from collections.abc import Callable

from envbuild import settings
from envbuild.attest.oci import Manifest, Reference
from envbuild.attest.registry import Repository
from envbuild.errors import CheckFailed, NetworkError, UsageError, near
from envbuild.image.engine import Engine, Image
from envbuild.making import Options
from envbuild.plan import facts
from envbuild.plan.profile import Profile
from envbuild.proof.runners.kubernetes import site as kubernetes_site
from envbuild.proof.runners.kubernetes.runner import Kubernetes
from envbuild.proof.runners.local import Local
from envbuild.proof.runners.protocol import Runner
from envbuild.proof.runners.slurm import site as slurm_site
from envbuild.proof.runners.slurm.runner import Slurm

RUNNERS = ("local", "slurm", "kubernetes")


def runner(
    options: Options, engine: Engine, image: Image, name: str, on_line: Callable[[str], None], *, dry: bool = False
) -> Runner:
    """The one that is asked for, else the site's (setting `on`), else the engine's own.

    Pushes the image where the runner fetches it from a registry, unless `dry`: its script is only shown then, and where
    the registry lacks the image, with a digest of zeros, which `on_line` is told. Raises UsageError for what does not
    go together.
    """
    on = options.on
    chosen = on.runner or settings.setting("on") or "local"
    if chosen not in RUNNERS:
        raise UsageError(f"there is no runner {chosen!r}", hint=near(chosen, RUNNERS) or f"known: {', '.join(RUNNERS)}")
    for other in on.given:
        if other != chosen:
            raise UsageError(f"--{other} is for --on {other}")
    if on.resume and chosen != "slurm":
        raise UsageError("--resume is for --on slurm")
    if chosen == "local":
        return Local(engine, image)
    if options.asked.gpus:
        raise UsageError("--gpus names GPUs of the engine's machine; a scheduler hands out its own", hint="--gpu MODEL")
    section, given, known = settings.section(chosen), on.given.get(chosen, {}), facts.gpus().__contains__
    fetched = _known if dry else _fetched
    if chosen == "slurm":
        cluster = slurm_site.parse(section, given, known)
        return Slurm(cluster, image, fetched(cluster.registry, engine, image, on_line), name, on.resume)
    place = kubernetes_site.parse(section, given, known)
    return Kubernetes(place, image, fetched(place.registry, engine, image, on_line), name)


def _fetched(registry: str | None, engine: Engine, image: Image, on_line: Callable[[str], None]) -> str | None:
    """By which name a node gets the image from a registry, where it is now; None without one."""
    if not registry:
        return None
    place = Repository(repository(registry))
    return f"{place.reference.repository}@{pushed(engine, place, image, on_line)[0].digest}"


def _known(registry: str | None, engine: Engine, image: Image, on_line: Callable[[str], None]) -> str | None:
    """The same name where the registry has the image already; nothing is pushed."""
    if not registry:
        return None
    place = Repository(repository(registry))
    name = place.reference.repository
    try:
        found = _there(place, image)
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


def repository(text: str) -> Reference:
    """Raises UsageError for what names an image of it."""
    reference = Reference.parse(text)
    if reference.tag or reference.digest:
        raise UsageError(f"{text} has a tag", hint=f"name the repository: {reference.repository}; tags are made")
    return reference


def pushed(engine: Engine, place: Repository, image: Image, on_line: Callable[[str], None]) -> tuple[Manifest, bool]:
    """The image in a registry, and whether it was there: under a tag of its own id, for one cannot push by
    digest. Nothing is believed but the manifest. Raises CheckFailed where that is another's, NetworkError."""
    tag, found = _tag(image), _there(place, image)
    name = place.reference.repository
    if found is not None:
        engine.remove(f"{name}:{tag}")  # of one that was killed just after it had pushed
        return found, True
    engine.tag(image, name, tag)
    try:
        engine.push(name, tag, on_line)
    finally:
        engine.remove(f"{name}:{tag}")
    found = _there(place, image)
    if found is None:
        raise CheckFailed(f"{name}:{tag} is not the image that was just pushed", hint="did somebody move the tag?")
    return found, False


def _tag(image: Image) -> str:
    return f"id-{image.id.removeprefix('sha256:')}"


def _there(place: Repository, image: Image) -> Manifest | None:
    """The image's manifest, where its tag names that."""
    found = place.manifest(_tag(image))
    return found if found is not None and not found.is_index and found.config == image.id else None
