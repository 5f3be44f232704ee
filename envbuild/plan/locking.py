"""Making a lock: only the parts whose wishes changed are looked up again, and in those what still fits is kept."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuild.errors import ProfileError, UsageError, near, some
from envbuild.once import once
from envbuild.plan import archives, debs, lock, tooling, wheels
from envbuild.plan.archive import Archive
from envbuild.plan.debs import Deb
from envbuild.plan.lock import PACKAGES, SMALL, TOOLCHAIN, Lock
from envbuild.plan.locked import LockedWheel, Nvcc, Overridden
from envbuild.plan.resolve import Plan, as_locked
from envbuild.plan.wheels import Resolved

# A wheel of this size has a layer of its own: a change of it alone is then all that a pull fetches again.
OWN_LAYER_BYTES = 20_000_000
EVERYTHING = "*"
# Locks are made several at a time; sources of extensions, and archives, are fetched one after the other.
_SOURCES = threading.Lock()
BASE = "base"


def make(
    plan: Plan,
    previous: Lock | None,
    upgrade: frozenset[str] = frozenset(),
    progress: Callable[[str, int], None] = lambda name, count: None,
) -> Lock:
    """The lock for `plan`, as near to `previous` as it can be.

    `upgrade` names packages that may move to the newest version that fits; EVERYTHING all, BASE the Debian packages.
    An archive is fetched to be locked: `progress` is told its name and the bytes that came.

    Raises ProfileError for what does not exist or an advisory refuses, NetworkError where an index or mirror does not
    answer, HashMismatch for an archive that is another.
    """
    _refuse_unknown(upgrade, previous)
    everything = EVERYTHING in upgrade
    stale = frozenset(lock.PARTS if previous is None or everything else previous.stale(plan))
    try:
        with ThreadPoolExecutor(1) as beside:
            choosing = beside.submit(_locked_wheels, plan, previous, stale, upgrade)
            base, apt = _debs(plan, previous, stale, everything or BASE in upgrade)
            locked = choosing.result()
    except ProfileError as error:
        said = f"{error.message} {error.hint}"
        raise ProfileError(error.message, hint=error.hint, faults=plan.faults(said)) from None
    as_locked(plan, {item.wheel.name: item.wheel.version for item in locked})
    there = (*base, *apt)
    debian = plan.workshop is not None and plan.workshop.toolchain.debian is not None
    again = stale | {"extensions"} if debian and BASE in upgrade else stale
    with _SOURCES:
        extensions, builder = tooling.lock(plan, None if everything else previous, again, locked, there, progress)
    made = Lock(
        made=_made(previous, base, (*apt, *(builder.debs if builder else ()))),
        inputs=lock.inputs(plan),
        platform=plan.platform,
        python=plan.python,
        suite=plan.suite,
        image=plan.image,
        base=base,
        apt=apt,
        wheels=locked,
        overrides=tuple(Overridden(o.distribution, o.version, o.torch_asks) for o in plan.choice.overrides),
        archives=_archives(plan, previous, stale, progress),
        nvcc=Nvcc(plan.toolchain.home, plan.toolchain.release) if plan.toolchain else None,
        environment=plan.environment,
        extensions=extensions,
        builder=builder,
    )
    return previous if previous is not None and (made.id, made.inputs) == (previous.id, previous.inputs) else made


def _archives(
    plan: Plan, previous: Lock | None, stale: frozenset[str], progress: Callable[[str, int], None]
) -> tuple[Archive, ...]:
    if previous is not None and "archives" not in stale:
        return previous.archives
    with _SOURCES:
        return tuple(archives.take(wanted, progress) for wanted in plan.archives)


def _made(previous: Lock | None, base: tuple[Deb, ...], more: tuple[Deb, ...]) -> str:
    """When the Debian packages were locked: the moment that a snapshot archive is asked for."""
    before = previous.debs if previous is not None else ()
    if previous is not None and base == previous.base and set(more) <= set(before):
        return previous.made
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")


def _locked_wheels(
    plan: Plan, previous: Lock | None, stale: frozenset[str], upgrade: frozenset[str]
) -> tuple[LockedWheel, ...]:
    moved = {canonicalize_name(name) for name in upgrade - {BASE, EVERYTHING}}
    everything = EVERYTHING in upgrade
    if previous is not None and "wheels" not in stale and not moved and not everything:
        return previous.wheels
    kept = {} if everything or previous is None else previous.versions
    return _wheels(plan, {name: version for name, version in kept.items() if name not in moved})


def _refuse_unknown(upgrade: Iterable[str], previous: Lock | None) -> None:
    known = {BASE, EVERYTHING, *(previous.versions if previous else ())}
    unknown = sorted(name for name in upgrade if canonicalize_name(name) not in known and name != EVERYTHING)
    if unknown and previous is not None:
        hint = near(unknown[0], known - {EVERYTHING}) or "a new package belongs into the profile, under packages"
        raise UsageError(f"not in the lock, so nothing to upgrade: {', '.join(unknown)}", hint=hint)


def _debs(
    plan: Plan, previous: Lock | None, stale: frozenset[str], upgrade: bool
) -> tuple[tuple[Deb, ...], tuple[Deb, ...]]:
    """Packages of the base, and those of the late layer."""
    if plan.suite is None:
        return (), ()
    if previous is None or upgrade or "base" in stale:
        base = tuple(debs.resolve(plan.suite, plan.base_packages))
        return base, _late(plan, base, ())
    if "apt" not in stale:
        return previous.base, previous.apt
    try:
        return previous.base, _late(plan, previous.base, previous.apt)
    except ProfileError:
        # the mirror has moved on, so the base is locked again too; if a wanted package is missing, this says so
        base = tuple(debs.resolve(plan.suite, plan.base_packages))
        return base, _late(plan, base, ())


def _late(plan: Plan, base: Sequence[Deb], kept: Sequence[Deb]) -> tuple[Deb, ...]:
    """What `apt:` asks for beyond the base; of `kept`, what is still wanted stays as it is, where the mirror has it."""
    assert plan.suite is not None
    if not plan.apt:
        return ()
    wanted = debs.beyond(debs.resolve(plan.suite, plan.apt, keep=base), base)
    before = {deb.name: deb for deb in kept}
    same = [before[deb.name] for deb in wanted if deb.name in before]
    if not same:
        return wanted
    try:
        return debs.beyond(debs.resolve(plan.suite, plan.apt, keep=[*base, *same]), base)
    except ProfileError:
        return wanted


@dataclass(frozen=True)
class _Wishes:
    """All that decides which wheels are chosen; many profiles have the same. `keep`: (name, version)."""

    core: tuple[str, ...]
    packages: tuple[str, ...]
    tools: tuple[str, ...]
    python: str
    glibc: str
    constraints: tuple[str, ...]
    overrides: tuple[str, ...]
    overridden: frozenset[str]
    keep: frozenset[tuple[str, str]]


def _wheels(plan: Plan, keep: dict[str, str]) -> tuple[LockedWheel, ...]:
    tools = tuple(plan.toolchain.requirements) if plan.toolchain else ()
    overridden = frozenset(override.distribution for override in plan.choice.overrides)
    return _chosen(
        _Wishes(
            plan.core, plan.packages, tools, plan.python, plan.glibc, plan.constraints, plan.overrides, overridden,
            frozenset(keep.items()),
        )
    )  # fmt: skip


@once
def _chosen(wishes: _Wishes) -> tuple[LockedWheel, ...]:
    keep, overridden = dict(sorted(wishes.keep)), wishes.overridden

    def resolved_with(requirements: Iterable[str], keep: dict[str, str]) -> Resolved:
        wanted = [*wishes.core, *wishes.packages, *requirements]
        return wheels.resolve(wanted, wishes.python, wishes.glibc, keep, wishes.constraints, wishes.overrides)

    resolved = resolved_with((), keep)
    # What torch needs is shared by every profile with that torch; what the user added comes after it.
    core = resolved.closure(Requirement(wish).name for wish in wishes.core)
    kinds = {name: SMALL if name in core else PACKAGES for name in resolved.versions}
    if wishes.tools:
        # a second time, so that the wheels of a runtime image stay as they are, in layers of their own
        resolved = resolved_with(wishes.tools, {**keep, **resolved.versions})
    located = wheels.locate(resolved.versions, wishes.python, wishes.glibc)
    locked = [
        LockedWheel(wheel, size, _layer(wheel.name, kinds.get(wheel.name, TOOLCHAIN), size, wheel.name in overridden))
        for wheel, size in wheels.sizes(located).items()
    ]
    late = {item.layer for item in locked if item.wheel.name not in kinds}
    order = {name: index for index, name in enumerate(_order(locked, overridden, late))}
    return tuple(sorted(locked, key=lambda item: (order[item.layer], item.wheel.name)))


def _layer(name: str, kind: str, size: int, overridden: bool = False) -> str:
    """The layer of a wheel: its own if it is large or overridden, else one shared with the small ones of its kind."""
    if name == "torch" or overridden or size >= OWN_LAYER_BYTES:
        return name.replace("_", "-")
    return kind


def _order(locked: Sequence[LockedWheel], overridden: Collection[str] = (), late: Collection[str] = ()) -> list[str]:
    """Layers from shared and stable to this profile's own: small, libraries, torch, nvcc's (`late`), overrides, the
    user's."""
    names = {item.layer for item in locked}
    last = [name for name in ("torch", "triton", *sorted(late), *sorted(overridden), PACKAGES) if name in names]
    first = [SMALL] if SMALL in names else []
    return [*first, *sorted(names - {*first, *last}), *last]


