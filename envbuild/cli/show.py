import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuild.cli.command_options import json_option, pin_option, profile_argument
from envbuild.cli.console import emit, table
from envbuild.cli.multi_profile_loop import for_each
from envbuild.cli.output_files import FILE
from envbuild.evidence import profile_proofs_and_image_states
from envbuild.evidence.profile_proofs_and_image_states import ProofRow
from envbuild.evidence.proof_rules import Proof
from envbuild.facts import database
from envbuild.facts.mixed_gpu_settings import Setting
from envbuild.fetch.archive_spec import COMPAT
from envbuild.image import build_records
from envbuild.image.build_records import Record
from envbuild.lock import lock_file
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.report import pin_reasons
from envbuild.resolve import cuda_line_lookup, plan_resolver, profile_reader_and_overrides
from envbuild.util import settings
from envbuild.util.errors import EnvbuildError, SettingsError, UsageError, printable
from envbuild.util.json_output_types import AdvisoryRow, Digest, ImageState, LockState


@click.command("show", short_help="Show every pinned version and its reason; --html: a report.")
@profile_argument("names", nargs=-1)
@pin_option
@click.option(
    "-o",
    "--output",
    "--html",
    "html",
    type=FILE,
    metavar="FILE",
    help="Write all information about the profile as one HTML page; - is stdout.",
)
@click.option(
    "--compare", "prints", type=FILE, nargs=2, metavar="A B",
    help="With --html: also show where the results of two GPUs diverge. A, B: files of `envbuild test --fingerprint`.",
)  # fmt: skip
@json_option
def command(
    names: tuple[str, ...], pins: dict[str, str], html: Path | None, prints: tuple[Path, Path] | None, as_json: bool
) -> None:
    """Show every pin of a profile and where it comes from: the profile, torch or an advisory. Without a name, list all
    profiles.

    --html writes a page with the proof, errors and their tolerances, layers, speed, ranks and advisories. It needs the
    evidence on disk but no engine, and the page can be read without network. The exit code does not depend on the state
    of the image: use `envbuild status` for that.

    Example: envbuild show
    Example: envbuild show h20
    Example: envbuild show h20-cu12 --pin cublas=12.1.3.1   as if this version were pinned
    Example: envbuild show h20 --html h20.html --compare a100.json h20.json
    """
    if prints and not html:
        raise UsageError("--compare belongs to --html", hint="envbuild diff A B compares two fingerprints")
    if html:
        if len(names) != 1 or pins:
            raise UsageError("--html takes one profile, without --pin", hint="envbuild show h20 --html h20.html")
        from envbuild.cli import show_html  # its template engine is imported only for this

        show_html.write_report(names[0], html, prints, as_json)
        return
    _settings()
    if not names:
        _all(as_json)
        return

    def show(name: str) -> ShowDocument:
        document, proofs = _document(name, pins)
        if not as_json:
            _print(document, profile_proofs_and_image_states.proof_sentence(document.profile, proofs))
        return document

    for_each(names, show, as_json)


@dataclass(frozen=True)
class NvccRow:
    release: str
    home: str


@dataclass(frozen=True)
class OtherLine:
    """Another profile for the same GPU, and the oldest driver that supports it."""

    profile: str
    driver: str | None


@dataclass(frozen=True)
class ShowDocument:
    """The document of `show`. `state`: from the evidence on disk, without an engine. `driver`: the oldest driver that
    works. `partial`: what the project requires and the profile does not have. `other_lines`: profiles of the same GPU
    for other drivers. `forward_compatibility`: the sha256 of the archive with NVIDIA's forward-compatibility libraries.
    `pins`: short name or distribution -> version, null if not pinned. `requirements`: package that is not locked ->
    requested versions. `reasons`: the name of a pin or requirement -> where it comes from. `why`: the name of a pin,
    variable, ... -> the reason that the profile gives for it. `environment`: variables that a mix of GPU models needs,
    or for which the profile gives a reason. `changed`: the parts of the lock that no longer match the profile.
    `next_command`: the command to run first if the lock is missing or out of date."""

    profile: str
    state: ImageState
    description: str
    partial: tuple[str, ...]
    gpus: tuple[str, ...]
    driver: str | None
    other_lines: tuple[OtherLine, ...]
    forward_compatibility: str | None
    variant: str
    nvcc: NvccRow | None
    pins: Mapping[str, str | None]
    requirements: Mapping[str, str]
    reasons: Mapping[str, str | None]
    why: Mapping[str, str]
    environment: tuple[Setting, ...]
    advisories: tuple[AdvisoryRow, ...]
    lock: Digest | None
    lock_state: LockState
    changed: tuple[str, ...]
    next_command: str | None
    evidence: tuple[ProofRow, ...]


