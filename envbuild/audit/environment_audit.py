"""Audits an environment: compares its actual contents with a profile, the profile's lock and the known faults.

A collector runs in the environment: in a container for an image, else as a process of the environment's Python.
collected_environment.py reads the collector's document, library_and_distribution_findings.py judges the libraries, and
this module compares the rest with the profile, the lock and the facts.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from packaging.utils import canonicalize_name
from packaging.version import Version

from envbuild.audit import extension_findings, file_findings, library_and_distribution_findings
from envbuild.audit.collected_environment import LD_CACHE, LD_PATH, LD_PRELOAD, Copy, Holdings
from envbuild.audit.finding_types import SEVERITIES, Finding, Severity, VersionMismatch
from envbuild.facts import database, torch_cuda_arch_list_parser
from envbuild.facts.advisory_model import Advisory, Situation
from envbuild.facts.fact_field_types import is_version
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.lock.lock_file import Lock
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.profile.value_types import StartupFile
from envbuild.resolve import advisory_remedy, torch_compatibility_and_advisories
from envbuild.testrun.selftest_job import BOOTSTRAP, Job, Limits, bootstrap_payload, started
from envbuild.util.errors import CheckFailed
from envbuild.util.json_output_types import AdvisoryRow, Digest, plain

_ENTRY = "envbuild.selftest.inventory.environment_collector"
_MEMORY, _SECONDS = 4 << 30, 480.0


def collector_job(image: str, python: str = "python", wheels: Mapping[str, Mapping[str, str]] | None = None) -> Job:
    """Return the job that runs the collector. Python's own environment variables (PYTHONPATH, ...) stay in effect, also
    in an image, because they determine which files an import finds.

    `wheels`: the sha256 of each file according to its distribution's wheel, as returned by
    wheel_file_hashes_and_contents.wheel_hashes.
    """
    nonce = secrets.token_hex(16)
    document = json.dumps({"version": 1, "nonce": nonce, "wheels": wheels or {}}).encode()
    argv = (python, *started(image), "-c", BOOTSTRAP, _ENTRY)
    return Job(image, argv, bootstrap_payload(document), nonce, Limits(_MEMORY, _SECONDS), is_selftest=False)


@dataclass(frozen=True)
class Expected:
    """What the contents are compared with. Without a profile, only the GPUs and the driver are known.

    `claimed`: whether the image's label names `lock`. `image`: False for an environment of this machine. `cli_words`:
    the profile's name on the command line. `modules`: distribution -> the compiled modules that it must have.
    `startup`: the files that may run code when Python starts or torch is imported, with the reason.
    """

    profile: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_count: int = 1
    driver: str | None = None
    features: frozenset[str] = frozenset()
    accepted: Mapping[str, str] = field(default_factory=dict)
    lock: Lock | None = None
    claimed: bool = False
    image: bool = True
    cli_words: str = ""
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict)
    startup: Mapping[StartupFile, str] = field(default_factory=dict)


def expected_contents(loaded: LoadedProfile, lock: Lock | None, claimed: bool = False) -> Expected:
    profile, known = loaded.profile, torch_compatibility_and_advisories.choose_stack(loaded).situation
    return Expected(
        profile=loaded.name,
        gpus=known.gpus,
        gpu_count=profile.gpu_count,
        driver=known.driver,
        features=known.features,
        accepted={item.advisory: item.reason for item in profile.accept},
        lock=lock,
        claimed=claimed,
        cli_words=loaded.known,
        modules={one.name: one.modules for one in profile.compiled},
        startup={StartupFile(file.file, file.sha256): file.reason for file in profile.startup},
    )


def of_gpus(gpus: Sequence[Gpu], *, image: bool) -> Expected:
    """Return what to compare with if only the GPUs are given. They may be in another machine, so the driver is
    unknown."""
    return Expected(gpus=tuple(gpus), gpu_count=len(gpus), image=image)


def of_machine(held: Holdings) -> Expected:
    """Return what to compare an environment of this machine with, without a profile: the machine's GPUs and driver."""
    cards = [card for name in held.machine.gpus for card in [database.gpu_by_name(name)] if card]
    return Expected(
        gpus=tuple(dict.fromkeys(cards)), gpu_count=max(1, len(cards)), driver=held.machine.driver, image=False
    )


NO_TORCH = "torch is not installed"
NOTHING = f"{NO_TORCH}; the contents are listed, but not checked for a GPU"


AuditState = Literal["clean", "warned", "failed", "empty"]


@dataclass(frozen=True)
class AuditedTorch:
    version: str | None
    cuda: str | None
    hip: str | None
    imported: bool


