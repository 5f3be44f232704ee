"""Creates or updates a lock: resolves only the parts whose inputs changed, and keeps versions that still fit."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuild.facts import database
from envbuild.fetch import (
    apt_resolution_and_download,
    archive_fetcher,
    index_config,
    index_pages,
    newest_release_lag,
    wheel_resolution_and_download,
)
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import Archive
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.fetch.newest_release_lag import Lag
from envbuild.fetch.wheel_resolution_and_download import Resolved
from envbuild.lock import (
    base_image_tag_lookup,
    extension_and_compiler_locking,
    lock_file,
    missing_wheel_remedies,
    wheel_conflicts,
)
from envbuild.lock.lock_entry_types import AcceptedOld, Nvcc, Overridden
from envbuild.lock.lock_file import EVERYTHING, PACKAGES, SMALL, TOOLCHAIN, Lock
from envbuild.resolve.plan_resolver import Plan, as_locked
from envbuild.util.errors import ProfileError, UsageError, near
from envbuild.util.thread_safe_cache import thread_safe_cache

# A wheel with at least so many bytes gets its own layer: if only that wheel changes, a pull downloads only its layer.
OWN_LAYER_BYTES = 20_000_000
# Several locks are made in parallel, but sources of extensions and archives are downloaded one after the other.
_SOURCES = threading.Lock()
BASE = "base"


def update_lock(
    plan: Plan,
    previous: Lock | None,
    upgrade: frozenset[str] = frozenset(),
    progress: Callable[[str, int], None] = lambda name, count: None,
    accept_old: frozenset[str] = frozenset(),
    say: Callable[[str], None] = lambda text: None,
    similar: Lock | None = None,
) -> Lock:
    """The lock for `plan`, with as few changes to `previous` as possible.

    `upgrade` names packages that may move to the newest version that fits; EVERYTHING means all parts of the lock.
    BASE means the Debian packages or, on a base image that the profile names by tag, the image to which the tag points
    now. Archives are downloaded to be locked: `progress` gets the name and the number of new bytes. `accept_old` names
    packages that may be far behind their newest release, EVERYTHING means all. `say` gets a sentence for each package
    that is far behind its newest release, or whose newest release has no usable wheel. Sources of extensions that
    `similar`, the lock of a similar profile, has for the same inputs are not downloaded. The result has all records of
    compiled wheels that `previous` has, whether they match the new lock or not.

    Raises UsageError if `upgrade` names a package that is not in the lock. Raises ProfileError for missing versions, a
    missing tag of the base image, versions refused by an advisory, and versions that are far behind their newest
    release without being accepted. Raises NetworkError if an index, mirror or registry does not answer, and
    HashMismatch for an archive with a different sha256.
    """
    _refuse_unknown(upgrade, previous)
    everything = EVERYTHING in upgrade
    stale = frozenset(lock_file.PARTS if previous is None or everything else previous.stale(plan))
    try:
        with ThreadPoolExecutor(1) as pool:
            choosing = pool.submit(_locked_wheels, plan, previous, stale, upgrade, accept_old)
            base, apt = _debs(plan, previous, stale, everything or BASE in upgrade)
            image, image_tag = _base_image(plan, previous, stale, everything or BASE in upgrade)
            chosen = choosing.result()
    except ProfileError as error:
        message = f"{error.message} {error.hint}"
        without_wheel = error.names if isinstance(error, wheel_resolution_and_download.OnlyPreReleases) else ()
        remedies = missing_wheel_remedies.remedies(plan, message, without_wheel)
        hint = "\n".join(filter(None, [error.hint, remedies, *plan.notes]))
        raise ProfileError(error.message, hint=hint or None, faults=[*plan.faults(message), *error.faults]) from None
    locked = chosen.wheels
    for note in chosen.notes:
        say(note)
    as_locked(plan, {item.wheel.name: item.wheel.version for item in locked})
    there = (*base, *apt)
    debian = plan.extension_toolchain is not None and plan.extension_toolchain.toolchain.debian is not None
    again = stale | {"extensions"} if debian and BASE in upgrade else stale
    with _SOURCES:
        extensions, builder = extension_and_compiler_locking.lock(
            plan, None if everything else previous, again, locked, there, progress, similar
        )
    made = Lock(
        made=_made(previous, base, (*apt, *(builder.debs if builder else ()))),
        inputs=lock_file.inputs(plan),
        platform=plan.platform,
        python=plan.python,
        suite=plan.suite,
        image=image,
        image_tag=image_tag,
        base=base,
        apt=apt,
        wheels=locked,
        overrides=tuple(Overridden(o.distribution, o.version, o.torch_asks) for o in plan.choice.overrides),
        startup=plan.startup,
        archives=_archives(plan, previous, stale, progress),
        nvcc=Nvcc(plan.toolchain.home, plan.toolchain.release) if plan.toolchain else None,
        environment=plan.environment,
        extensions=extensions,
        builder=builder,
        accepted_old=chosen.accepted_old,
        compiled=previous.compiled if previous else (),
    )
    return previous if previous is not None and (made.id, made.inputs) == (previous.id, previous.inputs) else made


def _archives(
    plan: Plan, previous: Lock | None, stale: frozenset[str], progress: Callable[[str, int], None]
) -> tuple[Archive, ...]:
    if previous is not None and "archives" not in stale:
        return previous.archives
    with _SOURCES:
        return tuple(archive_fetcher.inspect_archive(wanted, progress) for wanted in plan.archives)


def _made(previous: Lock | None, base: tuple[Deb, ...], more: tuple[Deb, ...]) -> str:
    """The time at which the Debian packages were locked; it selects a date in a snapshot archive."""
    before = previous.debs if previous is not None else ()
    if previous is not None and base == previous.base and set(more) <= set(before):
        return previous.made
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")


@dataclass(frozen=True)
class _Chosen:
    """The chosen wheels. `notes`: a sentence for each package that is far behind its newest release, or whose newest
    release has no usable wheel."""

    wheels: tuple[LockedWheel, ...]
    notes: tuple[str, ...] = ()
    accepted_old: tuple[AcceptedOld, ...] = ()


def _locked_wheels(
    plan: Plan, previous: Lock | None, stale: frozenset[str], upgrade: frozenset[str], accept_old: frozenset[str]
) -> _Chosen:
    moved = {canonicalize_name(name) for name in upgrade - {BASE, EVERYTHING}}
    everything = EVERYTHING in upgrade
    accepted = previous.accepted_old if previous is not None else ()
    if previous is not None and "wheels" not in stale and not moved and not everything:
        return _Chosen(previous.wheels, (), accepted)
    kept = {} if everything or previous is None else previous.versions
    old = {name if name == EVERYTHING else str(canonicalize_name(name)) for name in accept_old}
    old |= {item.name for item in accepted}
    chosen = _wheels(plan, {name: version for name, version in kept.items() if name not in moved}, frozenset(old))
    versions = {item.wheel.name: item.wheel.version for item in chosen.wheels}
    found = {item.name: item for item in accepted if versions.get(item.name) == item.version}
    found |= {item.name: item for item in chosen.accepted_old}
    return replace(chosen, accepted_old=tuple(found[name] for name in sorted(found)))


def _refuse_unknown(upgrade: Iterable[str], previous: Lock | None) -> None:
    known = {BASE, EVERYTHING, *(previous.versions if previous else ())}
    unknown = sorted(name for name in upgrade if canonicalize_name(name) not in known and name != EVERYTHING)
    if unknown and previous is not None:
        hint = near(unknown[0], known - {EVERYTHING}) or "add a new package to the profile, under packages"
        raise UsageError(f"nothing to upgrade, not in the lock: {', '.join(unknown)}", hint=hint)


def _debs(
    plan: Plan, previous: Lock | None, stale: frozenset[str], upgrade: bool
) -> tuple[tuple[Deb, ...], tuple[Deb, ...]]:
    """The Debian packages of the base, and those of the late layer, which `apt:` in the profile requests."""
    if plan.suite is None:
        return (), ()
    if previous is None or upgrade or "base" in stale:
        base = tuple(apt_resolution_and_download.resolve_debs(plan.suite, plan.base_packages))
        return base, _late(plan, base, ())
    if "apt" not in stale:
        return previous.base, previous.apt
    try:
        return previous.base, _late(plan, previous.base, previous.apt)
    except ProfileError:
        # the mirror has newer versions, so lock the base again too; this raises if a requested package is missing
        base = tuple(apt_resolution_and_download.resolve_debs(plan.suite, plan.base_packages))
        return base, _late(plan, base, ())


def _base_image(
    plan: Plan, previous: Lock | None, stale: frozenset[str], upgrade: bool
) -> tuple[str | None, str | None]:
    """The base image by digest, and its tag if the profile names one."""
    if plan.image is None or "@" in plan.image:
        return plan.image, None
    if previous is None or upgrade or "base" in stale:
        return base_image_tag_lookup.image_of_tag(plan.image), plan.image
    return previous.image, previous.image_tag


def _late(plan: Plan, base: Sequence[Deb], kept: Sequence[Deb]) -> tuple[Deb, ...]:
    """The packages for `apt:` that the base lacks. Those in `kept` keep their versions if apt can still install all of
    these versions; otherwise every package gets the mirror's version."""
    assert plan.suite is not None
    if not plan.apt:
        return ()
    wanted = apt_resolution_and_download.beyond(
        apt_resolution_and_download.resolve_debs(plan.suite, plan.apt, keep=base), base
    )
    before = {deb.name: deb for deb in kept}
    same = [before[deb.name] for deb in wanted if deb.name in before]
    if not same:
        return wanted
    try:
        return apt_resolution_and_download.beyond(
            apt_resolution_and_download.resolve_debs(plan.suite, plan.apt, keep=[*base, *same]), base
        )
    except ProfileError:
        return wanted


