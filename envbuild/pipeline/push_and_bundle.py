"""`push`, `save` and `load` as lists of steps: first the image, then its evidence, then the tags."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.attest import (
    image_bundle_file,
    image_verifier,
    in_toto_statements,
    keys_and_signatures,
    registry_attestations,
    sbom,
)
from envbuild.attest.image_verifier import Verdict
from envbuild.attest.in_toto_statements import BuildDetails, Subject
from envbuild.attest.keys_and_signatures import Signer
from envbuild.attest.policy import Policy
from envbuild.evidence import evidence_statements_and_store, profile_proofs
from envbuild.facts import fact_file_reader
from envbuild.fetch import sha256_file_store, wheel_resolution_and_download
from envbuild.image import build_records_and_comparison, oci_layout_writer, registry_push
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.image_naming import VERIFIED, repository
from envbuild.lock import wheel_contents
from envbuild.lock.lock_file import Lock
from envbuild.pipeline.model import Options, Progress, StepResult
from envbuild.pipeline.pipeline_steps import Session
from envbuild.pipeline.workflows import existing, working
from envbuild.profile import profile_name_lookup
from envbuild.profile.loaded_profile import Source
from envbuild.registry.oci_types import Manifest, Reference, Target
from envbuild.registry.registry_client import Repository
from envbuild.resolve import plan_resolver
from envbuild.util import temporary_files
from envbuild.util.errors import EngineError, NotProved, UsageError, some
from envbuild.util.rejected_input_errors import Malformed

_NO_SIGNER = f"""\
envbuild keygen -o team; then set signing_key in config.yaml, or {keys_and_signatures.KEY}
--unsigned pushes without a signature: `envbuild verify` refuses such an image"""


@dataclass
class Pushed:
    """The result of `push`, filled in as the steps run. `signed`: the key's fingerprint, None without a key."""

    profile: str
    repository: str
    signed: str | None
    digest: str | None = None
    statements: int = 0
    tags: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {
            "profile": self.profile,
            "repository": self.repository,
            "digest": self.digest,
            "statements": self.statements,
            "signed": self.signed,
            "tags": self.tags,
        }


def push(name: str, target: str, progress: Progress, *, zstd: bool = False, unsigned: bool = False) -> Pushed:
    """Push a verified image with its evidence to a registry; set the tags last. A repeated run does only what remains.

    `zstd`: compress the layers with zstd, unless the registry has the image already. Raises UsageError without a
    signing key unless `unsigned` allows it, NotProved if evidence is missing, NetworkError, and CheckFailed if the
    registry has something else.
    """
    reference = registry_push.parse_repository(target)
    session = Session(name, Options(locked=True), progress)
    signer = None if unsigned else keys_and_signatures.configured_signer()
    if signer is None and not unsigned:
        raise UsageError("No signing key: nothing was pushed", hint=_NO_SIGNER)
    done = Pushed(name, reference.repository, signer.public.fingerprint if signer else None)
    with working(session, done.document):
        source, locked, image = _proved(session)
        done.profile = source.name
        place = Repository(reference)
        manifest = session.step("push image", lambda: _image(session, place, image, zstd))
        done.digest = manifest.digest
        subject = Subject(repository(source.name), image.id, reference.repository, manifest.digest)
        wanted = statements_of(source, locked, image, subject)
        done.statements = len(wanted)
        session.step("evidence", lambda: _evidence(place, manifest, wanted, signer))
        session.step("tags", lambda: _tags(place, manifest, locked, done))
    return done


def export_bundle(name: str, file: Path, progress: Progress) -> Pushed:
    """Write a verified image with its evidence, the public key and its lock to one file. Raises NotProved."""
    if file.exists():
        raise UsageError(f"{file} is there already", hint="choose another name")
    session = Session(name, Options(locked=True), progress)
    signer = keys_and_signatures.configured_signer()
    done = Pushed(name, str(file), signer.public.fingerprint if signer else None)
    with (
        working(session, done.document),
        temporary_files.folder("bundle", inside=file.parent) as folder,
    ):
        source, locked, image = _proved(session)
        done.profile = source.name
        place = oci_layout_writer.Folder(folder / "layout")
        manifest = session.step("save image", lambda: _saved(session, place, image))
        done.digest = manifest.digest
        place.put_manifest(source.name, manifest)
        wanted = statements_of(
            source, locked, image, Subject(repository(source.name), image.id, str(file.name), manifest.digest)
        )
        done.statements = len(wanted)
        session.step("evidence", lambda: _evidence(place, manifest, wanted, signer))
        files = {
            image_bundle_file.LOCK: source.known_lock.read_bytes(),
            image_bundle_file.PROFILE: source.name.encode(),
        }
        files |= {image_bundle_file.KEY: signer.public.pem} if signer else {}
        partial = folder / "bundle.tar"
        session.step("write", lambda: _written(place, partial, files))
        partial.replace(file)
    return done


def _written(place: oci_layout_writer.Folder, file: Path, files: Mapping[str, bytes]) -> StepResult[None]:
    place.write(file, files)
    return StepResult(None, note=f"{file.stat().st_size / 1e6:.0f} MB")


