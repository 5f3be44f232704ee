"""Locks extensions: inspects their sources, and locks the tools for compiling them that the image does not contain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuild.fetch import apt_resolution_and_download, archive_fetcher, wheel_resolution_and_download
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.lock import extension_source_fetcher
from envbuild.lock.lock_entry_types import Builder, LockedExtension, Nvcc
from envbuild.lock.lock_file import BUILDER, PACKAGES, Lock
from envbuild.resolve.extension_toolchain_and_contradictions import ExtensionToolchain
from envbuild.resolve.plan_resolver import Plan
from envbuild.util.errors import Fault, ProfileError


def lock(
    plan: Plan,
    previous: Lock | None,
    stale: frozenset[str],
    locked: tuple[LockedWheel, ...],
    image_debs: tuple[Deb, ...],
    progress: Callable[[str, int], None],
    similar: Lock | None = None,
) -> tuple[tuple[LockedExtension, ...], Builder | None]:
    """Lock the sources of the extensions, and the tools that are missing in the stage that compiles them. That stage
    has the image's Debian packages (`image_debs`) and the image's wheels (`locked`), except the profile's own packages.
    `stale`: the parts of `previous` that must be locked again. `similar`: the lock of a similar profile. A source that
    one of the two locks has for the same inputs is not downloaded."""
    extension_toolchain = plan.extension_toolchain
    if extension_toolchain is None:
        return (), None
    _refuse_twice(extension_toolchain, locked)
    debian = extension_toolchain.toolchain.debian
    if previous is not None and "extensions" not in stale and locked == previous.wheels:
        held = (*previous.base, *previous.apt)
        if not debian or image_debs == held:
            return previous.extensions, previous.builder
    inspected = next((one for one in (previous, similar) if one and "extensions" not in one.stale(plan)), None)
    extensions = (
        inspected.extensions
        if inspected
        else tuple(extension_source_fetcher.inspect_source(wanted, progress) for wanted in extension_toolchain.wanted)
    )
    archive = extension_toolchain.toolchain.archive
    inside = {item.name for item in plan.archives}
    apart = (archive_fetcher.inspect_archive(archive, progress),) if archive and archive.name not in inside else ()
    nvcc = Nvcc(extension_toolchain.toolchain.home, extension_toolchain.toolchain.release)
    tools = _tools(plan, extension_toolchain, previous, locked)
    packaged = _packaged(plan, extension_toolchain, image_debs)
    return extensions, Builder(
        extension_toolchain.arch, nvcc, tools, apart, packaged, debian.environment if debian else {}
    )


def _packaged(plan: Plan, extension_toolchain: ExtensionToolchain, image_debs: tuple[Deb, ...]) -> tuple[Deb, ...]:
    """The Debian packages of nvcc that the image lacks; the image's packages keep their versions."""
    debian = extension_toolchain.toolchain.debian
    if debian is None or plan.suite is None:
        return ()
    try:
        found = apt_resolution_and_download.resolve_debs(plan.suite, debian.packages, image_debs, debian.components)
        return apt_resolution_and_download.beyond(found, image_debs)
    except ProfileError as error:
        hint = f"{error.hint}\nif the mirror has newer versions: envbuild lock {plan.cli_words} --upgrade base"
        raise ProfileError(
            error.message, hint=hint, faults=_compiled_with(extension_toolchain, debian.packages)
        ) from None


def _compiled_with(extension_toolchain: ExtensionToolchain, tools: Iterable[str]) -> list[Fault]:
    """A fault for each extension, at its position. `tools`: the requirements for the tools that compile it."""
    return [replace(item.at, message=f"it is compiled with {', '.join(tools)}") for item in extension_toolchain.wanted]


def _refuse_twice(extension_toolchain: ExtensionToolchain, locked: Iterable[LockedWheel]) -> None:
    """Refuse a distribution that is both a wheel from the index and compiled: an image can contain it only once."""
    held = {canonicalize_name(item.wheel.name): item.wheel.version for item in locked}
    faults = [
        replace(item.at, message=f"{name} {held[name]} is already locked as a wheel, which the extension would replace")
        for item in extension_toolchain.wanted
        for name in [canonicalize_name(item.extension.name)]
        if name in held
    ]
    if faults:
        hint = "remove it from extensions, or from packages, together with the packages that require it"
        raise ProfileError("an extension is also a locked wheel", hint=hint, faults=faults)


def _tools(
    plan: Plan, extension_toolchain: ExtensionToolchain, previous: Lock | None, locked: tuple[LockedWheel, ...]
) -> tuple[LockedWheel, ...]:
    """The wheels of nvcc and of the build tools, in the image's versions if it has them.

    The profile's own packages are installed after the extensions. Those that the tools need are therefore included.
    """
    held = {item.wheel.name: item.wheel.version for item in locked}
    before = (
        {item.wheel.name: item.wheel.version for item in previous.builder.wheels}
        if previous and previous.builder
        else {}
    )
    tools = [*extension_toolchain.toolchain.requirements, *extension_toolchain.requires]
    pins = [f"{name}=={version}" for name, version in held.items()]
    wanted = [*plan.core, *plan.packages, *tools]
    try:
        resolved = wheel_resolution_and_download.resolve_wheels(
            wanted, plan.python, plan.glibc, {**before, **held}, pins, plan.overrides
        )
        there = {item.wheel.name for item in locked if item.layer != PACKAGES}
        needed = resolved.closure(canonicalize_name(Requirement(text).name) for text in tools) - there
        located = wheel_resolution_and_download.locate(
            {name: resolved.versions[name] for name in sorted(needed)}, plan.python, plan.glibc, just_resolved=True
        )
    except ProfileError as error:
        faults = _compiled_with(extension_toolchain, tools)
        raise ProfileError(error.message, hint=error.hint, faults=faults) from None
    found = [LockedWheel(wheel, size, BUILDER) for wheel, size in wheel_resolution_and_download.sizes(located).items()]
    return tuple(sorted(found, key=lambda item: item.wheel.name))