@dataclass(frozen=True)
class _ResolverInputs:
    """All inputs that determine which wheels are locked. Profiles with the same inputs share one resolution. `keep`:
    locked versions to keep if they fit, as (name, version)."""

    core: tuple[str, ...]
    packages: tuple[str, ...]
    tools: tuple[str, ...]
    python: str
    glibc: str
    constraints: tuple[str, ...]
    overrides: tuple[str, ...]
    overridden: frozenset[str]
    keep: frozenset[tuple[str, str]]
    accept_old: frozenset[str]


def _wheels(plan: Plan, keep: dict[str, str], accept_old: frozenset[str]) -> _Chosen:
    tools = tuple(plan.toolchain.requirements) if plan.toolchain else ()
    overridden = frozenset(override.distribution for override in plan.choice.overrides)
    return _chosen(
        _ResolverInputs(
            plan.core, plan.packages, tools, plan.python, plan.glibc, plan.constraints, plan.overrides, overridden,
            frozenset(keep.items()), accept_old,
        )
    )  # fmt: skip


@thread_safe_cache
def _chosen(inputs: _ResolverInputs) -> _Chosen:
    keep, overridden = dict(sorted(inputs.keep)), inputs.overridden

    def resolved_with(requirements: Iterable[str], keep: dict[str, str]) -> Resolved:
        wanted = [*inputs.core, *inputs.packages, *requirements]
        return wheel_resolution_and_download.resolve_wheels(
            wanted, inputs.python, inputs.glibc, keep, inputs.constraints, inputs.overrides
        )

    resolved = resolved_with((), keep)
    notes, accepted_old = _judged(inputs, resolved.versions)
    # torch's dependencies are shared by every profile with that torch; the user's packages come after them.
    core = resolved.closure(Requirement(text).name for text in inputs.core)
    kinds = {name: SMALL if name in core else PACKAGES for name in resolved.versions}
    if inputs.tools:
        # resolve a second time, so that the runtime image's wheels keep their versions and layers
        resolved = resolved_with(inputs.tools, {**keep, **resolved.versions})
    located = wheel_resolution_and_download.locate(resolved.versions, inputs.python, inputs.glibc, just_resolved=True)
    locked = [
        LockedWheel(wheel, size, _layer(wheel.name, kinds.get(wheel.name, TOOLCHAIN), size, wheel.name in overridden))
        for wheel, size in wheel_conflicts.check_offered(located, resolved.wanted_by).items()
    ]
    late = {item.layer for item in locked if item.wheel.name not in kinds}
    order = {name: index for index, name in enumerate(_order(locked, overridden, late))}
    wheels_in_order = tuple(sorted(locked, key=lambda item: (order[item.layer], item.wheel.name)))
    return _Chosen(wheels_in_order, notes, accepted_old)