def _saved(session: Session, place: oci_layout_writer.Folder, image: Image) -> StepResult[Manifest]:
    return StepResult(place.take(session.connected(), image), note=some(len(image.layers), "layer"))


def import_bundle(file: Path, policy: Policy, progress: Progress) -> tuple[Verdict, str]:
    """Load the image of a bundle after checking its evidence and every byte. Return the verdict and the image's tag.

    Raises CheckFailed with every reason; in that case nothing is loaded.
    """
    bundle = image_bundle_file.Bundle(file)
    name = bundle.file(image_bundle_file.PROFILE, 100).decode(errors="replace")
    if not profile_name_lookup.NAME.fullmatch(name):
        raise Malformed("the bundle does not name its profile")
    verdict = image_verifier.verify_at(
        bundle, Reference("bundle", name, name), policy, (), datetime.datetime.now(datetime.UTC)
    )
    verdict.ref = str(file)
    verdict.require()
    assert verdict.image and verdict.build
    tag = f"{repository(verdict.build.name)}:{verdict.build.lock.short}"
    manifest = bundle.manifest(verdict.digest or "")
    assert manifest
    for digest in verdict.image.layers:  # before the engine receives any data
        for _ in bundle.blocks(digest):
            pass
    progress.say(f"loading {tag}")
    engine = Engine()
    engine.load(bundle.loadable(manifest, verdict.image.layers, tag))
    loaded = engine.find(tag)
    if loaded is None or loaded.id != verdict.image.id:
        raise EngineError(f"the engine loaded another image than {verdict.image.id}")
    return verdict, tag


def _proved(session: Session) -> tuple[Source, Lock, Image]:
    source, locked, image = existing(session, None)
    wanted = profile_proofs.wanted(source.name, source.profile, locked)
    found = evidence_statements_and_store.newest_proofs(
        image.id, wanted, profile_proofs.models_to_prove(source.profile)
    )
    missing = [f"{proof.model}: {proof.reason}" for proof in found if proof.state != "proved"]
    if missing:
        text = f"{source.name} is not proved on all it is for: nothing is published"
        raise NotProved(text, hint="\n".join([*missing, f"run: envbuild make {source.known}"]))
    return source, locked, image


def _image(session: Session, place: Repository, image: Image, zstd: bool) -> StepResult[Manifest]:
    found, there = registry_push.pushed(session.connected(), place, image, session.progress.line, zstd)
    return StepResult(found, cached=there, note=found.digest)


def statements_of(source: Source, locked: Lock, image: Image, subject: Subject) -> list[tuple[str, bytes]]:
    """Return every statement about an image as (kind, payload): its build, its contents, and each run of its
    self-test."""
    made = [
        in_toto_statements.slsa_provenance(build_details(source, locked, image), subject),
        in_toto_statements.sbom(sbom.make_sbom(source.name, locked, image.id), subject),
    ]
    for path, record in evidence_statements_and_store.stored(image.id):
        if (record["profile"], record["lock"]) == (source.name, locked.id):
            made.append(
                in_toto_statements.test_result(record, evidence_statements_and_store.record_text(path), subject)
            )
    return [(one["predicateType"], in_toto_statements.canonical(one)) for one in made]


def build_details(source: Source, locked: Lock, image: Image) -> BuildDetails:
    """Return what this envbuild recorded about the build. Wheels that are no longer in the store are downloaded
    again."""
    record = next(record for record in build_records_and_comparison.all_records(image.id) if record.lock == locked.id)
    plan = plan_resolver.resolve(source)
    wheel_resolution_and_download.fetch_wheels(
        locked.wheels, plan.python, plan.glibc, sha256_file_store.wheel_store(), lambda file, count: None
    )
    roots = {
        item.wheel.file: wheel_contents.roots(sha256_file_store.wheel_store().path(item.wheel.sha256, item.wheel.file))
        for item in locked.wheels
    }
    return BuildDetails(
        profile=source.name,
        document=source.document.data,
        lock=locked,
        lock_text=source.known_lock.read_text(encoding="utf-8"),
        facts=fact_file_reader.facts_digest(),
        recipe=record.recipe,
        versions={"envbuild": importlib.metadata.version("envbuild"), "engine": record.builder},
        roots=roots,
        compiled=record.extensions,
    )


def _evidence(
    place: Target, manifest: Manifest, wanted: list[tuple[str, bytes]], signer: Signer | None
) -> StepResult[int]:
    new = registry_attestations.publish(place, manifest, wanted, signer)
    by = f"signed by {signer.public.fingerprint[:12]}" if signer else "unsigned"
    return StepResult(new, cached=new == 0, note=f"{some(len(wanted), 'statement')}, {by}")


def _tags(place: Repository, manifest: Manifest, locked: Lock, done: Pushed) -> StepResult[None]:
    """Set `verified` last, so that the evidence exists for anyone who pulls that tag."""
    moved = False
    for tag in (locked.short, VERIFIED):
        before = place.manifest(tag)
        if before is None or before.digest != manifest.digest:
            place.put_manifest(tag, manifest)
            moved = True
        done.tags.append(f"{done.repository}:{tag}")
    return StepResult(None, cached=not moved, note=" ".join(done.tags))
