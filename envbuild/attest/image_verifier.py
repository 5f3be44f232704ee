"""Decides from evidence and a policy whether an image or a Python environment may be used. Needs no Docker Engine.

The image is in a registry or saved in a file, and the decision is about its digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from envbuild.attest import (
    child_config_check,
    child_layer_check,
    keys_and_signatures,
    policy_check,
    registry_attestations,
    trusted_statements,
)
from envbuild.attest.keys_and_signatures import Envelope
from envbuild.attest.policy import Policy
from envbuild.attest.trusted_statements import SignedBuild, Trusted
from envbuild.audit.environment_file_hasher import EnvironmentFiles
from envbuild.evidence import environment_measurement, profile_proofs_and_image_states, proof_rules
from envbuild.evidence.profile_proofs_and_image_states import ProofRow
from envbuild.evidence.proof_rules import Proof
from envbuild.facts.probe_catalogue_reader import LEVELS
from envbuild.image.image_naming import ENVIRONMENT, LOCK_LABEL, VERIFIED
from envbuild.registry import image_content_reader, oci_types
from envbuild.registry.image_content_reader import Config, StoredImage
from envbuild.registry.oci_types import ImageSource, Manifest, Reference
from envbuild.registry.registry_client import Repository
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import CheckFailed, FileError, NetworkError
from envbuild.util.json_output_types import Digest, plain
from envbuild.util.untrusted_input_errors import Reason, Refusal

_LOCK = re.compile(r"sha256:[0-9a-f]{64}")

Envelopes = Sequence[Envelope]


@dataclass(frozen=True)
class VerdictDocument:
    """The document of `verify`. `gpus`: the GPU models that the image is verified on. `level`: the lowest level of the
    self-test in its evidence. `environment`: with --python, the digest of the environment's locked files.
    `base`: for a child image, the base image by digest; `changed_settings`: the child's settings that differ from the
    base's. `unconfined`: restrictions of Docker's containers that were missing when the self-test ran."""

    reference: str | None
    state: Literal["verified", "unverified"]
    profile: str | None
    lock: Digest | None
    image: Digest | None
    digest: Digest | None
    environment: Digest | None
    level: str | None
    gpus: tuple[str, ...]
    evidence: tuple[ProofRow, ...]
    base: str | None
    changed_settings: Mapping[str, object]
    unconfined: tuple[str, ...]
    reasons: tuple[Reason, ...]


@dataclass
class Verdict:
    """The result of a verification. `digest`: of the manifest that the reference names now. `profile` and `lock` (its
    id): what the image was built from. `gpus`: the GPU models that it is verified on; `level`: the lowest level of the
    self-test in the evidence; `unconfined`: restrictions of Docker's containers that were missing when the self-test
    ran.

    `base`: for a child image, the base image by digest; `child_sets`: the child's settings that differ from the base's.

    `image`: the image that the reference names; `build`: the build statement with the best result; `proved`: the
    image that this statement is about, either the image itself or its base.
    """

    ref: str | None
    digest: str | None = None
    profile: str | None = None
    lock: str | None = None
    level: str | None = None
    gpus: list[str] = field(default_factory=list)
    unconfined: list[str] = field(default_factory=list)
    base: str | None = None
    child_sets: dict[str, object] = field(default_factory=dict)
    reasons: list[Reason] = field(default_factory=list)
    image: Config | None = None
    build: SignedBuild | None = None
    proved: StoredImage | None = None
    proofs: tuple[Proof, ...] = ()
    image_id: str | None = None  # from the evidence, if it was verified without its image
    environment: str | None = None  # digest of the locked files of an environment

    @property
    def verified(self) -> bool:
        return not self.reasons

    def document(self) -> VerdictDocument:
        return VerdictDocument(
            reference=self.ref,
            state="verified" if self.verified else "unverified",
            profile=self.profile,
            lock=self.lock,
            image=self.image.id if self.image else self.image_id,
            digest=self.digest,
            environment=self.environment,
            level=self.level,
            gpus=tuple(self.gpus),
            evidence=profile_proofs_and_image_states.proof_rows(self.proofs),
            base=self.base,
            changed_settings=self.child_sets,
            unconfined=tuple(self.unconfined),
            reasons=tuple(self.reasons),
        )

    @property
    def summary(self) -> str:
        """A text for people: what was verified, and for a child image also the settings that it changes."""
        parts = {"profile": self.profile, "lock": self.lock and self.lock.removeprefix("sha256:")[:12],
                 "level": self.level}  # fmt: skip
        known = ", ".join(f"{name} {value}" for name, value in parts.items() if value)
        what = "verified environment" if self.environment else "verified"
        text = f"{what} on {', '.join(self.gpus)}" + (f": {known}" if known else "")
        if self.base:
            each = (json.dumps({key: value})[1:-1] for key, value in self.child_sets.items())
            sets = "".join(f"\n  it sets {words[:200]}" for words in each)
            text += f"\nchild of {self.base}: only this base image is proved, not the layers above it{sets}"
        return text

    def take(self, proofs: Sequence[Proof], profiles: Iterable[str], locks: Iterable[str]) -> None:
        """Set the result from the proofs. `profiles`, `locks`: from all evidence that was judged; each is reported only
        if all evidence has the same."""
        self.profile, self.lock = _only(profiles), _only(locks)
        self.proofs = tuple(proofs)
        self.level = min((proof.level for proof in proofs if proof.level), key=LEVELS.index, default=None)
        self.gpus = list(dict.fromkeys(proof.model for proof in proofs))
        self.unconfined = list(dict.fromkeys(lack for proof in proofs for lack in proof.unconfined))

    def require(self) -> None:
        """Raise CheckFailed with every reason and the document, unless the image is verified."""
        if self.reasons:
            what = self.ref or "the evidence"
            error = CheckFailed(f"{what} is not verified", hint="\n".join(map(str, self.reasons)))
            error.partial = plain(self.document())
            raise error


def verify_image(reference: Reference, policy: Policy, given: Envelopes, now: datetime.datetime) -> Verdict:
    """Verify an image in a registry. `given`: further evidence, from files. Raises NetworkError.

    If the policy has no key, the registry is not contacted and the image is not verified.
    """
    if not policy.keys:
        return Verdict(str(reference), reasons=_no_key(policy))
    return verify_at(Repository(reference), reference, policy, given, now)


def verify_at(
    place: ImageSource, reference: Reference, policy: Policy, given: Envelopes, now: datetime.datetime
) -> Verdict:
    """Verify an image in a registry or in a file. The base of a child is looked up only in a registry."""
    verdict = Verdict(str(reference))
    try:
        _image(verdict, place, reference, policy, given, now)
    except Refusal as refusal:
        verdict.reasons.append(refusal.reason)
    verdict.reasons = list(dict.fromkeys(verdict.reasons))
    return verdict


def verify_statement(given: Envelopes, policy: Policy, now: datetime.datetime) -> Verdict:
    """Verify evidence without its image, such as a contributor sends: its signer, whether it agrees with its run
    record, and whether it meets the policy."""
    believed = trusted_statements.believe(given, policy.keys, None)
    verdict = Verdict(None)
    proofs, verdict.reasons = policy_check.of_records(believed.records, policy, now)
    records = [record for _, record in believed.records]
    verdict.take(proofs, (record.profile for record in records), (record.lock for record in records))
    verdict.reasons = [*_no_key(policy), *believed.refused, *verdict.reasons]
    if not believed.records and not verdict.reasons:
        verdict.reasons.append(Reason("no-evidence", "it contains no test result"))
    verdict.image_id = _only(record.subject for record in records if record.image)
    return verdict


def verify_environment(
    files: EnvironmentFiles,
    given: Envelopes,
    policy: Policy,
    now: datetime.datetime,
    reference: Reference | None = None,
) -> Verdict:
    """Verify a Python environment of this machine. Statements about images do not count. `given`: evidence from files;
    `reference`: where `push --python` published evidence; without a tag, that of the newest lock. Raises NetworkError.

    If the policy has no key, the registry is not contacted and the environment is not verified.
    """
    fetched, bad = list[Envelope](), list[Refusal]()
    if reference and policy.keys:
        try:
            fetched, bad = _environment_envelopes(reference)
        except Refusal as refusal:
            bad = [refusal]
    from_files = trusted_statements.believe(given, policy.keys, None)
    believed = trusted_statements.believe([*given, *fetched], policy.keys, None)
    verdict, changed = Verdict(None), list[Reason]()
    matching = []
    for path, record in believed.records:
        if record.installed is None:
            changed.append(Reason("subject", "a statement is about an image, not about an environment"))
            continue
        try:
            measured = environment_measurement.measure_environment(files, record.installed.distributions)
        except CheckFailed as error:
            lines = (error.hint or "").splitlines() or [error.message]
            changed += [Reason("environment", line) for line in lines]
            continue
        if found := proof_rules.differences_since(record, measured):
            changed += [Reason("environment", text) for text in found]
        else:
            verdict.environment = measured.id
            matching.append((path, record))
    proofs, insufficient = policy_check.of_environment(matching, policy, now)
    used = {proof.evidence for proof in proofs}
    records = [record for path, record in matching if path in used] or [record for _, record in matching]
    verdict.take(proofs, (record.profile for record in records), (record.lock for record in records))
    reasons = [*_no_key(policy), *from_files.refused, *insufficient, *([] if matching else changed)]
    refused = [*believed.refused, *(refusal.reason for refusal in bad)]
    reasons += refused if reasons or not matching else _newer(believed)
    if not believed.records and not reasons:
        reasons.append(Reason("no-evidence", "no test result was found"))
    verdict.reasons = list(dict.fromkeys(reasons))
    return verdict


def _environment_envelopes(reference: Reference) -> tuple[list[Envelope], list[Refusal]]:
    """Return the envelopes about environments at a tag or digest of a repository, and the refusals of invalid ones.
    Raises NetworkError if the tag does not exist."""
    place = Repository(reference)
    target = reference.digest or reference.tag or ENVIRONMENT
    with contextlib.suppress(Refusal):  # it is returned below
        if place.manifest(target) is None:
            text = f"no evidence about environments at {reference.repository}, tag {target}"
            raise NetworkError(text, hint="`envbuild push NAME REGISTRY/NAME --python PATH` publishes it")
    return registry_attestations.fetch_envelopes_without_image(place, target)


def _only(values: Iterable[str]) -> str | None:
    """Return the only value; None if there are several or none."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _image(
    verdict: Verdict, place: ImageSource, reference: Reference, policy: Policy, given: Envelopes, now: datetime.datetime
) -> None:
    manifest = resolve_reference(place, reference)
    verdict.digest = manifest.digest
    image = image_content_reader.read_image(place, manifest)
    verdict.image = image.config
    verdict.reasons += _no_key(policy)
    believed = _believed(image, policy, given)
    if believed.builds or believed.records:
        verdict.proved = image
        _judge(verdict, believed, policy, now, image)
        return
    if policy.base and isinstance(place, Repository):
        verdict.reasons += _newer(believed)
        _child(verdict, image, policy.base, policy, given, now)
        return
    verdict.reasons += believed.refused or [Reason("no-evidence", "no evidence about this image was found")]
    if LOCK_LABEL in image.config.labels and not believed.refused:
        verdict.reasons.append(Reason("base", "for a child image, name the proved base image with --base"))


