"""Writes the HTML page of `envbuild show --html`, with all information about a profile."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.console import emit
from envbuild.cli.output_files import STDOUT, prepare, write
from envbuild.evidence import (
    evidence_statements_and_store,
    profile_proofs_and_image_states,
    python_environment_status,
)
from envbuild.evidence.proof_rules import Proof, record_digest
from envbuild.image import build_records
from envbuild.image.oci import lock_image_lookup_and_recipe
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.report import profile_page_contents, profile_page_html, run_measurement_reader, run_measurement_types
from envbuild.report.profile_page_contents import Page, PageEvidence
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.testrun import fingerprint_reader
from envbuild.util.errors import LockError
from envbuild.util.yaml_and_project_paths import display


def write_report(name: str, output: Path, prints: tuple[Path, Path] | None, as_json: bool) -> None:
    """Write one HTML page that needs no network: proof, errors with their tolerances, layers, speed, ranks,
    advisories.

    The page is made from the profile, its lock and the evidence on disk; no engine is used. The same evidence gives the
    same page. `prints`: files with the fingerprints of two GPUs to compare.
    """
    prepare(output, as_json=as_json)
    page = _page(name, prints)
    write(output, profile_page_html.html(page))
    if as_json:
        emit(page.document(display(output)))
    else:
        click.echo(f"{display(output)}: {page.name}, {page.status.state}", err=output == STDOUT)


def _page(name: str, prints: tuple[Path, Path] | None) -> Page:
    loaded = profile_reader_and_overrides.load(name)
    plan = plan_resolver.resolve(loaded)
    locked = lock_file.read(loaded.known_lock)
    compared = profile_page_contents.comparison(*map(fingerprint_reader.read, prints)) if prints else None
    evidence = page_evidence(loaded, locked)
    return profile_page_contents.page(loaded, plan, locked, evidence, _others(loaded.name), compared)


def page_evidence(loaded: LoadedProfile, lock: Lock | None) -> PageEvidence:
    """Return the evidence on disk for a profile."""
    built = [record for record in build_records.all_records() if lock and record.lock == lock.id]
    proofs = profile_proofs_and_image_states.on_disk(loaded.name, loaded.profile, lock, built)
    runs = tuple(map(_run, _with_evidence(proofs)))
    if lock is None:
        return PageEvidence(proofs, (), runs)
    images = dict.fromkeys(one.image for one in built if lock_image_lookup_and_recipe.matches(one, lock))
    differently = None if images else lock_image_lookup_and_recipe.built_differently(lock)
    environments = python_environment_status.recorded_environments(loaded, lock)
    return PageEvidence(proofs, tuple(images), runs, environments, differently)


def _with_evidence(proofs: tuple[Proof, ...]) -> list[Path]:
    """Return the statement files of the proofs without duplicates, because GPU models of one family share evidence."""
    return list(dict.fromkeys(proof.evidence for proof in proofs if proof.evidence))


def _run(statement: Path) -> run_measurement_types.Run:
    record = evidence_statements_and_store.record_of(statement)
    return run_measurement_reader.measured_run(record, record_digest(statement))


def _others(name: str) -> dict[str, Lock]:
    """Return the locks of all profiles except `name`. Invalid locks are left out."""
    found: dict[str, Lock] = {}
    for other, file in profile_and_lock_name_lookup.locks().items():
        try:
            read = lock_file.read(file) if other != name else None
        except LockError:
            continue
        if read:
            found[other] = read
    return found