@dataclass(frozen=True)
class ListedProfile:
    """A profile in the document of `show` without a name."""

    profile: str
    state: ImageState
    reason: str | None
    gpus: tuple[str, ...] = ()
    torch: str | None = None
    cuda: str | None = None
    python: str | None = None
    lock: Digest | None = None
    lock_state: LockState | None = None
    changed: tuple[str, ...] = ()
    evidence: tuple[ProofRow, ...] = ()
    partial: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProfileList:
    """The document of `show` without a name. If the `state` of a profile is invalid, `reason` is the error, and its
    other values are unknown. `partial`: as in ShowDocument."""

    profiles: tuple[ListedProfile, ...]


def _print(document: ShowDocument, proof: str) -> None:
    mark = " (partial)" if document.partial else ""
    click.echo(f"{document.profile}{mark}: {document.description}")
    if document.gpus:
        archive = document.forward_compatibility
        compat = " (forward-compatibility libraries are used if the driver is older than they are)" if archive else ""
        reason = f": {document.why['driver']}" if "driver" in document.why else ""
        driver = f"driver {document.driver} or newer" if document.driver else "oldest driver unknown"
        click.echo(f"  for {', '.join(document.gpus)}; {driver}{compat}{reason}")
        for line in document.other_lines:
            click.echo(f"  other profile for this GPU: {line.profile}, for driver {line.driver} or newer")
    if document.nvcc:
        click.echo(f"  {document.variant}: nvcc of CUDA {document.nvcc.release}, {document.nvcc.home}")
    for pin, version in document.pins.items():
        click.echo(f"  {pin:<20} {_short(version or '-'):<24} {document.reasons[pin] or ''}".rstrip())
    for name, versions in document.requirements.items():
        click.echo(f"  {name:<20} {versions:<24} {document.reasons.get(name) or ''}".rstrip())
    for setting in document.environment:
        click.echo(f"  {setting.variable}={setting.value}: {setting.reason}")
    for missing in document.partial:
        click.echo(f"  partial: {missing}")
    shown = _shown_with_values(document)
    for name, reason in document.why.items():
        if name not in shown:
            click.echo(f"  {name}: {reason}")
    for item in document.advisories:
        click.echo(f"  {item.state}: {item.id}: {item.reason}")
        if item.state == "warned":
            click.echo(f"    fix: {item.remedy}")
    following = f"; next: {document.next_command}" if document.next_command else ""
    click.echo(f"  lock: {_lock_text(document)}{following}")
    click.echo(f"  {proof}")


def _shown_with_values(document: ShowDocument) -> set[str]:
    """Return the names whose reasons are printed next to their values: the driver, variables, versions."""
    listed = {str(canonicalize_name(name)) for name in (*document.pins, *document.requirements)}
    variables = {setting.variable for setting in document.environment}
    driver = ["driver"] if document.gpus else []
    return {*driver, *variables, *(name for name in document.why if canonicalize_name(name) in listed)}


def _lock_text(row: ShowDocument | ListedProfile) -> str:
    if row.lock_state == "outdated":
        return f"out of date ({', '.join(row.changed)})"
    return f"current {row.lock.removeprefix('sha256:')[:12]}" if row.lock else "missing"


def _settings() -> None:
    """Report errors in the site's settings as a warning. This command does not use the settings, but the commands that
    the user runs next do."""
    try:
        settings.names()
    except SettingsError as error:
        from envbuild.doctor import site_settings_validation  # imported only here

        site_settings_validation.complete(error)
        for text in (error.message, *(f"  {fault}" for fault in error.faults)):
            click.echo(printable(f"warning: {text}"), err=True)


_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def _short(version: str) -> str:
    """Shorten a commit or a sha256 to its first 12 digits. Return a version unchanged."""
    return version[:12] if _HASH.fullmatch(version) else version