def _judged(inputs: _ResolverInputs, versions: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[AcceptedOld, ...]]:
    """Judge how far the packages that the profile or its requirements file names without a pin are behind their newest
    releases. Not judged are packages that keep their locked version, and those whose version torch requires. Return
    notes, and the versions accepted as old.

    Raises ProfileError for versions that are far behind and not accepted.
    """
    keep, given = dict(inputs.keep), (*inputs.core, *inputs.packages, *inputs.constraints, *inputs.overrides)
    named = {str(canonicalize_name(Requirement(text).name)) for text in inputs.packages}
    wanted = {
        name: newest_release_lag.specifier(name, given, inputs.python) for name in sorted(named & versions.keys())
    }
    release = database.torch_release(versions.get("torch", ""))
    by_torch = release.requirements.keys() if release else set()
    free = [
        name
        for name in sorted(wanted.keys() - by_torch)
        if not newest_release_lag.is_pinned(wanted[name]) and versions[name] != keep.get(name)
    ]
    supported = wheel_resolution_and_download.tags(inputs.python, inputs.glibc)
    with ThreadPoolExecutor(index_config.PARALLEL) as pool:
        known = [
            newest_release_lag.matching_releases(files, inputs.python, supported)
            for files in pool.map(index_pages.listed_files, free)
        ]
    judged = (
        newest_release_lag.lag(name, versions[name], wanted[name], r) for name, r in zip(free, known, strict=True)
    )
    lags = [found for found in judged if found]
    target = wheel_resolution_and_download.target(inputs.python, inputs.glibc)
    far = [found for found in lags if found.refused]
    refused = [found for found in far if not {found.name, EVERYTHING} & inputs.accept_old]
    if refused:
        raise newest_release_lag.refusal(refused, target, dict(_contradictions(inputs, refused)))
    accepted = tuple(AcceptedOld(found.name, found.chosen, found.newest) for found in far)
    return tuple(newest_release_lag.lag_note(found, target) for found in lags), accepted