@dataclass(frozen=True)
class AuditedLibrary:
    """A CUDA library. `loaded`: whether importing torch loads this copy."""

    name: str
    version: str | None
    path: str
    sha256: str | None
    loaded: bool


@dataclass(frozen=True)
class AuditedModule:
    """A compiled file of an extension. `architectures`: of its device code; None if it has only host code."""

    name: str | None
    path: str
    architectures: tuple[str, ...] | None


@dataclass(frozen=True)
class AuditedExtension:
    name: str
    version: str
    modules: tuple[AuditedModule, ...]


@dataclass(frozen=True)
class AuditDocument:
    """The document of `audit`. `state`: failed: a defect or a refusal; warned: warnings, but no defect or refusal;
    clean: no findings except notes; empty: torch is not installed, and nothing failed. `profile`, `lock`, `gpus`: what
    the contents were compared with. `distributions`: the installed ones, with their versions. `advisories`: the known
    faults among the findings."""

    target: str
    state: AuditState
    profile: str | None
    lock: Digest | None
    gpus: tuple[str, ...]
    python: str
    torch: AuditedTorch | None
    distributions: Mapping[str, str]
    libraries: tuple[AuditedLibrary, ...]
    extensions: tuple[AuditedExtension, ...]
    advisories: tuple[AdvisoryRow, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Audit:
    """The result of an audit. `wanted`: what the contents, `held`, were compared with. `clean`: no findings except
    notes."""

    target: str
    wanted: Expected
    held: Holdings
    findings: tuple[Finding, ...]

    @cached_property
    def counts(self) -> Mapping[str, int]:
        counted = Counter(finding.severity for finding in self.findings)
        return {severity: counted[severity] for severity in SEVERITIES if counted[severity]}

    @property
    def clean(self) -> bool:
        return not set(self.counts) - {"note"}

    @property
    def failed(self) -> bool:
        return bool({"defect", "refuse"} & set(self.counts))

    @property
    def summary(self) -> str:
        """The number of findings, as in "1 defect, 2 notes"."""
        if self.clean:
            return "clean" if self.held.torch else NOTHING
        plural = {"defect": "defects", "refuse": "refusals", "warn": "warnings", "note": "notes"}
        singular = {"defect": "defect", "refuse": "refusal", "warn": "warning", "note": "note"}
        return ", ".join(f"{n} {(singular if n == 1 else plural)[severity]}" for severity, n in self.counts.items())

    def require(self) -> None:
        """Raise CheckFailed, which contains the document, if there is a defect or a refusal."""
        if self.failed:
            worst = [finding for finding in self.findings if finding.severity in ("defect", "refuse")]
            text = "\n".join(f"{f.id}: {f.message}; fix: {f.remedy}" for f in worst[:10])
            error = CheckFailed(f"{self.target}: {self.summary}", hint=text)
            error.partial = plain(self.document())
            raise error

    @property
    def state(self) -> AuditState:
        if self.held.torch is None and not self.failed:
            return "empty"
        return "failed" if self.failed else "clean" if self.clean else "warned"

    def document(self) -> AuditDocument:
        """The result for `--json`."""
        held, torch = self.held, self.held.torch
        return AuditDocument(
            target=self.target,
            state=self.state,
            profile=self.wanted.profile,
            lock=self.wanted.lock.id if self.wanted.lock else None,
            gpus=tuple(gpu.id for gpu in self.wanted.gpus),
            python=held.python.version,
            torch=AuditedTorch(torch.version, torch.cuda, torch.hip, torch.imported) if torch else None,
            distributions=dict(sorted(held.installed.items())),
            libraries=tuple(AuditedLibrary(c.library, c.version, c.path, c.sha256, c.loaded) for c in held.libraries),
            extensions=tuple(
                AuditedExtension(
                    name,
                    version,
                    tuple(
                        AuditedModule(f.module, f.path, None if f.architectures is None else tuple(f.architectures))
                        for f in files
                        if f.there
                    ),
                )
                for (name, version), files in held.extended.items()
            ),
            advisories=tuple(self._advisories()),
            findings=self.findings,
        )

    def _advisories(self) -> Iterator[AdvisoryRow]:
        known = {advisory.id for advisory in database.advisories()}
        for finding in self.findings:
            if finding.id in known:
                accepted = finding.id in self.wanted.accepted
                state = "accepted" if accepted else torch_compatibility_and_advisories.STATES[finding.severity]
                yield AdvisoryRow(finding.id, state, finding.message, finding.remedy)


def assess(target: str, held: Holdings, wanted: Expected) -> Audit:
    """Compare the contents of an environment, `held`, with `wanted`. `target`: the environment's name in messages."""
    found = [
        *_torch(held, wanted),
        *library_and_distribution_findings.cuda_library_findings(held),
        *library_and_distribution_findings.distribution_findings(held, _libraries_with_remedies(held, wanted)),
        *file_findings.file_findings(
            held, wanted.startup, built=wanted.claimed, strict=wanted.image or bool(wanted.profile)
        ),
        *extension_findings.extension_findings(held, wanted.gpus, wanted.modules),
        *_locked(held, wanted),
        *_advisories(held, wanted),
    ]
    if held.cut:
        found.append(
            Finding(
                "search-cut",
                "note",
                "a limit on number or time was reached: some libraries, extensions or files are not listed",
                "for a complete list, audit an environment with fewer packages",
            )
        )
    return Audit(
        target, wanted, held, tuple(sorted(dict.fromkeys(found), key=lambda item: SEVERITIES.index(item.severity)))
    )


def _libraries_with_remedies(held: Holdings, wanted: Expected) -> dict[str, str]:
    """Library -> remedy for the requirement of torch that the installed version contradicts, for libraries_to_keep."""
    text = "keep the installed version: the required one has a known fault here"
    more = "" if wanted.image else "; envbuild fix changes what torch requires, except in a Poetry project"
    return {name: f"{text}{more}" for name, _ in libraries_to_keep(held, held_situation(held, wanted), wanted)}


def _torch(held: Holdings, wanted: Expected) -> Iterator[Finding]:
    torch, version = held.torch, held.installed.get("torch")
    if torch is None:
        lacking = wanted.profile is not None
        remedy = _other_torch(held, wanted, "install torch") if lacking else ""
        yield Finding("no-torch", "defect" if lacking else "note", NO_TORCH, remedy)
        return
    if not torch.imported:
        yield library_and_distribution_findings.not_imported(version or "", torch.failure or "", _MEMORY)
    elif torch.failure:
        text = f"torch can be imported, but querying the versions of its libraries failed: {torch.failure}"
        yield Finding("library-crash", "warn", text, "reinstall the CUDA libraries")
    if version and torch.version and version not in (torch.version, torch.version.partition("+")[0]):
        text = f"torch reports version {torch.version}, its distribution metadata {version}"
        mismatch = VersionMismatch("torch", torch.version, version)
        yield Finding("torch-version", "defect", text, "reinstall torch", (mismatch,))
    if _is_cpu_only(held) and wanted.gpus:
        text = f"torch {torch.version or version} has no GPU code; {_names(wanted.gpus)} needs a CUDA build"
        remedy = _other_torch(held, wanted, "install torch from an index that has its CUDA builds")
        yield Finding("cpu-only", "defect", text, remedy)
        return
    for gpu in wanted.gpus if torch.architectures else ():
        yield from _kernels(gpu, torch.architectures, _other_torch(held, wanted, "install a torch built for this GPU"))


def _other_torch(held: Holdings, wanted: Expected, otherwise: str) -> str:
    """Return how to install the lock's torch; without a lock, return `otherwise`."""
    if wanted.claimed:
        return f"envbuild make {wanted.cli_words}"
    version = wanted.lock.versions.get("torch") if wanted.lock else None
    return install(held, wanted.image, [f"torch=={version}"]) if version else otherwise


def _is_cpu_only(held: Holdings) -> bool:
    torch, version = held.torch, held.installed.get("torch", "")
    if torch is None or not torch.imported:
        return version.endswith("+cpu")
    return not torch.cuda and not torch.hip


def _kernels(gpu: Gpu, listed: list[str], remedy: str) -> Iterator[Finding]:
    how, architectures = torch_cuda_arch_list_parser.serves(listed, gpu.compute_capability), " ".join(listed)
    if how == "ptx":
        text = (
            f"torch has no compiled code for {gpu.id} ({gpu.compute_capability}), only PTX to compile: {architectures}"
        )
        yield Finding("no-kernel", "warn", text, remedy)
    elif how is None:
        text = f"torch has no code for {gpu.id} (compute capability {gpu.compute_capability}): {architectures}"
        yield Finding("no-kernel", "defect", text, remedy)


def _locked(held: Holdings, wanted: Expected) -> Iterator[Finding]:
    lock = wanted.lock
    if lock is None:
        return
    installed = held.installed
    others = [name for name, version in sorted(lock.versions.items()) if installed.get(name) != version]
    wrong = [VersionMismatch(name, installed.get(name), lock.versions[name]) for name in others]
    if not f"{held.python.version}.".startswith(f"{lock.python}."):
        wrong.insert(0, VersionMismatch("Python", held.python.version, lock.python))
    if wrong:
        more = f" (and {len(wrong) - _MOST} more)" if len(wrong) > _MOST else ""
        listed = "; ".join(f"{w.name} is {w.found or 'absent'}, but {w.expected} is locked" for w in wrong[:_MOST])
        text = f"different from the lock of {wanted.profile}: {listed}{more}"
        severity: Severity = "defect" if wanted.claimed else "warn"
        yield Finding("not-as-locked", severity, text, _as_locked(held, wanted, lock, others), tuple(wrong))


_MOST = 8  # maximum number of versions, or of GPU models, in a message


def _as_locked(held: Holdings, wanted: Expected, lock: Lock, others: Sequence[str]) -> str:
    """Return the command that installs the locked versions of the distributions `others`; if there are many, the
    command that makes a new environment."""
    if wanted.claimed:
        return f"envbuild make {wanted.cli_words}"
    exact = [f"{name}=={lock.versions[name]}" for name in others]
    command = ""
    if 0 < len(exact) <= _MOST:
        command = f"with Python {lock.python}: {install(held, wanted.image, ['--no-deps', *exact])}; "
    elif not wanted.image:
        command = f"make a new environment: envbuild install {wanted.cli_words} NEW_FOLDER; "
    return f"{command}all versions and hashes: envbuild export requirements {wanted.cli_words}"


def _advisories(held: Holdings, wanted: Expected) -> Iterator[Finding]:
    now = held_situation(held, wanted)
    for advisory in database.matching(now):
        reason = wanted.accepted.get(advisory.id)
        if reason is not None:
            text = f"accepted by {wanted.profile} ({reason}): {_said(advisory)}"
            yield Finding(advisory.id, "note", text, advisory.remedy)
        else:
            yield Finding(advisory.id, advisory.severity, _said(advisory), _remedy(advisory, now, held, wanted))
    if not wanted.gpus and not _is_cpu_only(held):
        yield from _elsewhere(now)


def _remedy(advisory: Advisory, now: Situation, held: Holdings, wanted: Expected) -> str:
    if wanted.claimed:
        return in_profile(advisory, now, wanted.cli_words)
    return against(advisory, now, held, wanted.image)


def _elsewhere(now: Situation) -> Iterator[Finding]:
    """Report, as notes, the advisories of severity refuse that would apply on some GPU models. Used if the GPU is
    unknown."""
    cards: dict[str, list[Gpu]] = {}
    known = {advisory.id: advisory for advisory in database.advisories() if advisory.severity == "refuse"}
    for gpu in database.gpus().values():
        on_it = replace(now, gpus=(gpu,))
        for ident, advisory in known.items():
            if advisory.holds(on_it) and not advisory.holds(now):
                cards.setdefault(ident, []).append(gpu)
    for ident, gpus in cards.items():
        more = f" and {len(gpus) - _MOST} more GPU models" if len(gpus) > _MOST else ""
        text = f"on {_names(gpus[:_MOST])}{more}: {_said(known[ident])}"
        yield Finding(
            ident, "note", text, f"{known[ident].remedy}; to check only a profile's GPU models: --profile NAME"
        )


def _said(advisory: Advisory) -> str:
    return f"{advisory.title} ({', '.join(advisory.cite[:2])})"


def _names(gpus: tuple[Gpu, ...] | list[Gpu]) -> str:
    return ", ".join(gpu.id for gpu in gpus)


def held_situation(held: Holdings, wanted: Expected) -> Situation:
    """Return the GPUs, versions and settings with which advisories are compared. The versions of loaded libraries take
    precedence over those of installed distributions."""
    installed, torch = held.installed, held.torch
    versions: dict[str, str] = {}
    if not _is_cpu_only(held):
        versions = database.libraries_among(installed, torch.cuda if torch else None)
        versions |= {copy.library.lower(): copy.version for copy in held.libraries if copy.loaded and copy.version}
    built = {name for name, _ in held.extended}
    on_path = [copy for copy in held.libraries if LD_PATH in copy.ways and _is_foreign(copy)]
    words = {
        "ld-library-path": bool(on_path),
        "nvjitlink-shadowed": "nvJitLink" in {copy.group for copy in on_path},
        "system-cudnn": any(
            copy.group == "cudnn" and {LD_PATH, LD_CACHE} & set(copy.ways) and _is_foreign(copy)
            for copy in held.libraries
        ),
        "cuda-compat": bool(held.compat),
    }
    return Situation(
        gpus=wanted.gpus,
        torch=installed.get("torch") or (torch.version if torch else None),
        cuda=torch.cuda if torch else None,
        libraries=versions,
        distributions=installed,
        driver=wanted.driver,
        gpu_count=wanted.gpu_count,
        features=wanted.features,
        extensions=frozenset(built | ({"apex"} if held.apex and held.apex.compiled else set())),
        environment=frozenset(word for word, holds in words.items() if holds),
    )


def libraries_to_keep(held: Holdings, now: Situation, wanted: Expected) -> Iterator[tuple[str, str]]:
    """Yield (library, installed version) for each library whose installed version differs from the one that torch
    requires exactly, if the required version has a fault of severity `refuse` here. The next installation of a package
    that requires torch would bring that version back."""
    for owner, item in library_and_distribution_findings.held_requirements(held):
        name = canonicalize_name(item.name)
        library, present = database.library_of(name), held.installed.get(name)
        required = re.fullmatch(r"==([0-9.]+)", str(item.specifier))
        if owner != "torch" or library is None or present is None or required is None or not is_version(present):
            continue
        if Version(present) == Version(required[1]):
            continue
        before = replace(now, libraries={**now.libraries, library: required[1]})
        faults = {one.id for one in database.matching(before) if one.severity == "refuse"} - set(wanted.accepted)
        if faults - {one.id for one in database.matching(now)}:
            yield library, present


def _is_foreign(copy: Copy) -> bool:
    return not copy.in_packages


def install(held: Holdings, image: bool, *requirements: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Return a pip or uv command for each list of `requirements`, and a command that sets each variable in `env`. For
    an image, the commands are lines of a Dockerfile."""
    python = held.python.executable
    pip = [python, "-m", "pip", "install"] if "pip" in held.installed else ["uv", "pip", "install", "--python", python]
    commands = [f"{'RUN ' if image else ''}{shlex.join([*pip, *words])}" for words in requirements]
    commands += [f"{'ENV' if image else 'export'} {name}={shlex.quote(value)}" for name, value in (env or {}).items()]
    return f"{'in the Dockerfile: ' if image else ''}{'; '.join(commands)}"


def against(advisory: Advisory, now: Situation, held: Holdings, image: bool) -> str:
    """Return an advisory's fix, with the commands that install the fixed versions. A library is left out if the facts
    do not name its distribution. If the installed version of a library has no fault, but a different file is loaded,
    the fix is about that file. A version with another fault of severity `refuse` here is not installed."""
    written = advisory_remedy.written(advisory.change, now)
    cuda = written.get("cuda") or now.cuda or ""
    pins, more = list[str](), list[str]()
    for name, version in written.get("pins", {}).items():
        distribution, loaded = database.distribution_of(name, cuda), held.loaded(name)
        present = held.installed.get(distribution or "")
        if loaded and loaded.record is None and present and present in advisory.change.pins[name]:
            by_variable = {LD_PATH, LD_PRELOAD} & set(loaded.ways)
            remedy = f"reinstall {distribution}"
            if by_variable or library_and_distribution_findings.shadowed_copy(loaded, held):
                remedy = library_and_distribution_findings.remedy_of_a_shadow(loaded)
            more.append(f"{distribution} {present} has no such fault, but {loaded.path} is loaded instead: {remedy}")
        elif distribution and _is_refused(name, version, now):
            more.append(f"not {distribution}=={version}, which has another known fault here")
        elif distribution:
            pins.append(f"{distribution}=={version}")
    whole = [*([f"torch=={written['torch']}"] if "torch" in written else []), *written.get("packages", ())]
    # --no-deps: torch's own metadata may require another version of a library
    words = [*([whole] if whole else []), *([["--no-deps", *pins]] if pins else [])]
    env = written.get("env", {})
    commands = [install(held, image, *words, env=env)] if words or env else []
    return "; ".join([advisory.remedy, *more, *commands])


def _is_refused(library: str, version: str, now: Situation) -> bool:
    """Whether this version of a library has a fault of severity `refuse` in a situation."""
    found = database.matching(replace(now, libraries={**now.libraries, library: version}))
    return any(one.severity == "refuse" and library in one.change.pins for one in found)


def in_profile(advisory: Advisory, now: Situation, cli_words: str) -> str:
    """Return the fix for an image built from a profile's lock: the lines to write into the profile, and the command to
    build it again. `cli_words`: the profile's name on the command line."""
    lines = "; ".join(advisory_remedy.yaml_lines(advisory_remedy.written(advisory.change, now)))
    return f"{advisory.remedy}; in the profile: {lines}; then: envbuild make {cli_words}" if lines else advisory.remedy
