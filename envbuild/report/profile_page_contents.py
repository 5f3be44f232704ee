"""Collects the contents of a profile's page: whether its image is verified, which environments were tested, what was
measured, and what the image contains. Pure.

Nothing depends on the current time: the same profile, lock and evidence give the same page, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envbuild.evidence import profile_proofs_and_image_states
from envbuild.evidence.profile_proofs_and_image_states import ProofRow
from envbuild.evidence.proof_rules import Proof
from envbuild.evidence.python_environment_status import RecordedEnvironment
from envbuild.lock.lock_file import Lock
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.report import fingerprint_comparison, pin_reasons, profile_and_image_diff, run_measurement_reader
from envbuild.report.fingerprint_comparison import Comparison, OperationRow, Verdict
from envbuild.report.run_measurement_types import KnownAdvisory, Run
from envbuild.resolve import plan_resolver
from envbuild.resolve.plan_resolver import Plan
from envbuild.resolve.torch_compatibility_and_advisories import AppliedState
from envbuild.testrun.fingerprint_reader import Fingerprint
from envbuild.util.errors import some
from envbuild.util.json_output_types import AdvisoryRow, Digest, ImageState


@dataclass(frozen=True)
class PageEvidence:
    """The evidence on disk for a profile. `proofs`: one for each GPU model. `images`: the ids of the images built from
    the lock. `runs`: the measurements of the runs that `proofs` refer to. `environments`: the evidence about
    environments with the locked files. `built_differently`: if `images` is empty, how an image of the lock was built
    that does not count."""

    proofs: tuple[Proof, ...]
    images: tuple[Digest, ...]
    runs: tuple[Run, ...]
    environments: tuple[RecordedEnvironment, ...] = ()
    built_differently: str | None = None


@dataclass(frozen=True)
class PageGpu:
    """The evidence for one GPU model of the profile. `state`: proved, stale or missing."""

    model: str
    state: str
    failed: bool
    reason: str
    evidence: str | None


@dataclass(frozen=True)
class PageStatus:
    """The status of a profile. `reasons`: why it has this state; `next`: the command to run next; `where`: the machine
    to run it on; `images`: the ids of images built from this lock."""

    state: ImageState
    reasons: tuple[str, ...]
    next: str
    where: str
    gpus: tuple[PageGpu, ...]
    lock: str | None
    images: tuple[Digest, ...]
    evidence: tuple[ProofRow, ...]


@dataclass(frozen=True)
class PageLayer:
    """A layer of the image, or all layers of a base image. `number`: its place in the image, from 1; None for an image
    on a base image, whose number of layers is not in the lock. `bytes`: the size of the files to fetch for the layer;
    None for a base image, whose size is not in the lock. `shared`: the other profiles whose image has the same layer.
    """

    number: int | None
    title: str
    bytes: int | None
    shared: tuple[str, ...]


@dataclass(frozen=True)
class Layers:
    """The layers, the largest first. `compared`: the number of other profiles whose layers they were compared with."""

    layers: tuple[PageLayer, ...]
    compared: int

    @property
    def count(self) -> str:
        """The number of layers, in words. Those of a base image are not counted."""
        own = sum(layer.bytes is not None for layer in self.layers)
        return some(own, "layer") if own == len(self.layers) else f"a base image and {some(own, 'layer')}"

    def bytes(self, shared: bool | None = None) -> int:
        """Return the bytes of all layers; with `shared`, of the shared layers (true) or of the others (false)."""
        return sum(item.bytes or 0 for item in self.layers if shared in (None, bool(item.shared)))


@dataclass(frozen=True)
class PageAdvice:
    """An advisory that applies."""

    state: AppliedState
    reason: str
    known: KnownAdvisory


@dataclass(frozen=True)
class PagePin:
    name: str
    version: str
    reason: str


@dataclass(frozen=True)
class LeftOut:
    """An extension that the profile leaves out, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Variable:
    """A variable of the image's environment. `reason`: why it is set; empty unless a profile for different GPU models
    needs it, or the profile states a reason."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Compared:
    """Two fingerprints: the machines that they were recorded on, and the result of their comparison."""

    a: str
    b: str
    result: Comparison


@dataclass(frozen=True)
class ComparedFingerprints:
    """The comparison of two fingerprints. `a`, `b`: the machines that they were recorded on. `state`: the worst kind of
    all operations."""

    a: str
    b: str
    state: Verdict
    operations: tuple[OperationRow, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PageDocument:
    """The document of `show --html`. `state` and `evidence` depend only on the evidence on disk. `reasons`: why the
    profile has this state. `next_place`: the machine to run `next_command` on. `images`: the ids of images built from
    the lock. `environments`: the evidence about environments, as each was when it was recorded. `runs`: the
    measurements. `left_out`: extensions that the profile leaves out. `comparison`: the result of --compare."""

    profile: str
    state: ImageState
    file: str
    description: str
    python: str
    torch: str
    cuda: str | None
    driver: str | None
    reasons: tuple[str, ...]
    next_command: str
    next_place: str
    lock: Digest | None
    images: tuple[Digest, ...]
    evidence: tuple[ProofRow, ...]
    environments: tuple[RecordedEnvironment, ...]
    runs: tuple[Run, ...]
    layers: Layers | None
    advisories: tuple[AdvisoryRow, ...]
    pins: tuple[PagePin, ...]
    left_out: tuple[LeftOut, ...]
    environment: tuple[Variable, ...]
    comparison: ComparedFingerprints | None


@dataclass(frozen=True)
class Page:
    """The page of a profile. `environments`: the evidence about environments with the locked files. `runs`: the
    measurements, one run for each tested GPU model. `layers`: None without a lock. `compared`: None if no fingerprints
    were given."""

    name: str
    description: str
    python: str
    torch: str
    cuda: str | None
    driver: str | None
    status: PageStatus
    environments: tuple[RecordedEnvironment, ...]
    runs: tuple[Run, ...]
    layers: Layers | None
    advice: tuple[PageAdvice, ...]
    pins: tuple[PagePin, ...]
    left_out: tuple[LeftOut, ...]
    environment: tuple[Variable, ...]
    compared: Compared | None

    def document(self, file: str) -> PageDocument:
        """`file`: where the page was written."""
        compared, known = self.compared, self.status
        return PageDocument(
            profile=self.name,
            state=known.state,
            file=file,
            description=self.description,
            python=self.python,
            torch=self.torch,
            cuda=self.cuda,
            driver=self.driver,
            reasons=known.reasons,
            next_command=known.next,
            next_place=known.where,
            lock=known.lock,
            images=known.images,
            evidence=known.evidence,
            environments=self.environments,
            runs=self.runs,
            layers=self.layers,
            advisories=tuple(
                AdvisoryRow(item.known.id, item.state, item.reason, item.known.remedy) for item in self.advice
            ),
            pins=self.pins,
            left_out=self.left_out,
            environment=self.environment,
            comparison=ComparedFingerprints(
                compared.a,
                compared.b,
                compared.result.verdict,
                fingerprint_comparison.operation_rows(compared.result),
                compared.result.notes,
            )
            if compared
            else None,
        )


def page(
    loaded: LoadedProfile,
    plan: Plan,
    lock: Lock | None,
    evidence: PageEvidence,
    others: Mapping[str, Lock],
    compared: Compared | None = None,
) -> Page:
    """Collect the contents of a page. `others`: the locks of other profiles, by name. Raises ProfileError if an
    advisory refuses a locked version."""
    fits = lock is not None and not lock.stale(plan)
    versions = lock.versions if lock and fits else {}
    choice = plan_resolver.as_locked(plan, versions) if fits else plan.choice
    reasons = pin_reasons.pin_reasons(plan, choice, versions)
    explained = {setting.variable: setting.reason for setting in pin_reasons.explained_settings(plan, choice)}
    environment = lock.environment if lock and fits else plan.environment
    return Page(
        name=loaded.name,
        description=loaded.profile.description,
        python=plan.python,
        torch=loaded.profile.torch,
        cuda=choice.situation.cuda,
        driver=choice.situation.driver,
        status=page_status(loaded, plan, lock, evidence),
        environments=evidence.environments,
        runs=evidence.runs,
        layers=page_layers(loaded.name, lock, others) if lock else None,
        advice=tuple(
            PageAdvice(item.state, item.reason, run_measurement_reader.known_advisory(item.advisory))
            for item in choice.advice
        ),
        pins=tuple(
            PagePin(name, version, reasons.get(name, ""))
            for name, version in pin_reasons.pin_versions(plan, choice, versions).items()
            if version is not None
        ),
        left_out=tuple(LeftOut(one.name, one.none) for one in loaded.profile.extensions if one.none),
        environment=tuple(
            Variable(name, value, explained.get(name, "")) for name, value in sorted(environment.items())
        ),
        compared=compared,
    )


def page_status(loaded: LoadedProfile, plan: Plan, lock: Lock | None, evidence: PageEvidence) -> PageStatus:
    """Return the status of a profile as `envbuild status` shows it, except that the engine is not queried: an image
    counts as built if its build is recorded, and its tags are not read."""
    proofs, stale = evidence.proofs, lock.stale(plan) if lock else []
    built = bool(evidence.images)
    state = profile_proofs_and_image_states.image_state(proofs, built=built, stale=bool(stale))
    reasons = profile_proofs_and_image_states.reasons_not_verified(
        loaded.name, lock, stale, proofs, built=built, built_differently=evidence.built_differently
    )
    proved = [profile_proofs_and_image_states.reason(loaded.name, proof) for proof in proofs if proof.state == "proved"]
    untested = [proof.model for proof in proofs if proof.state != "proved"] if loaded.profile.gpus else []
    return PageStatus(
        state,
        (*(reason.detail for reason in reasons), *proved),
        profile_proofs_and_image_states.next_command(state, loaded, proofs),
        f"on a machine with {' and '.join(untested)}" if untested else "",
        tuple(map(_page_gpu, proofs)),
        lock.id if lock else None,
        evidence.images,
        profile_proofs_and_image_states.proof_rows(proofs),
    )


def _page_gpu(proof: Proof) -> PageGpu:
    name = proof.evidence.name.partition(".")[0] if proof.evidence else None
    return PageGpu(proof.model, proof.state, proof.failed, proof.reason, name)


def page_layers(name: str, lock: Lock, others: Mapping[str, Lock]) -> Layers:
    """Return the layers, the largest first; layers of equal size stay in the image's order. Layers are compared as in
    `envbuild diff`."""
    holders: dict[str, list[str]] = {}
    for other, held in sorted(others.items()):
        for layer in profile_and_image_diff.of_lock(other, held).layers:
            holders.setdefault(layer.identity, []).append(other)
    found = [
        # the number of layers of a base image is not in the lock
        PageLayer(None if lock.image else number, layer.title, layer.bytes, tuple(holders.get(layer.identity, ())))
        for number, layer in enumerate(profile_and_image_diff.of_lock(name, lock).layers, 1)
    ]
    return Layers(tuple(sorted(found, key=lambda layer: -(layer.bytes or 0))), len(others))


def comparison(a: Fingerprint, b: Fingerprint) -> Compared:
    """Compare two fingerprints. Raises UsageError if they cannot be compared."""
    return Compared(
        fingerprint_comparison.machine_line(a.machine),
        fingerprint_comparison.machine_line(b.machine),
        fingerprint_comparison.compare_fingerprints(a, b),
    )