def _contradictions(inputs: _ResolverInputs, lags: Iterable[Lag]) -> Iterator[tuple[str, str]]:
    for found in lags:
        if found.reason == "incompatible":
            wanted = [*inputs.core, *inputs.packages, f"{found.name}=={found.rival}"]
            why = wheel_resolution_and_download.contradiction(
                wanted, inputs.python, inputs.glibc, inputs.constraints, inputs.overrides
            )
            if why:
                yield f"{found.name} {found.rival}", why


def _layer(name: str, kind: str, size: int, overridden: bool = False) -> str:
    """The layer of a wheel: its own if it is large or overridden, otherwise shared with small wheels of its kind."""
    if name == "torch" or overridden or size >= OWN_LAYER_BYTES:
        return name.replace("_", "-")
    return kind


def _order(locked: Sequence[LockedWheel], overridden: Collection[str] = (), late: Collection[str] = ()) -> list[str]:
    """The order of layers, from those that profiles share and rarely change to profile-specific ones: small wheels,
    libraries, torch, nvcc (`late`), overrides, the user's packages."""
    names = {item.layer for item in locked}
    last = [name for name in ("torch", "triton", *sorted(late), *sorted(overridden), PACKAGES) if name in names]
    first = [SMALL] if SMALL in names else []
    return [*first, *sorted(names - {*first, *last}), *last]
