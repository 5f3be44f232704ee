import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuild.cli.console import emit, json_option, pin_option, profile_argument, table
from envbuild.cli.output_files import FILE
from envbuild.cli.several_profiles import for_each
from envbuild.evidence import profile_proofs
from envbuild.facts import database
from envbuild.fetch.archive_spec import COMPAT
from envbuild.image import build_records_and_comparison
from envbuild.image.build_records_and_comparison import Record
from envbuild.lock import lock_file
from envbuild.profile import profile_name_lookup
from envbuild.profile.loaded_profile import Source
from envbuild.report import pin_reasons
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util import settings
from envbuild.util.errors import EnvbuildError, SettingsError, UsageError, printable


@click.command("show", short_help="Show every pinned version and its reason; --html: a report.")
@profile_argument("names", nargs=-1)
@pin_option
@click.option(
    "--html", "html", type=FILE, metavar="FILE", help="Write everything that is known as one HTML page; - is stdout."
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

    --html writes a page, from the evidence on disk and without an engine, with the proof, errors and their tolerances,
    layers, speed, ranks and advisories. It can be read without network. The exit code is always 0; that of `envbuild
    status` depends on the state.

    Example: envbuild show
    Example: envbuild show h20 --pin cublas=12.1.3.1
    Example: envbuild show h20 --html h20.html --compare a100.json h20.json
    """
    if prints and not html:
        raise UsageError("--compare belongs to --html", hint="envbuild diff A B compares two fingerprints")
    if html:
        if len(names) != 1 or pins:
            raise UsageError("--html takes one profile, without --pin", hint="envbuild show h20 --html h20.html")
        from envbuild.cli import html_report  # its template engine is only loaded for this

        html_report.write_report(names[0], html, prints, as_json)
        return
    _settings()
    if not names:
        _all(as_json)
        return

    def show(name: str) -> dict[str, Any]:
        document = _document(name, pins)
        if not as_json:
            _print(document)
        return document

    for_each(names, show, as_json)


def _print(document: dict[str, Any]) -> None:
    click.echo(f"{document['profile']}: {document['description']}")
    if document["gpus"]:
        compat = " (forward-compatibility libraries: where it is older than theirs)" if document["compat"] else ""
        click.echo(f"  for {', '.join(document['gpus'])}; driver {document['driver']} or newer{compat}")
    if document["nvcc"]:
        click.echo(f"  {document['variant']}: nvcc of CUDA {document['nvcc']['release']}, {document['nvcc']['home']}")
    for pin, version in document["pins"].items():
        click.echo(f"  {pin:<20} {_short(version or '-'):<24} {document['reasons'][pin] or ''}".rstrip())
    for name, versions in document["asked"].items():
        click.echo(f"  {name:<20} {versions:<24} {document['reasons'].get(name) or ''}".rstrip())
    for item in document["fleet"]:
        click.echo(f"  {item['variable']}={item['value']}: {item['reason']}")
    for item in document["advisories"]:
        click.echo(f"  {item['state']}: {item['id']}: {item['reason']}")
        if item["state"] == "warned":
            click.echo(f"    way out: {item['remedy']}")
    following = f"; next: {document['next']}" if document["next"] else ""
    click.echo(f"  lock: {document['lock']['state']}{following}")
    click.echo(f"  {document['proof']}")


def _settings() -> None:
    """Nothing here needs them, and what comes next does: their faults are a warning."""
    try:
        settings.names()
    except SettingsError as error:
        from envbuild.doctor import site_settings_validation  # only here

        site_settings_validation.complete(error)
        for text in (error.message, *(f"  {fault}" for fault in error.faults)):
            click.echo(printable(f"warning: {text}"), err=True)


_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def _short(version: str) -> str:
    """A commit or a sha256 by its first 12 digits, as everywhere; any version in full."""
    return version[:12] if _HASH.fullmatch(version) else version


def _document(name: str, pins: dict[str, str]) -> dict[str, Any]:
    source, unwritten = _written_or_not(name, pins)
    plan = plan_resolver.resolve(source)
    locked = lock_file.read(source.known_lock)
    fits = locked is not None and not locked.stale(plan)  # versions locked for other inputs say nothing about these
    versions = locked.versions if locked and fits else {}
    choice = plan_resolver.as_locked(plan, versions) if fits else plan.choice
    proofs = profile_proofs.on_disk(source.name, source.profile, locked, build_records_and_comparison.all_records())
    found = pin_reasons.pin_versions(plan, choice, versions)
    reasons = pin_reasons.pin_reasons(plan, choice, versions)
    for name, version in pins.items():
        if name == "cuda":  # torch's own; a pin of it only checks that
            continue
        known = database.known_versions(database.distribution_of(name, choice.situation.cuda or "") or name)
        key = name if name in reasons else str(canonicalize_name(name))
        found.setdefault(key, version)
        if version not in known:
            reasons[key] = f"{reasons.get(key, '--pin')}; not checked: whether an index has it"
    asked = {} if fits else _asked(source.profile.packages, found)
    return {
        "profile": source.name,
        "description": source.profile.description,
        "gpus": [gpu.id for gpu in choice.situation.gpus],
        "driver": choice.driver,
        "compat": next((archive.sha256 for archive in plan.archives if archive.name == COMPAT), None),
        "variant": source.profile.variant,
        "nvcc": {"release": plan.toolchain.release, "home": plan.toolchain.home} if plan.toolchain else None,
        "pins": found,
        "asked": asked,
        "reasons": {pin: reasons.get(pin) if version or pin in plan.reasons else None for pin, version in found.items()}
        | {name: reasons.get(name) for name in asked},
        "fleet": [asdict(setting) for setting in pin_reasons.fleet_settings(plan, choice)],
        "advisories": choice.states,
        "lock": {"id": locked.id if locked and fits else None, "state": _lock_state(locked, plan)},
        "next": None if fits or pins else f"envbuild {'init' if unwritten else 'lock'} {plan.asked}",
        "proof": profile_proofs.proof_sentence(source.name, proofs),
        "proofs": profile_proofs.document(proofs),
    }


def _asked(packages: Iterable[str], pinned: Mapping[str, str | None]) -> dict[str, str]:
    """The packages of a profile that are not locked: name -> the versions that it asks for."""
    found: dict[str, list[str]] = {}
    for requirement in map(Requirement, packages):
        found.setdefault(str(canonicalize_name(requirement.name)), []).append(str(requirement.specifier))
    return {
        name: ",".join(filter(None, specifiers)) or "any version"
        for name, specifiers in found.items()
        if name not in pinned
    }


def _written_or_not(name: str, pins: dict[str, str]) -> tuple[Source, bool]:
    """The profile; for a GPU that has none, the one that could be written. And whether it is not written."""
    try:
        return profile_reader_and_overrides.load(name, pins), False
    except profile_name_lookup.UnwrittenProfile as missing:
        click.echo(printable(f"note: {missing.note}"), err=True)
        return profile_reader_and_overrides.unwritten(missing.gpu, pins), True


def _lock_state(locked: lock_file.Lock | None, plan: plan_resolver.Plan) -> str:
    if locked is None:
        return "missing"
    stale = locked.stale(plan)
    return f"out of date ({', '.join(stale)})" if stale else f"current {locked.short}"


def _all(as_json: bool) -> None:
    built = list(build_records_and_comparison.all_records())
    rows = [_row(name, built) for name in profile_name_lookup.profile_names()]
    if as_json:
        emit({"profiles": rows})
        return
    lines = [("PROFILE", "GPUS", "TORCH", "CUDA", "PYTHON", "LOCK", "PROOF")]
    for row in rows:
        cells = (", ".join(row["gpus"]) or "-", *(row[key] or "-" for key in ("torch", "cuda", "python")))
        lines.append((row["profile"], *cells, row["lock"] or "-", row["error"] or row["proof"]))
    for line in table(lines):
        click.echo(line)


def _row(name: str, built: list[Record]) -> dict[str, Any]:
    """What is known of a profile; or `error`, if the profile or its lock is invalid."""
    row: dict[str, Any] = dict.fromkeys(("torch", "cuda", "python", "lock", "proof", "error"))
    try:
        source = profile_reader_and_overrides.load(name)
        plan = plan_resolver.resolve(source)
        locked = lock_file.read(source.known_lock)
    except EnvbuildError as error:
        return {"profile": name, "gpus": [], **row, "error": error.message}
    known = plan.choice.situation
    return {
        "profile": name,
        "gpus": [gpu.id for gpu in known.gpus],
        **row,
        "torch": known.torch,
        "cuda": known.cuda,
        "python": plan.python,
        "lock": _lock_state(locked, plan),
        "proof": profile_proofs.proof_sentence(
            source.name, profile_proofs.on_disk(name, source.profile, locked, built)
        ),
    }
