"""Whether an image in a registry may be used: its digest, its evidence, and a policy. No Docker Engine is needed."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.attest import attestations, child, judgement, layers, signing, trust
from envbuild.attest.layers import Config
from envbuild.attest.oci import Manifest, Place, Reference
from envbuild.attest.policy import Policy
from envbuild.attest.registry import Repository
from envbuild.attest.trust import Build, Trusted
from envbuild.errors import CheckFailed, FileError, NetworkError
from envbuild.image.names import LOCK_LABEL, VERIFIED
from envbuild.proof import untrusted
from envbuild.proof.counting import Proof
from envbuild.proof.reasons import Reason, Refusal

PLATFORM = ("linux", "amd64")
_LOCK = re.compile(r"sha256:[0-9a-f]{64}")

Envelope = Mapping[str, Any]
Envelopes = Sequence[Envelope]


@dataclass
class Verdict:
    """The answer. `digest` is what the reference means now; `gpus` are the models that it is proved on; `unconfined`:
    what the containers of these proofs lacked of the confinement that an engine's has.

    `reordered`: numbers of layers, from 1, that a rebuild gave with the same files in another order.

    `image`: what the reference names; `build`: the build statement it was judged by, `proved` what that is about, and
    where: the image itself, or its base.
    """

    ref: str | None
    digest: str | None = None
    gpus: list[str] = field(default_factory=list)
    unconfined: list[str] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    image: Config | None = None
    build: Build | None = None
    proved: tuple[Place, Manifest, Config] | None = None
    reordered: list[int] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        return not self.reasons

    def document(self) -> dict[str, Any]:
        """`unconfined` and `reordered` only where there is something to say."""
        return {
            "ref": self.ref,
            "digest": self.digest,
            "verified": self.verified,
            "gpus": self.gpus,
            "reasons": [dataclasses.asdict(reason) for reason in self.reasons],
            **({"unconfined": self.unconfined} if self.unconfined else {}),
            **({"reordered": self.reordered} if self.reordered else {}),
        }

    def take(self, proofs: Sequence[Proof]) -> None:
        self.gpus = list(dict.fromkeys(proof.model for proof in proofs))
        self.unconfined = list(dict.fromkeys(lack for proof in proofs for lack in proof.unconfined))

    def require(self) -> None:
        """Raises CheckFailed with every reason, carrying the document."""
        if self.reasons:
            what = self.ref or "the evidence"
            error = CheckFailed(f"{what} is not verified", hint="\n".join(map(str, self.reasons)))
            error.partial = self.document()
            raise error


def image(reference: Reference, policy: Policy, given: Envelopes, now: datetime.datetime) -> Verdict:
    """Judge an image in a registry; `given` is evidence from files. Raises NetworkError."""
    return at(Repository(reference), reference, policy, given, now)


def at(place: Place, reference: Reference, policy: Policy, given: Envelopes, now: datetime.datetime) -> Verdict:
    """The same, wherever the image is; only of a registry it is asked whether it has the base of a child."""
    verdict = Verdict(str(reference))
    try:
        _image(verdict, place, reference, policy, given, now)
    except Refusal as refusal:
        verdict.reasons.append(refusal.reason)
    verdict.reasons = list(dict.fromkeys(verdict.reasons))
    return verdict


def statement(given: Envelopes, policy: Policy, now: datetime.datetime) -> Verdict:
    """Judge evidence alone, as others send it: who says so, and does it say what its run record says?"""
    believed = trust.believe(given, policy.keys, None)
    verdict = Verdict(None)
    proofs, verdict.reasons = judgement.of_records(believed.records, policy, now)
    verdict.take(proofs)
    verdict.reasons = [*_no_key(policy), *believed.refused, *verdict.reasons]
    if not believed.records and not verdict.reasons:
        verdict.reasons.append(Reason("no-evidence", "there is no test result in it"))
    images = sorted({record["image"]["id"] for _, record in believed.records})
    if len(images) == 1:
        verdict.digest = images[0]
    return verdict


def _image(
    verdict: Verdict, place: Place, reference: Reference, policy: Policy, given: Envelopes, now: datetime.datetime
) -> None:
    top, manifest = resolve(place, reference)
    verdict.digest = top.digest
    config = verdict.image = layers.config_of(place, manifest)
    verdict.reasons += _no_key(policy)
    believed = _believed(place, (top, manifest), config, policy, given)
    if believed.builds or believed.records:
        verdict.proved = place, manifest, config
        _judge(verdict, believed, config, policy, now)
        return
    if isinstance(place, Repository) and (policy.base or LOCK_LABEL in config.labels):
        proved = _base(reference, config, policy)
        if proved is not None:
            _child(verdict, place, manifest, proved, policy, given, now)
            return
    verdict.reasons += believed.refused or [Reason("no-evidence", "no evidence about this image is beside it")]
    if LOCK_LABEL in config.labels and not believed.refused:
        verdict.reasons.append(Reason("base", "if it is built on a proved image: name that one's place with --base"))


def resolve(place: Place, reference: Reference) -> tuple[Manifest, Manifest]:
    """What the reference means (a manifest or an index), and the manifest of our platform in it."""
    top = place.manifest(reference.target)
    if top is None:
        named = reference if reference.tag or reference.digest else reference.tagged(reference.target)
        where = "there" if reference.target == VERIFIED else f"at {reference.repository}:{VERIFIED}"
        hint = f"`envbuild push` puts a proved image {where}"
        raise NetworkError(f"there is no {named}", hint=hint)
    if not top.is_index:
        return top, top
    inner = place.manifest(top.of_platform(*PLATFORM))
    if inner is None or inner.is_index:
        raise Refusal("digest", f"{reference} names a manifest that is not there")
    return top, inner


def _no_key(policy: Policy) -> list[Reason]:
    return [] if policy.keys else [Reason("no-key", signing.NO_KEY)]


def _believed(place: Place, manifests: Sequence[Manifest], config: Config, policy: Policy, given: Envelopes) -> Trusted:
    found = list(given)
    bad: list[Refusal] = []
    for digest in dict.fromkeys(manifest.digest for manifest in manifests):
        envelopes, refusals = attestations.fetch(place, digest)
        found += envelopes
        bad += refusals
    believed = trust.believe(found, policy.keys, config.id)
    return dataclasses.replace(believed, refused=(*believed.refused, *(refusal.reason for refusal in bad)))


def _judge(verdict: Verdict, believed: Trusted, config: Config, policy: Policy, now: datetime.datetime) -> None:
    """By each build statement that is believed (one image may be of several profiles); one of them is enough."""
    if not believed.builds:
        verdict.reasons += [*believed.refused, Reason("no-build", "no build statement about this image is believed")]
        return
    answers = []
    for build in believed.builds:
        proofs, reasons = judgement.of_build(build, believed.records, policy, now)
        if config.labels.get(LOCK_LABEL) != build.lock.id:
            reasons = [Reason("lock", f"the image says its lock is another than {build.lock.id}"), *reasons]
        answers.append((len(reasons), build, proofs, reasons))
    _, verdict.build, proofs, reasons = min(answers, key=lambda answer: answer[0])
    verdict.take(proofs)
    verdict.reasons += [*reasons, *(believed.refused if reasons else _newer(believed))]


def _newer(believed: Trusted) -> list[Reason]:
    """A trusted word that cannot be read may be a denial: no other outweighs it."""
    return [reason for reason in believed.refused if reason.id == "newer"]


def _base(reference: Reference, config: Config, policy: Policy) -> tuple[Repository, Manifest] | None:
    """The proved image that this one may be built on: where the policy says, else in the same repository."""
    lock = config.labels.get(LOCK_LABEL, "")
    named = policy.base or Reference(reference.host, reference.name)
    if not named.tag and not named.digest:
        if not _LOCK.fullmatch(lock):
            return None
        named = named.tagged(lock.removeprefix("sha256:")[:12])
    place = Repository(named)
    if place.manifest(named.target) is None:
        if policy.base:
            raise NetworkError(f"there is no {named}", hint="--base names where the proved image and its evidence are")
        return None
    return place, resolve(place, named)[1]


def _child(
    verdict: Verdict,
    place: Place,
    manifest: Manifest,
    proved: tuple[Repository, Manifest],
    policy: Policy,
    given: Envelopes,
    now: datetime.datetime,
) -> None:
    """The base is judged as any image; then what is above it is looked at."""
    assert verdict.image is not None
    base = layers.config_of(*proved)
    believed = _believed(proved[0], proved[1:], base, policy, given)
    if not believed.builds and not believed.records:
        verdict.reasons += believed.refused or [Reason("no-evidence", f"no evidence is beside {proved[0].reference}")]
        return
    verdict.proved = (*proved, base)
    _judge(verdict, believed, base, policy, now)
    if verdict.build is None:
        return
    measured = [record for _, record in believed.records]
    verdict.reasons += child.objections(place, manifest, verdict.image, base, verdict.build, measured)


def read_file(file: Path) -> dict[str, Any]:
    """An envelope from a file: DSSE as it is, or in a sigstore bundle. Raises FileError, Malformed."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(untrusted.MAX_BYTES + 1)
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error.strerror}") from None
    found = untrusted.parse(raw, str(file))
    inner = found.get("dsseEnvelope", found)
    return inner if isinstance(inner, dict) else {}
