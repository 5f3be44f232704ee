"""`verify --rebuild`: the image made again from the lock that its evidence names, compared layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from envbuild import scratch
from envbuild.attest import alike, bundles, layers
from envbuild.attest.layers import Config
from envbuild.attest.oci import Manifest, Place, digest_in
from envbuild.attest.trust import Build
from envbuild.attest.verify import Verdict
from envbuild.errors import some
from envbuild.image import dockerfile
from envbuild.image.engine import Image
from envbuild.making import Options, Progress
from envbuild.pipeline import alone
from envbuild.plan import resolve
from envbuild.plan.source import Source
from envbuild.proof.reasons import Reason, Refusal
from envbuild.steps import Session


def objections(verdict: Verdict, progress: Progress) -> list[Reason]:
    """Why what the lock gives is not the image that was proved; empty if it is the same. The verdict learns
    which layers hold the same in another order.

    Another builder may write another history; layers, and what a container gets of the configuration, must be the same.
    Raises what a build raises. Whatever comes of it, nothing of the rebuild stays.
    """
    assert verdict.build and verdict.proved
    session = Session(f"{verdict.build.name[:55]}-rebuild", Options(locked=True, no_cache=True), progress)
    session.made.lock = verdict.build.lock
    with alone(session.made.name, progress.say):
        try:
            found = _objection(session, _made(session, verdict.build), *verdict.proved, verdict.reordered)
            progress.say("the lock gives another image" if found else _same(verdict.reordered))
            return [found] if found else []
        except Refusal as refusal:
            return [refusal.reason]
        finally:
            session.discard()


def _same(reordered: Sequence[int]) -> str:
    if not reordered:
        return "the lock gives the same image"
    numbers = ", ".join(map(str, reordered))
    return (
        f"the lock gives the same files, under another image id: the archive of layer {numbers} lists them in another "
        "order, as an engine may (docs/decisions/0019)"
    )


def _objection(
    session: Session, made: Image, place: Place, manifest: Manifest, config: Config, reordered: list[int]
) -> Reason | None:
    """The first one, if there is any."""
    if made.id == config.id:
        return None
    count = len(made.layers)
    if len(config.layers) != count:
        return Reason("rebuild", f"it has {some(len(config.layers), 'layer')}, the lock gives {count}")
    pairs = list(zip(config.layers, made.layers, strict=True))
    differing = [index for index, (there, here) in enumerate(pairs) if there != here]
    with bundles.saved(session.connected(), made) as local:
        for index in differing:
            there, here = pairs[index]
            how = alike.difference((place, digest_in(manifest.layers[index]), there), (local, here, here))
            if how:
                return Reason("rebuild", f"layer {index + 1} of {count} is another: {how}")
        given = layers.parsed(made.id, local.blob(made.id))
    differ = [what for what in ("labels", "environment", "settings") if getattr(config, what) != getattr(given, what)]
    if differ:
        return Reason("rebuild", f"the layers hold the same, its configuration is another: {', '.join(differ)}")
    reordered += [index + 1 for index in differing]
    return None


def _made(session: Session, build: Build) -> Image:
    """Under a name of its own, every layer anew."""
    name = session.made.name
    with scratch.folder("rebuild") as folder:
        source = Source(name, folder / "profiles" / f"{name}.yaml", build.profile, build.document)
        plan = resolve.resolve(source)
        locked = session.at_hand(plan, build.lock)
        return session.build(source, plan, locked, dockerfile.render(locked, name))
