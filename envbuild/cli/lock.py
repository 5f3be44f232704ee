from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import click

from envbuild.cli.command_options import (
    accept_old_option,
    json_option,
    pin_option,
    profile_argument,
    requirements_option,
    torch_index_option,
)
from envbuild.cli.console import emit
from envbuild.facts import database
from envbuild.image import container_definition_export
from envbuild.lock import lock_changes, lock_file
from envbuild.lock.lock_changes import LockChange
from envbuild.lock.lock_file import Lock
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.resolve.plan_resolver import Plan
from envbuild.util import host_processes
from envbuild.util.atomic_files import holds_text, write_within
from envbuild.util.errors import EnvbuildError, Fault, LockError, OutOfDate, ProfileError, UsageError, printable, some
from envbuild.util.json_output_types import Digest
from envbuild.util.yaml_and_project_paths import display

PARALLEL = 16  # most of the time is spent waiting for uv, apt and an index


@dataclass(frozen=True)
class LockRow:
    """The lock of one profile. `lock_file`, `dockerfile`: the paths of the files. `changes`: the differences from the
    previous lock; empty for a new lock. `wheels`, `debian_packages`: their numbers. `why`: the name of a pin or a
    variable -> the reason that the profile gives for it; the lock does not contain these reasons."""

    profile: str
    state: Literal["current", "new", "changed"]
    lock: Digest
    lock_file: str
    lock_written: bool
    dockerfile: str
    dockerfile_written: bool
    changes: tuple[LockChange, ...]
    wheels: int
    debian_packages: int
    why: Mapping[str, str]


@dataclass(frozen=True)
class LockResult:
    """The document of `lock`."""

    profiles: tuple[LockRow, ...]
    notes: tuple[str, ...]


class _Wanted(NamedTuple):
    loaded: LoadedProfile
    plan: Plan
    before: Lock | None