def differences(before: Lock | None, after: Lock) -> Iterator[str]:
    """What moved, a line each: `numpy 2.4.5 -> 2.4.6`."""
    if before is None:
        yield f"{some(len(after.wheels), 'wheel')}, {some(len(after.base) + len(after.apt), 'Debian package')}"
        return
    yield from _moves(before.versions, after.versions)
    yield from _moves(_versions(before), _versions(after))
    yield from _moves(_contents(before), _contents(after))
    for title, old, new in (("base image", before.image, after.image), ("python", before.python, after.python)):
        if old != new:
            yield f"{title} {old} -> {new}"
    if before.environment != after.environment:
        yield "environment"


def _versions(locked: Lock) -> dict[str, str]:
    return {deb.name: deb.version for deb in (*locked.base, *locked.apt)}


def _contents(locked: Lock) -> dict[str, str]:
    """What is known by its hash; and, for extensions, by all that is compiled in and with."""
    found = {archive.name: f"{archive.version} ({archive.sha256[:12]})" for archive in locked.archives}
    for one in locked.extensions:
        assert locked.builder
        made = lock.canonical_digest([one.content, locked.builder.content])
        found[one.name] = f"{one.digest[:12]} for {locked.builder.arch} ({made[:8]})"
    return found


def _moves(old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield f"{name} {old.get(name, '(new)')} -> {new.get(name, '(gone)')}"