def _document(name: str, pins: dict[str, str]) -> tuple[ShowDocument, tuple[Proof, ...]]:
    loaded, unwritten = _written_or_not(name, pins)
    plan = plan_resolver.resolve(loaded)
    locked = lock_file.read(loaded.known_lock)
    stale = locked.stale(plan) if locked else []
    fits = locked is not None and not stale  # versions that were locked for different inputs do not apply
    versions = locked.versions if locked and fits else {}
    choice = plan_resolver.as_locked(plan, versions) if fits else plan.choice
    proofs = profile_proofs_and_image_states.on_disk(loaded.name, loaded.profile, locked, build_records.all_records())
    found = pin_reasons.pin_versions(plan, choice, versions)
    reasons = pin_reasons.pin_reasons(plan, choice, versions)
    for name, version in pins.items():
        if name == "cuda":  # torch determines it; a pin only checks the version
            continue
        known = database.known_versions(database.distribution_of(name, choice.situation.cuda or "") or name)
        key = name if name in reasons else str(canonicalize_name(name))
        found.setdefault(key, version)
        if version not in known:
            reasons[key] = f"{reasons.get(key, '--pin')}; not checked: whether an index has it"
    unlocked = {} if fits else _unlocked(loaded.profile.packages, found)
    document = ShowDocument(
        profile=loaded.name,
        state=profile_proofs_and_image_states.state_by_evidence(proofs, bool(stale)) if locked else "missing",
        description=loaded.profile.description,
        partial=loaded.profile.partial,
        gpus=tuple(gpu.id for gpu in choice.situation.gpus),
        driver=choice.driver,
        other_lines=tuple(
            OtherLine(line.profile, line.driver)
            for line in cuda_line_lookup.lines_for(loaded)
            if line.profile != loaded.name
        ),
        forward_compatibility=next((archive.sha256 for archive in plan.archives if archive.name == COMPAT), None),
        variant=loaded.profile.variant,
        nvcc=NvccRow(plan.toolchain.release, plan.toolchain.home) if plan.toolchain else None,
        pins=found,
        requirements=unlocked,
        reasons={name: reasons.get(name) for name in (*found, *unlocked)},
        why=plan.why,
        environment=tuple(pin_reasons.explained_settings(plan, choice)),
        advisories=choice.advisories,
        lock=locked.id if locked else None,
        lock_state="missing" if locked is None else "outdated" if stale else "current",
        changed=tuple(stale),
        next_command=None if fits or pins else f"envbuild {'init' if unwritten else 'lock'} {plan.cli_words}",
        evidence=profile_proofs_and_image_states.proof_rows(proofs),
    )
    return document, proofs


def _unlocked(packages: Iterable[str], pinned: Mapping[str, str | None]) -> dict[str, str]:
    """Return name -> requested versions for the packages of a profile that are not in `pinned`."""
    found: dict[str, list[str]] = {}
    for requirement in map(Requirement, packages):
        found.setdefault(str(canonicalize_name(requirement.name)), []).append(str(requirement.specifier))
    return {
        name: ",".join(filter(None, specifiers)) or "any version"
        for name, specifiers in found.items()
        if name not in pinned
    }


def _written_or_not(name: str, pins: dict[str, str]) -> tuple[LoadedProfile, bool]:
    """Return the profile, and whether its file is missing. For a GPU without a profile, return the profile that
    `envbuild init` would write."""
    try:
        return profile_reader_and_overrides.load(name, pins), False
    except profile_and_lock_name_lookup.UnwrittenProfile as missing:
        loaded = profile_reader_and_overrides.unwritten(missing.name, pins)
        click.echo(printable(f"note: {missing.note}, with the pins of {loaded.parent}"), err=True)
        return loaded, True


def _all(as_json: bool) -> None:
    built = list(build_records.all_records())
    rows = [_row(name, built) for name in profile_and_lock_name_lookup.profile_names()]
    if as_json:
        emit(ProfileList(tuple(row for row, _ in rows)))
        return
    lines = [("PROFILE", "GPUS", "TORCH", "CUDA", "PYTHON", "LOCK", "PROOF")]
    for row, proof in rows:
        cells = (", ".join(row.gpus) or "-", row.torch or "-", row.cuda or "-", row.python or "-")
        name = f"{row.profile} (partial)" if row.partial else row.profile
        lines.append((name, *cells, _lock_text(row) if row.lock_state else "-", row.reason or proof))
    for line in table(lines):
        click.echo(line)


def _row(name: str, built: list[Record]) -> tuple[ListedProfile, str]:
    """Return the row of a profile, and the text about its evidence."""
    try:
        loaded = profile_reader_and_overrides.load(name)
        plan = plan_resolver.resolve(loaded)
        locked = lock_file.read(loaded.known_lock)
    except EnvbuildError as error:
        return ListedProfile(name, "invalid", error.message), ""
    known, stale = plan.choice.situation, locked.stale(plan) if locked else []
    proofs = profile_proofs_and_image_states.on_disk(name, loaded.profile, locked, built)
    row = ListedProfile(
        profile=name,
        state=profile_proofs_and_image_states.state_by_evidence(proofs, bool(stale)) if locked else "missing",
        reason=None,
        gpus=tuple(gpu.id for gpu in known.gpus),
        torch=known.torch,
        cuda=known.cuda,
        python=plan.python,
        lock=locked.id if locked else None,
        lock_state="missing" if locked is None else "outdated" if stale else "current",
        changed=tuple(stale),
        evidence=profile_proofs_and_image_states.proof_rows(proofs),
        partial=loaded.profile.partial,
    )
    return row, profile_proofs_and_image_states.proof_sentence(loaded.name, proofs)