@click.command("lock", short_help="Pin every file by version and hash; --check compares.")
@profile_argument("names", nargs=-1)
@click.option(
    "--check", is_flag=True,
    help="Only check, offline: exit 8 if a lock does not match its profile, or a Dockerfile does not match its lock.",
)  # fmt: skip
@click.option(
    "--upgrade", "upgrades", multiple=True, is_flag=False, flag_value=lock_file.EVERYTHING,
    metavar="[NAME]",
    help="Update this package to the newest version that fits (may be repeated); 'base': the Debian packages, or "
    "the base image to which the profile's tag points now; without NAME: everything.",
)  # fmt: skip
@requirements_option
@pin_option
@click.option(
    "--write",
    is_flag=True,
    help="With --pin: write the lock and Dockerfile with this pin. Without --write, they are only computed.",
)
@accept_old_option
@torch_index_option
@json_option
def command(
    names: tuple[str, ...],
    check: bool,
    upgrades: tuple[str, ...],
    requirements: Path | None,
    pins: dict[str, str],
    write: bool,
    accept_old: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the lock and the Dockerfile of each profile, and build nothing. Without NAME, those of all profiles of this
    folder are written. A locked version changes only if it must. NAME is the name of a profile or of a GPU, or a path
    to a YAML file.

    Example: envbuild lock h20
    Example: envbuild lock cpu --upgrade numpy
    Example: envbuild lock --check
    """
    if check and upgrades:
        raise UsageError("--check and --upgrade exclude each other")
    if requirements and not names:
        raise UsageError("--requirements needs the name of a profile", hint="envbuild lock NAME --requirements FILE")
    load = partial(_load, pins=pins, requirements=requirements)
    every = names or profile_and_lock_name_lookup.own_names()
    notes: list[str] = []
    wanted: list[_Wanted] = []
    if check:
        found = _checked(every, load)
    else:
        wanted = list(map(load, every))
        found, notes = _locked(wanted, frozenset(upgrades), frozenset(accept_old), keep=write or not pins)
    if as_json:
        emit(LockResult(tuple(found), tuple(notes)))
        return
    for note in notes:
        click.echo(printable(f"note: {note}"), err=True)
    for row in found:
        state = "fits" if check else "" if row.changes or row.state == "new" else "(unchanged)"
        click.echo(f"{row.profile}: {row.lock} {state}".rstrip())
        if row.state == "new":
            click.echo(f"  {some(row.wheels, 'wheel')}, {some(row.debian_packages, 'Debian package')}")
        for change in row.changes:
            reason = row.why.get(database.library_of(change.name) or change.name)
            click.echo(f"  {change}{f': {reason}' if reason else ''}")
        for file, written in ((row.lock_file, row.lock_written), (row.dockerfile, row.dockerfile_written)):
            if written:
                click.echo(f"  wrote {file}")
    if pins and not write and not check:
        click.echo("nothing was written; next: the same command with --write", err=True)
    elif not check:
        changed = [one.loaded.known for one, row in zip(wanted, found, strict=True) if row.lock_written]
        same = [one.loaded.known for one in wanted] if names else []
        click.echo(f"next: envbuild {' '.join(['make', *changed] if changed else ['status', *same])}", err=True)


def _load(name: str, pins: dict[str, str], requirements: Path | None) -> _Wanted:
    loaded = profile_reader_and_overrides.load(name, pins, requirements)
    return _Wanted(loaded, plan_resolver.resolve(loaded), lock_file.read(loaded.known_lock))


def _checked(names: Iterable[str], load: Callable[[str], _Wanted]) -> list[LockRow]:
    """Return one row per profile, if every lock matches its profile and every Dockerfile its lock.

    Raises ProfileError with the errors of every invalid profile and lock, else OutOfDate with those that do not match.
    """
    found: list[LockRow] = []
    stale: list[OutOfDate] = []
    plain: list[str] = []  # the words that name the profiles to lock again, without and with options
    others: list[str] = []
    refused: list[EnvbuildError] = []
    for name in names:
        try:
            loaded, plan, before = load(name)
        except (ProfileError, LockError) as error:
            refused.append(error)
            continue
        try:
            locked = lock_file.current(before, plan, loaded.lock_file)
            _require_dockerfile(loaded, locked)
            found.append(_row(loaded, locked, locked))
        except OutOfDate as error:
            stale.append(error)
            (others if " " in plan.cli_words else plain).append(plan.cli_words)
    old = [Fault(error.message) for error in stale]
    if refused:
        faults = [fault for error in refused for fault in error.faults or [Fault(error.message)]]
        count = len(refused) + len(stale) + len(found)
        raise ProfileError(
            f"invalid: {len(refused)} of {some(count, 'profile')}" + (f"; out of date: {len(stale)}" if stale else ""),
            hint=(count == 1 and refused[0].hint) or f"correct the errors{'; then envbuild lock' if stale else ''}",
            faults=[*faults, *old],
        )
    if stale:
        raise OutOfDate(
            f"out of date: {len(stale)} of {some(len(stale) + len(found), 'profile')}",
            hint="\n".join(f"run: envbuild lock {words}" for words in [" ".join(plain), *others] if words),
            faults=old,
        )
    return found


def _require_dockerfile(loaded: LoadedProfile, locked: Lock) -> None:
    """Raise OutOfDate unless the Dockerfile is the one that is rendered from the lock. The Dockerfile may be missing if
    the folder has no lock either, as for a shipped profile."""
    file = loaded.dockerfile
    if not file.exists() and not loaded.lock_file.exists():
        return
    if not holds_text(file, container_definition_export.standalone_dockerfile(locked, loaded.name)):
        state = "does not match the lock" if file.exists() else "is missing"
        raise OutOfDate(f"{display(file)} {state}", hint=f"run: envbuild lock {loaded.known}")


def _locked(
    wanted: Sequence[_Wanted], upgrades: frozenset[str], accept_old: frozenset[str], keep: bool
) -> tuple[list[LockRow], list[str]]:
    """Make the locks. Return one row per profile, and notes about the locks. `keep`: write changed locks and
    Dockerfiles."""
    found: list[LockRow] = []
    notes = profile_reader_and_overrides.ignored_uv_settings(one.loaded for one in wanted)
    notes += [f"{one.loaded.name}: {note}" for one in wanted for note in one.loaded.notes]
    for (loaded, _, before), made in zip(wanted, _made(wanted, upgrades, accept_old, notes), strict=True):
        after = made
        if made is not before and made.compiled:
            from envbuild.image import extension_wheel_build  # imports the engine's client; only for extensions

            after = extension_wheel_build.with_current_records(made)
        changes = list(lock_changes.lock_changes(before, after)) if before and after is not before else []
        here = loaded.lock_file.exists()  # a shipped profile's lock is written into the working folder
        written = keep and (after is not before or not here)
        if written:
            lock_file.write(after, loaded.lock_file, loaded.name, loaded.origin)
        text = container_definition_export.standalone_dockerfile(after, loaded.name)
        rendered = keep and not holds_text(loaded.dockerfile, text)
        if rendered:
            write_within(loaded.project, loaded.dockerfile, text)
        found.append(_row(loaded, after, before, changes, written, rendered))
    return found, notes


def _made(
    wanted: Sequence[_Wanted], upgrade: frozenset[str], accept_old: frozenset[str], notes: list[str]
) -> Iterator[Lock]:
    """Compute the locks, several at a time, and yield them in the order of `wanted`. The first error stops the others.
    Notes about each lock are added to `notes`."""
    from envbuild.lock import lock_creation_and_update  # imports the clients of indexes; not for --check

    def made(one: _Wanted) -> Lock:
        def say(text: str) -> None:
            notes.append(f"{one.loaded.name}: {text}")

        similar = lock_file.similar_lock(one.loaded) if one.before is None else None
        return lock_creation_and_update.update_lock(
            one.plan, one.before, upgrade, accept_old=accept_old, say=say, similar=similar[1] if similar else None
        )

    try:
        with ThreadPoolExecutor(PARALLEL) as pool:
            try:
                yield from pool.map(made, wanted)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                host_processes.stop_all()
                raise
    finally:
        host_processes.stop_all.lift()


def _row(
    loaded: LoadedProfile,
    made: Lock,
    before: Lock | None,
    changes: Sequence[LockChange] = (),
    written: bool = False,
    rendered: bool = False,
) -> LockRow:
    return LockRow(
        profile=loaded.name,
        state="new" if before is None else "current" if made is before else "changed",
        lock=made.id,
        lock_file=display(loaded.known_lock),
        lock_written=written,
        dockerfile=display(loaded.dockerfile),
        dockerfile_written=rendered,
        changes=tuple(changes),
        wheels=len(made.wheels),
        debian_packages=len(made.base) + len(made.apt),
        why=loaded.profile.why,
    )