def resolve_reference(place: ImageSource, reference: Reference) -> Manifest:
    """Return the image manifest that the reference names, directly or as the only image of an index.

    Raises NetworkError if the image does not exist, Refusal if the index does not have exactly one image, or if the
    manifest of that image is missing or is not an image's manifest.
    """
    top = place.manifest(reference.target)
    if top is None:
        named = reference if reference.tag or reference.digest else reference.tagged(reference.target)
        where = "there" if reference.target == VERIFIED else f"at {reference.repository}:{VERIFIED}"
        hint = f"`envbuild push` publishes a proved image {where}"
        raise NetworkError(f"image not found: {named}", hint=hint)
    if not top.is_index:
        return top
    item = top.only_image
    found = place.manifest(oci_types.digest_in(item))
    if found is None:
        raise Refusal("index", f"the manifest that the index {reference} names is missing")
    if found.is_index or found.media_type != item.get("mediaType"):
        raise Refusal("index", f"the index {reference} names something that is not an image's manifest")
    return found


def _no_key(policy: Policy) -> list[Reason]:
    return [] if policy.keys else [Reason("no-key", keys_and_signatures.NO_KEY)]


def _believed(image: StoredImage, policy: Policy, given: Envelopes) -> Trusted:
    found, bad = registry_attestations.fetch_envelopes(image.place, image.manifest.digest)
    believed = trusted_statements.believe([*given, *found], policy.keys, image.config.id)
    return dataclasses.replace(believed, refused=(*believed.refused, *(refusal.reason for refusal in bad)))


