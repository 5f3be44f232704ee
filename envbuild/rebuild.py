"""`verify --rebuild`: the image made again from the lock that its evidence names, compared layer by layer."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from itertools import zip_longest

from envbuild import scratch
from envbuild.attest import bundles, layers
from envbuild.attest.layers import Config
from envbuild.attest.oci import Manifest, Place, digest_in
from envbuild.attest.trust import Build
from envbuild.attest.verify import Verdict
from envbuild.errors import some
from envbuild.image import dockerfile
from envbuild.image.engine import Engine, Image
from envbuild.making import Options, Progress
from envbuild.pipeline import alone
from envbuild.plan import resolve
from envbuild.plan.source import Source
from envbuild.proof.reasons import Reason, Refusal
from envbuild.steps import Session

Facts = tuple[object, ...]
_KINDS = ("kind", "mode", "owner", "group", "time", "link", "size", "content")


def objections(verdict: Verdict, progress: Progress) -> list[Reason]:
    """Why what the lock gives is not the image that was proved; empty if it is the same.

    Another builder may write another configuration; layers, labels and environment must be the same. Raises what a
    build raises. Whatever comes of it, nothing of the rebuild stays.
    """
    assert verdict.build and verdict.proved
    session = Session(f"{verdict.build.name[:55]}-rebuild", Options(locked=True, no_cache=True), progress)
    session.made.lock = verdict.build.lock
    with alone(session.made.name, progress.say):
        try:
            found = list(_differences(session, _made(session, verdict.build), *verdict.proved))
            progress.say("the lock gives another image" if found else "the lock gives the same image")
            return found
        except Refusal as refusal:
            return [refusal.reason]
        finally:
            session.discard()


def _differences(session: Session, made: Image, place: Place, manifest: Manifest, config: Config) -> Iterator[Reason]:
    """The first one, if there is any."""
    if made.id == config.id:
        return
    for index, (there, here) in enumerate(zip_longest(config.layers, made.layers)):
        if there is None or here is None:
            yield Reason("rebuild", f"it has {some(len(config.layers), 'layer')}, the lock gives {len(made.layers)}")
            return
        if there != here:
            first = _first(place, digest_in(manifest.layers[index]), there, session.connected(), made, here)
            yield Reason("rebuild", f"layer {index + 1} of {len(made.layers)} is another: {first}")
            return
    if (dict(made.labels), dict(made.environment)) != (dict(config.labels), dict(config.environment)):
        yield Reason("rebuild", "the layers are the same, labels or environment are not")


def _made(session: Session, build: Build) -> Image:
    """Under a name of its own, every layer anew."""
    name = session.made.name
    with scratch.folder("rebuild") as folder:
        source = Source(name, folder / "profiles" / f"{name}.yaml", build.profile, build.document)
        plan = resolve.resolve(source)
        locked = session.at_hand(plan, build.lock)
        return session.build(source, plan, locked, dockerfile.render(locked, name))


def _first(place: Place, digest: str, diff_id: str, engine: Engine, made: Image, here: str) -> str:
    """The first file in which two layers differ, and how."""
    with scratch.folder("rebuild") as folder:
        local = bundles.Folder(folder / "layout")
        with engine.saved(made) as archive:
            local.take(archive, made)
        there = _files(place, digest, diff_id)
        for one, two in zip_longest(there, _files(local, here, here)):
            if one is None or two is None or one[0] != two[0]:
                name = min(item[0] for item in (one, two) if item)
                return f"/{name} is in one of the two"
            if one[1] != two[1]:
                kinds = [kind for kind, a, b in zip(_KINDS, one[1], two[1], strict=True) if a != b]
                return f"/{one[0]} has another {', '.join(kinds)}"
    return "the same files in other archives"


def _files(place: Place, digest: str, diff_id: str) -> Iterator[tuple[str, Facts]]:
    """(path, what is compared of it) of each entry, in the order of the archive, which builders sort by path."""
    for member, archive in layers.entries(place, digest, diff_id):
        facts = (member.type, member.mode, member.uid, member.gid, member.mtime, member.linkname, member.size)
        yield member.name.strip("./"), (*facts, _content(member, archive))


def _content(member: tarfile.TarInfo, archive: tarfile.TarFile) -> str:
    seen = hashlib.sha256()
    stream = archive.extractfile(member) if member.isreg() else None
    while stream and (block := stream.read(1 << 20)):
        seen.update(block)
    return seen.hexdigest()
