import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import click

from envbuild.audit import environment_file_hasher
from envbuild.cli.command_options import json_option, profile_argument
from envbuild.cli.console import emit, table
from envbuild.cli.multi_profile_loop import for_each
from envbuild.evidence import environment_measurement, image_status, python_environment_status
from envbuild.evidence.image_status import Status, StatusDocument
from envbuild.evidence.python_environment_status import EnvironmentStatusDocument
from envbuild.fetch import index_config
from envbuild.image.docker_engine import Engine
from envbuild.image.engine_endpoint_and_errors import UnusableEngine
from envbuild.image.image_naming import VERIFIED
from envbuild.lock import lock_file, outdated_pins, wheel_file_hashes_and_contents
from envbuild.lock.outdated_pins import Outdated
from envbuild.pipeline import runner_selection
from envbuild.pipeline.model import AS_CONFIGURED
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.runners import host_runner
from envbuild.testrun import selftest_job
from envbuild.util.errors import (
    BuildError,
    CheckFailed,
    EnvbuildError,
    LockError,
    NotProved,
    OutOfDate,
    ProfileError,
    UsageError,
    printable,
)
from envbuild.util.json_output_types import Digest, plain
from envbuild.util.untrusted_input_errors import Reason

_KINDS: dict[str, type[EnvbuildError]] = {
    "unverified": NotProved,
    "missing": BuildError,
    "stale": OutOfDate,
    "failed": CheckFailed,
    "tampered": CheckFailed,
}


@dataclass(frozen=True)
class OutdatedPins:
    """The document of `status --outdated` for one profile; for several, a row of it. `pins`: those that have newer
    versions, without libraries of which torch requires exactly this version, unless an advisory requires a newer one;
    the pin `base` is a base image whose tag has moved or is missing. `reason`: why the profile or its lock is
    invalid."""

    profile: str
    state: Literal["current", "outdated", "invalid"]
    lock: Digest | None
    reason: str | None
    pins: tuple[Outdated, ...]


@click.command("status", short_help="Show which images are verified, and why the others are not.")
@profile_argument("names", nargs=-1)
@click.option(
    "--outdated", "asks_index", is_flag=True,
    help="Ask the index which pins have newer patch releases, and which versions advisories require; ask the registry "
    "whether the tag of the base image has moved.",
)  # fmt: skip
@click.option(
    "--python",
    metavar="PATH",
    help="Show whether this interpreter or environment is verified instead; needs no engine.",
)
@json_option
def command(names: tuple[str, ...], asks_index: bool, python: str | None, as_json: bool) -> None:
    """Show whether the images of the named profiles, or of all profiles, are verified. Each line ends with the next
    command to run. The state is computed from lock, image and evidence each time. If no engine can be used, and the
    settings name a cluster with a registry, the build records replace the images of the engine, and tags are not
    checked.

    For an image in a registry, use verify; for what an environment contains, audit.

    Exit 0 verified; 4 built, not proved; 5 the self-test failed, the tag was moved by hand, or an environment's
    locked files are missing or changed; 6 not built; 8 there is no lock, the proof is for another lock or
    self-test, or files of an environment that are not locked changed since its proof. The exit code is always 0
    without a name, and 0 with --outdated, whether or not it finds newer versions.

    Example: envbuild status
    Example: envbuild status cpu
    Example: envbuild status cpu --python .venv
    """
    if python:
        if asks_index or not names:
            raise UsageError("--python is for a profile, without --outdated", hint="envbuild status NAME --python PATH")
        for_each(names, lambda name: _environment(name, python, as_json), as_json)
        return
    if asks_index:
        _outdated(names, as_json)
        return
    if not names:
        _all(as_json)
        return

    engine = functools.cache(_engine)  # asked at the first valid name, once

    def status(name: str) -> StatusDocument:
        loaded = profile_reader_and_overrides.load(name)
        found = _compute(engine(), loaded)
        if not as_json:
            click.echo(_line(found))
        if found.state == VERIFIED:
            return found.document()
        kind = OutOfDate if found.state == "missing" and found.lock is None else _KINDS[found.state]
        hint = "\n".join([*found.details, f"run: {found.next}"])
        error = kind(f"{found.name} is not verified: {found.state}", hint=hint)
        error.partial = plain(found.document())
        raise error

    for_each(names, status, as_json)