def _judge(verdict: Verdict, believed: Trusted, policy: Policy, now: datetime.datetime, image: StoredImage) -> None:
    """Judge the image by each trusted build statement, and set the best result. An image may belong to several
    profiles; it is verified if one of them verifies it.

    Test results name the image id, so they are valid in every repository. The build statement names the profile and the
    lock, which determine the required evidence, and the repositories that the image was pushed to.
    """
    if not believed.builds:
        verdict.reasons += [*believed.refused, Reason("no-build", "no trusted build statement about this image")]
        return
    answers = []
    for build in believed.builds:
        proofs, insufficient = policy_check.of_build(build, believed.records, policy, now)
        other = [
            *_unbound(build, image.place, image.manifest, policy),
            *policy_check.unexpected_origin(build.name, build.lock.id, policy),
        ]
        if image.config.labels.get(LOCK_LABEL) != build.lock.id:
            other.append(Reason("lock", f"the image's label names a different lock; expected {build.lock.id}"))
        answers.append(((len(other), len(insufficient)), build, proofs, [*other, *insufficient]))
    _, verdict.build, proofs, reasons = min(answers, key=lambda answer: answer[0])
    verdict.take(proofs, [verdict.build.name], [verdict.build.lock.id])
    verdict.reasons += [*reasons, *(believed.refused if reasons else _newer(believed))]


