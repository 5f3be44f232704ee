"""`push`, `save` and `load` as lists of steps: first the image, then its evidence, then the tags. For an environment,
`push` sends only evidence and tags."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envbuild.attest import (
    image_verifier,
    in_toto_statements,
    keys_and_signatures,
    registry_attestations,
    saved_image_file,
    sbom,
)
from envbuild.attest.image_verifier import Verdict
from envbuild.attest.in_toto_statements import BuildDetails, Subject
from envbuild.attest.keys_and_signatures import Signer
from envbuild.attest.policy import Policy
from envbuild.audit import environment_file_hasher
from envbuild.evidence import (
    environment_measurement,
    evidence_statements_and_store,
    profile_proofs_and_image_states,
    python_environment_status,
)
from envbuild.evidence.environment_record import MeasuredEnvironment
from envbuild.evidence.profile_proofs_and_image_states import ProofRow
from envbuild.facts import fact_file_reader
from envbuild.fetch import sha256_file_store, wheel_resolution_and_download
from envbuild.image import (
    engine_image_to_oci_layout,
    extension_wheel_build,
    registry_push,
    zstd_push,
)
from envbuild.image.build_records import Record
from envbuild.image.docker_engine import Engine
from envbuild.image.image_naming import ENVIRONMENT, VERIFIED, repository
from envbuild.image.oci import engine_load, image_upload, layer_blobs, lock_image_lookup_and_recipe
from envbuild.image.oci.image_description import OciImage
from envbuild.lock import lock_file, wheel_file_hashes_and_contents
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import layer_steps
from envbuild.pipeline.image_steps import load_profile, resolve_profile
from envbuild.pipeline.make_build_and_test import exclusive_run
from envbuild.pipeline.model import Recipe, StepResult
from envbuild.pipeline.progress_events import Listener, Note
from envbuild.pipeline.step_context import PartialResult, StepContext
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.registry.oci_types import Manifest, Reference, TaggedTarget, Target
from envbuild.registry.registry_client import Repository
from envbuild.resolve import plan_resolver
from envbuild.resolve.plan_resolver import Plan
from envbuild.runners import host_runner
from envbuild.util import temporary_files
from envbuild.util.errors import BuildError, EnvbuildError, NotProved, UsageError, some
from envbuild.util.json_output_types import Digest
from envbuild.util.untrusted_input_errors import Malformed, Refusal

_NO_SIGNER = f"create a key: envbuild keygen -o team; then set signing_key in config.yaml, or {keys_and_signatures.KEY}"
_UNSIGNED_IMAGE = "--unsigned publishes without a signature: `envbuild verify` and `envbuild load` refuse such an image"
_UNSIGNED_EVIDENCE = "--unsigned publishes without a signature: `envbuild verify` refuses such evidence"


@dataclass(frozen=True)
class Pushed:
    """The result of `push` and `save`, and its document; a field keeps its default until the step that gives its value
    has ended. `repository`: the target of `push`; `file`: the target of `save`. `environment`: with --python, the
    digest of the environment's locked files. `digest`: that of the manifest. `statements`: the number of statements.
    `key`: the fingerprint of the signing key, null without a key."""

    profile: str
    key: str | None
    repository: str | None = None
    file: str | None = None
    state: Literal["complete", "incomplete"] = "incomplete"
    lock: Digest | None = None
    image: Digest | None = None
    environment: Digest | None = None
    digest: Digest | None = None
    evidence: tuple[ProofRow, ...] = ()
    statements: int = 0
    tags: tuple[str, ...] = ()

    def document(self) -> Pushed:
        return self


def push(name: str, target: str, listener: Listener, *, zstd: bool = False, unsigned: bool = False) -> Pushed:
    """Push a verified image with its evidence to a registry; set the tags last. A repeated run skips finished parts.

    `zstd`: compress the layers with zstd, unless the registry has the image already. Raises UsageError without a
    signing key unless `unsigned` allows it, NotProved if evidence is missing, NetworkError, and CheckFailed if the
    registry has a different image after the push.
    """
    reference = registry_push.parse_repository(target)
    context = StepContext(listener)
    signer = _signer(unsigned)
    pushed = PartialResult(Pushed(name, signer.public.fingerprint if signer else None, reference.repository))
    with exclusive_run(context, name, pushed.document):
        proved = _proved(context, name)
        loaded, lock, image = proved.loaded, proved.lock, proved.record.image
        pushed.update(profile=loaded.name, lock=lock.id, image=image, evidence=proved.evidence)
        place = Repository(reference)
        manifest = context.step("push image", _push_image, context, place, proved, zstd)
        pushed.update(digest=manifest.digest)
        subject = Subject(repository(loaded.name), image, reference.repository, manifest.digest)
        statements = statements_of(proved, subject)
        pushed.update(statements=len(statements))
        context.step("evidence", _publish_evidence, place, manifest, statements, signer)
        pushed.update(tags=context.step("tags", _set_tags, place, manifest, (lock.short, VERIFIED)), state="complete")
    return pushed.value


def push_environment(name: str, target: str, python: str, listener: Listener, *, unsigned: bool = False) -> Pushed:
    """Publish the evidence about a verified environment of this machine to a registry, without an image. A repeated run
    adds only statements that are not there.

    Raises UsageError without a signing key unless `unsigned` allows it; NotProved if the environment is not verified on
    all GPU models of the profile; CheckFailed if it is not as locked; NetworkError.
    """
    reference = registry_push.parse_repository(target)
    context = StepContext(listener)
    signer = _signer(unsigned, _UNSIGNED_EVIDENCE)
    pushed = PartialResult(Pushed(name, signer.public.fingerprint if signer else None, reference.repository))
    with exclusive_run(context, name, pushed.document):
        loaded = context.step("load profile", load_profile, name)
        lock = lock_file.current_lock(loaded, context.step("resolve", resolve_profile, loaded))
        interpreter = host_runner.find_interpreter(python)
        measured = context.step("environment", _measure_environment, interpreter, lock)
        proofs = python_environment_status.proofs_of_environment(measured, loaded, lock)
        rows = profile_proofs_and_image_states.proof_rows(proofs)
        pushed.update(profile=loaded.name, lock=lock.id, environment=measured.id, evidence=rows)
        lacking = [f"{proof.model}: {proof.reason}" for proof in proofs if proof.state != "proved"]
        if lacking:
            command = shlex.join(["envbuild", "test", loaded.known, "--python", python, "--record"])
            text = f"{interpreter} is not proved on all GPUs of {loaded.name}: nothing is published"
            raise NotProved(text, hint="\n".join([*lacking, f"run: {command}"]))
        statements = environment_statements(measured, loaded, lock)
        pushed.update(statements=len(statements))
        place, tag = Repository(reference), f"{ENVIRONMENT}-{lock.short}"
        manifest = context.step("evidence", _publish_without_image, place, tag, statements, signer)
        pushed.update(digest=manifest.digest)
        tags = context.step("tags", _set_tags, place, manifest, (ENVIRONMENT,), (f"{reference.repository}:{tag}",))
        pushed.update(tags=tags, state="complete")
    return pushed.value


def _measure_environment(interpreter: Path, lock: Lock) -> StepResult[MeasuredEnvironment]:
    files = environment_file_hasher.hash_environment(interpreter)
    measured = environment_measurement.measure_environment(files, plan_resolver.computing(lock.versions))
    return StepResult(measured, note=f"{some(measured.files, 'locked file')}, {measured.sha256[:12]}")


def environment_statements(measured: MeasuredEnvironment, loaded: LoadedProfile, lock: Lock) -> list[tuple[str, bytes]]:
    """Return every statement about an environment as (kind, payload): one for each run of its self-test with this
    profile and lock, failed runs included."""
    return [(one.predicate_type, in_toto_statements.canonical(one)) for one in _test_results(measured.id, loaded, lock)]


def _test_results(
    tested: str, loaded: LoadedProfile, lock: Lock, subject: Subject | None = None
) -> Iterator[evidence_statements_and_store.Statement]:
    """Yield a test-result statement about each stored run of the self-test of an image or environment. Runs for a
    different profile or lock are left out. `subject`: what the statements name as tested; by default, what the record
    names."""
    for path, record in evidence_statements_and_store.stored(tested):
        if (record.profile, record.lock) == (loaded.name, lock.id):
            own = Subject(evidence_statements_and_store.subject_name(record), record.subject)
            text = evidence_statements_and_store.record_text(path)
            yield in_toto_statements.test_result(record, text, subject or own)


def _publish_without_image(
    place: TaggedTarget, tag: str, statements: list[tuple[str, bytes]], signer: Signer | None
) -> StepResult[Manifest]:
    manifest, new = registry_attestations.publish_without_image(place, tag, statements, signer)
    return StepResult(manifest, cached=new == 0, note=_published_note(statements, signer))


def _signer(unsigned: bool, consequence: str = _UNSIGNED_IMAGE) -> Signer | None:
    """The configured signer; None if `unsigned` is set. Raises UsageError if no key is configured. `consequence`: what
    --unsigned would do."""
    signer = None if unsigned else keys_and_signatures.configured_signer()
    if signer is None and not unsigned:
        raise UsageError("No signing key: nothing was published", hint=f"{_NO_SIGNER}\n{consequence}")
    return signer


def save_image(name: str, file: Path, listener: Listener, *, unsigned: bool = False) -> Pushed:
    """Write a verified image, its evidence, its lock and the public key to one file.

    Raises UsageError if the file exists, or without a signing key unless `unsigned` allows it, and NotProved if
    evidence is missing.
    """
    if file.exists():
        raise UsageError(f"{file} exists already", hint="choose another name")
    context = StepContext(listener)
    signer = _signer(unsigned)
    result = PartialResult(Pushed(name, signer.public.fingerprint if signer else None, file=str(file)))
    with (
        exclusive_run(context, name, result.document),
        temporary_files.folder("save", inside=file.parent) as folder,
    ):
        proved = _proved(context, name)
        loaded, lock, image = proved.loaded, proved.lock, proved.record.image
        result.update(profile=loaded.name, lock=lock.id, image=image, evidence=proved.evidence)
        place = engine_image_to_oci_layout.Folder(folder / "layout")
        manifest = context.step("save image", _write_image, context, place, proved)
        result.update(digest=manifest.digest)
        place.put_manifest(loaded.name, manifest)
        subject = Subject(repository(loaded.name), image, str(file.name), manifest.digest)
        statements = statements_of(proved, subject)
        result.update(statements=len(statements))
        context.step("evidence", _publish_evidence, place, manifest, statements, signer)
        files = {
            saved_image_file.LOCK: loaded.known_lock.read_bytes(),
            saved_image_file.PROFILE: loaded.name.encode(),
        }
        files |= {saved_image_file.KEY: signer.public.pem} if signer else {}
        partial = folder / "image.tar"
        context.step("write", _write_file, place, partial, files)
        partial.replace(file)
        result.update(state="complete")
    return result.value


def _write_file(place: engine_image_to_oci_layout.Folder, file: Path, files: Mapping[str, bytes]) -> StepResult[None]:
    place.write(file, files)
    return StepResult(None, note=f"{file.stat().st_size / 1e6:.0f} MB")


def _write_image(
    context: StepContext, place: engine_image_to_oci_layout.Folder, proved: _ProvedImage
) -> StepResult[Manifest]:
    """Write the image's layers and configuration into the layout. The result is its manifest. Raises BuildError if
    the image is not the proved one."""
    wheels = layer_steps.compiled_wheels(context, proved.recipe)
    description = layer_steps.describe_image(context, proved.plan, proved.lock, wheels).value
    with layer_steps.intact_files(proved.lock):
        image = layer_blobs.write_blobs(
            description, place.folder / engine_image_to_oci_layout.BLOBS, context.progress.line
        )
    _require_proved(image, proved)
    place.put_blob(image.configuration)
    return StepResult(image.manifest, note=f"{some(len(image.layers), 'layer')}, {image.size / 1e6:.0f} MB")


def _require_proved(image: OciImage, proved: _ProvedImage) -> None:
    """Raise BuildError if the lock now gives a different image than the proved one."""
    if image.id != proved.record.image:
        text = f"the lock now gives the image {image.id[:19]}, but {proved.record.image[:19]} is proved"
        raise BuildError(text, hint=f"run: envbuild make {proved.loaded.known}")


def load_saved_image(file: Path, policy: Policy, listener: Listener) -> tuple[Verdict, str]:
    """Load a saved image after checking its evidence and every byte. Return the verdict and the image's tag.

    Raises CheckFailed with every reason; in that case nothing is loaded.
    """
    saved = saved_image_file.SavedImage(file)
    name = saved.file(saved_image_file.PROFILE, 100).decode(errors="replace")
    if not profile_and_lock_name_lookup.NAME.fullmatch(name):
        raise Malformed("the saved image does not name its profile")
    verdict = image_verifier.verify_at(
        saved, Reference("saved", name, name), policy, (), datetime.datetime.now(datetime.UTC)
    )
    verdict.ref = str(file)
    verdict.require()
    assert verdict.proved and verdict.image and verdict.build
    named, tag = repository(verdict.build.name), verdict.build.lock.short
    image = saved.checked_image(verdict.proved.manifest)  # before the engine receives any data
    if image.id != verdict.image.id:
        raise Refusal("digest", f"the saved image is {image.id}, not {verdict.image.id}, which the evidence proves")
    listener(Note(f"loading {named}:{tag}"))
    engine_load.load_image(Engine(), image.to_load, named, tag, lambda line: listener(Note(line)))
    return verdict, f"{named}:{tag}"


@dataclass(frozen=True)
class _ProvedImage:
    """An image with evidence for every GPU model of its profile. `record`: its build record."""

    loaded: LoadedProfile
    plan: Plan
    lock: Lock
    record: Record
    evidence: tuple[ProofRow, ...]

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.loaded, self.plan, self.lock)


def _proved(context: StepContext, name: str) -> _ProvedImage:
    """Return an image that was built from the profile's current lock and is verified for every GPU model. Prefers an
    image whose compiled extensions are still in the cache. Raises BuildError if no image was built, NotProved if none
    is verified."""
    loaded = context.step("load profile", load_profile, name)
    plan = context.step("resolve", resolve_profile, loaded)
    lock = lock_file.current_lock(loaded, plan)
    wanted = profile_proofs_and_image_states.wanted(loaded.name, loaded.profile, lock)
    models = profile_proofs_and_image_states.models_to_prove(loaded.profile)
    records = lock_image_lookup_and_recipe.matching_records(lock)
    if not records:
        other = lock_image_lookup_and_recipe.built_differently(lock)
        state = f"was {other}" if other else "is not built"
        raise BuildError(f"{loaded.name} {state}", hint=f"run: envbuild make {loaded.known}")
    proved, missing = list[_ProvedImage](), list[str]()
    for record in records:
        found = evidence_statements_and_store.newest_proofs(record.image, wanted, models)
        lacking = [f"{proof.model}: {proof.reason}" for proof in found if proof.state != "proved"]
        missing += [text for text in lacking if text not in missing]
        if not lacking:
            proved.append(_ProvedImage(loaded, plan, lock, record, profile_proofs_and_image_states.proof_rows(found)))
    if not proved:
        text = f"{loaded.name} is not proved on all of its GPUs: nothing is published"
        raise NotProved(text, hint="\n".join([*missing, f"run: envbuild make {loaded.known}"]))
    at_hand = (one for one in proved if _is_at_hand(one))
    return next(at_hand, proved[0])


def _is_at_hand(proved: _ProvedImage) -> bool:
    """Whether the cache has the wheels of the extensions in the image."""
    record, lock = proved.record, proved.lock
    compiled = (extension_wheel_build.find_wheel(lock, one) for one in lock.extensions)
    return {wheel.sha256 for wheel in compiled if wheel} == {one.sha256 for one in record.extensions}


def _push_image(context: StepContext, place: Repository, proved: _ProvedImage, zstd: bool) -> StepResult[Manifest]:
    upload = functools.partial(_upload_layers, context, place, proved, zstd)
    found, there = registry_push.push_once(place, proved.record.image, upload)
    return StepResult(found, cached=there, note=found.digest)


def _upload_layers(context: StepContext, place: Repository, proved: _ProvedImage, zstd: bool, tag: str) -> None:
    """Upload the proved image without an engine. Layers that the registry lacks are written again while they are
    uploaded. With `zstd`, all layers above the base image are written again, to compress them. Raises BuildError if the
    lock now gives a different image."""
    wheels = layer_steps.compiled_wheels(context, proved.recipe)
    image = layer_steps.write_layers(context, proved.plan, proved.lock, wheels).value
    _require_proved(image, proved)
    send = zstd_push.push_layers if zstd else image_upload.upload_image
    with layer_steps.intact_files(proved.lock):
        send(place, image, tag, context.progress.line)


def statements_of(proved: _ProvedImage, subject: Subject) -> list[tuple[str, bytes]]:
    """Return every statement about an image as (kind, payload): its build, its contents, and each run of its
    self-test."""
    loaded, lock, image = proved.loaded, proved.lock, proved.record.image
    made = [
        in_toto_statements.slsa_provenance(build_details(proved), subject),
        in_toto_statements.sbom(sbom.make_sbom(loaded.name, lock, image), subject),
        *_test_results(image, loaded, lock, subject),
    ]
    return [(one.predicate_type, in_toto_statements.canonical(one)) for one in made]


def build_details(proved: _ProvedImage) -> BuildDetails:
    """Return what this envbuild recorded about the build. Wheels that are not in the store any more are downloaded
    again."""
    loaded, plan, locked, record = proved.loaded, proved.plan, proved.lock, proved.record
    wheel_resolution_and_download.fetch_wheels(
        locked.wheels, plan.python, plan.glibc, sha256_file_store.wheel_store(), lambda file, count: None
    )
    roots = {
        item.wheel.file: wheel_file_hashes_and_contents.roots(
            sha256_file_store.wheel_store().path(item.wheel.sha256, item.wheel.file)
        )
        for item in locked.wheels
    }
    return BuildDetails(
        profile=loaded.name,
        document=loaded.document.data,
        lock=locked,
        lock_text=loaded.known_lock.read_text(encoding="utf-8"),
        facts=fact_file_reader.facts_digest(),
        recipe=record.recipe,
        versions={"envbuild": importlib.metadata.version("envbuild"), "engine": record.builder},
        roots=roots,
        compiled=record.extensions,
    )


def _publish_evidence(
    place: Target, manifest: Manifest, statements: list[tuple[str, bytes]], signer: Signer | None
) -> StepResult[int]:
    new = registry_attestations.publish(place, manifest, statements, signer)
    return StepResult(new, cached=new == 0, note=_published_note(statements, signer))


def _published_note(statements: list[tuple[str, bytes]], signer: Signer | None) -> str:
    by = f"signed by {signer.public.fingerprint[:12]}" if signer else "unsigned"
    return f"{some(len(statements), 'statement')}, {by}"


def _set_tags(
    place: Repository, manifest: Manifest, tags: Sequence[str], present: tuple[str, ...] = ()
) -> StepResult[tuple[str, ...]]:
    """Set the tags in this order, `verified` last, so that the evidence exists for anyone who pulls that tag. Return
    the references in `present`, whose tags point to the manifest already, and the references of `tags`. An error
    carries `present` and the references of the tags that were set before the error."""
    moved, references = False, present
    for tag in tags:
        try:
            before = place.manifest(tag)
            if before is None or before.digest != manifest.digest:
                place.put_manifest(tag, manifest)
                moved = True
        except EnvbuildError as error:
            error.partial = {"tags": list(references)}
            raise
        references += (f"{place.reference.repository}:{tag}",)
    return StepResult(references, cached=not moved, note=" ".join(references))