def _environment(name: str, python: str, as_json: bool) -> EnvironmentStatusDocument:
    """Return the status of an environment of this machine. Raises the error for its state unless it is verified."""
    loaded = profile_reader_and_overrides.load(name)
    plan, lock = plan_resolver.resolve(loaded), lock_file.required_lock(loaded)
    interpreter = host_runner.find_interpreter(python)
    versions, wheels = plan_resolver.computing(lock.versions), wheel_file_hashes_and_contents.wheel_hashes(lock)
    named = [f"{name}=={version}" for name, version in versions.items()]
    try:
        files = environment_file_hasher.hash_environment(interpreter)
        measured = environment_measurement.measure_environment(files, versions)
        if set(named) <= set(
            wheels
        ):  # else the files are only compared with the evidence, since the cache lacks a wheel
            environment_measurement.require_locked_files(files, versions, [wheels[name] for name in named])
    except CheckFailed as refused:
        refused.partial = plain(python_environment_status.refused_status(interpreter, refused, loaded, lock))
        raise
    found = python_environment_status.environment_status(interpreter, measured, loaded, lock, lock.stale(plan))
    if found.state != VERIFIED:
        hint = "\n".join([*(reason.detail for reason in found.reasons), f"run: {found.next_command}"])
        error = _KINDS[found.state](f"{interpreter} is not a verified environment: {found.state}", hint=hint)
        error.partial = plain(found)
        raise error
    if not as_json:
        proved = "; ".join(row.reason for row in found.evidence)
        click.echo(printable(f"{loaded.name}: verified environment: {interpreter} {found.subject} ({proved})"))
    return found


def _all(as_json: bool) -> None:
    engine = _engine()
    rows = [_row(engine, name) for name in profile_and_lock_name_lookup.profile_names()]
    if as_json:
        emit({"profiles": [document for document, _ in rows]})
        return
    for _, line in rows:
        click.echo(line)


def _engine() -> Engine | None:
    """Return the engine; None, after a note, if `make` could not use it and the settings name a cluster whose registry
    holds the images instead. Raises EngineError if no engine answers and the settings name no cluster with a registry,
    SettingsError if the settings of the cluster are invalid."""
    found: Engine | None = None
    try:
        found = Engine()
        found.require_bounds()
    except UnusableEngine as error:
        cluster = runner_selection.selected_cluster(AS_CONFIGURED, "", selftest_job.ALL)
        if cluster is None or cluster.registry is None:
            if found is None:
                raise
            return found
        note = f"note: {error.message}: the status is computed from build records and evidence, without tags"
        click.echo(printable(note), err=True)
        return None
    return found


def _compute(engine: Engine | None, loaded: LoadedProfile) -> Status:
    return image_status.compute(engine, loaded) if engine else image_status.compute_without_engine(loaded)


def _row(engine: Engine | None, name: str) -> tuple[StatusDocument, str]:
    """Return a profile's document and its line."""
    try:
        found = _compute(engine, profile_reader_and_overrides.load(name))
    except (ProfileError, LockError) as error:
        command, why = f"envbuild show {name}", (Reason("profile", error.message),)
        document = StatusDocument(name, "invalid", why, command, None, None, (), None, (), None, ())
        return document, printable(f"{name}: invalid: {error.message}; next: {command}")
    return found.document(), _line(found)


def _line(found: Status) -> str:
    """Return a line with a profile's state, the reasons or the image, and the next command."""
    why = "; ".join(found.details)
    if found.image and not why:
        why = f"{found.image.id} ({'; '.join(proof.reason for proof in found.proofs)})"
    return printable(f"{found.name}: {found.state}: {why}; next: {found.next}")


def _outdated(names: tuple[str, ...], as_json: bool) -> None:
    if len(names) == 1:
        rows = [_pins(names[0])]
    else:
        with ThreadPoolExecutor(index_config.PARALLEL) as pool:
            rows = list(pool.map(_pins_or_fault, names or profile_and_lock_name_lookup.profile_names()))
    if as_json:
        emit(rows[0] if len(names) == 1 else {"profiles": rows})
        return
    cells = [cell for row in rows for cell in _lines(row)]
    for line in table([("PROFILE", "PIN", "LOCKED", "PATCH", "ADVISORIES"), *cells]) if cells else ():
        click.echo(line)
    moved = sum(bool(row.pins) for row in rows)
    click.echo(f"{moved} of {len(rows)} profiles have pins with newer versions")


def _pins(name: str) -> OutdatedPins:
    loaded = profile_reader_and_overrides.load(name)
    locked = lock_file.required_lock(loaded)
    found = tuple(outdated_pins.find_outdated(plan_resolver.resolve(loaded), locked))
    return OutdatedPins(loaded.name, "outdated" if found else "current", locked.id, None, found)


def _pins_or_fault(name: str) -> OutdatedPins:
    try:
        return _pins(name)
    except (ProfileError, LockError, OutOfDate) as error:
        return OutdatedPins(name, "invalid", None, error.message, ())


def _lines(row: OutdatedPins) -> Iterator[tuple[str, ...]]:
    if row.reason:
        yield row.profile, "invalid", "", "", row.reason
    for pin in row.pins:
        requirements = (f"{item.id} ({item.state}) requires {item.version}" for item in pin.advisories)
        yield row.profile, pin.name, pin.version, pin.newest or "-", "; ".join(requirements)