def _unbound(build: SignedBuild, place: ImageSource, manifest: Manifest, policy: Policy) -> Iterator[Reason]:
    """Yield the reasons why a build statement is not about this manifest in this repository. A saved image has no
    repository, so only its manifest is compared."""
    pushed = build.repositories(manifest.digest)
    if not pushed:
        yield Reason("subject", f"the build statement is not about the manifest {manifest.digest}")
    elif isinstance(place, Repository) and not {place.reference.repository, *policy.copies} & {*pushed}:
        text = f"the image was pushed to {', '.join(pushed)[:500]}, not to {place.reference.repository}"
        yield Reason("repository", f"{text}; where a copy is expected, pass --from {pushed[0][:200]}")


def _newer(believed: Trusted) -> list[Reason]:
    """Return the refusals of trusted statements in a newer format. Such a statement may report a failure, so no other
    statement outweighs it."""
    return [reason for reason in believed.refused if reason.id == "newer"]


def _base_reference(named: Reference, config: Config) -> Reference:
    """Return the base image to compare with. If `named` has no tag or digest, the base is the image in that repository
    whose tag is the lock in the child's labels. Raises Refusal if the child has no such label, or no image has that
    tag."""
    if named.tag or named.digest:
        return named
    lock = config.labels.get(LOCK_LABEL, "")
    if not _LOCK.fullmatch(lock):
        raise Refusal("base", f"the image has no label {LOCK_LABEL}: name its base by tag or digest")
    named = named.tagged(lock.removeprefix("sha256:")[:12])
    if Repository(named).manifest(named.target) is None:
        text = f"the image's label names the lock {named.tag}, but {named} does not exist"
        raise Refusal(
            "base", f"{text}: the image was not built on an image of that repository, or that tag was removed"
        )
    return named


def _child(
    verdict: Verdict, image: StoredImage, named: Reference, policy: Policy, given: Envelopes, now: datetime.datetime
) -> None:
    """Judge the base like any other image, then compare the child with it. Raises Refusal as `_base_reference` does,
    and NetworkError if the user named a tag or digest that does not exist."""
    reference = _base_reference(named, image.config)
    place = Repository(reference)
    base = image_content_reader.read_image(place, resolve_reference(place, reference))
    verdict.base = f"{reference.repository}@{base.manifest.digest}"
    verdict.child_sets = child_config_check.configuration_differences(image.config, base.config)
    believed = _believed(base, policy, given)
    if not believed.builds and not believed.records:
        verdict.reasons += believed.refused or [Reason("no-evidence", f"no evidence about {reference} was found")]
        return
    verdict.proved = base
    _judge(verdict, believed, policy, now, base)
    if verdict.build is None:
        return
    measured = [record for _, record in believed.records]
    verdict.reasons += child_layer_check.child_objections(
        image, base.config, verdict.build, measured, policy.forbid_in_child
    )


def read_file(file: Path) -> dict[str, object]:
    """Read a DSSE envelope from a file that contains it directly or in a sigstore bundle. Raises FileError,
    Malformed."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(strict_and_canonical_json.MAX_BYTES + 1)
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error.strerror}") from None
    found = strict_and_canonical_json.parse(raw, str(file))
    inner = found.get("dsseEnvelope", found)
    return inner if isinstance(inner, dict) else {}
