"""Finds faults in the CUDA libraries and the distributions of an environment. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuild.audit.collected_environment import LD_PATH, LD_PRELOAD, SITE, Copy, Holdings
from envbuild.audit.finding_types import Finding, Severity, VersionMismatch
from envbuild.facts import database

NAMES = {"cublas": "cuBLAS", "cudnn": "cuDNN", "nccl": "NCCL", "cudart": "the CUDA runtime", "nvJitLink": "nvJitLink"}
_MOST_REQUIREMENTS = 50


def not_imported(version: str, failure: str, memory: int) -> Finding:
    """Return the finding for a torch that cannot be imported. `memory`: the container's memory limit in bytes.

    The collector itself sends SIGKILL only after a timeout, which it reports as such. So any other SIGKILL is taken to
    be from the kernel's OOM killer.
    """
    text = f"torch {version} cannot be imported: {failure}".replace("  ", " ")
    if "SIGKILL" in failure:
        more = f"the audit's container is limited to {memory >> 30} GiB: free or add memory on the engine's machine"
        return Finding("torch-import", "defect", f"{text}: out of memory, or over a memory limit", more)
    again = "run it again when the machine is less busy; if it hangs again: " if failure.startswith("not done") else ""
    return Finding(
        "torch-import",
        "defect",
        text,
        f"{again}reinstall torch and its libraries; look for several copies of a library",
    )


def cuda_library_findings(held: Holdings) -> Iterator[Finding]:
    """Yield all findings about the copies of CUDA libraries in the environment, loaded or not."""
    for copy in held.libraries:
        yield from _one(copy, held)
    for group, name in NAMES.items():
        copies = [copy for copy in held.libraries if copy.group == group]
        yield from _several(name, copies)
        yield from _mixed(name, copies)
    yield from _overwritten(held)
    yield from _bundled(held)
    yield from _on_the_loaders_path(held)
    yield from _cublas_first(held)


def _one(copy: Copy, held: Holdings) -> Iterator[Finding]:
    if copy.record is False and copy.sha256:
        text = f"{copy.path} is not the file that {copy.owner} installed: its checksum differs"
        yield Finding("modified-library", "defect", text, f"reinstall {copy.distribution}")
    elif copy.record is None and copy.in_packages and "/nvidia/" in copy.path:
        how = "and torch loads it" if copy.loaded else "an upgrade or a copy left it behind"
        text = f"{copy} belongs to no installed distribution: {how}"
        yield Finding("left-behind", "defect" if copy.loaded else "warn", text, "remove the file")
    if copy.version and copy.reported and not agree(copy.version, copy.reported):
        text = f"{copy} reports that it is version {copy.reported}"
        mismatch = VersionMismatch(copy.library, copy.reported, copy.version)
        remedy = "find the libraries that were mixed, and reinstall them"
        yield Finding("version-disagrees", "defect", text, remedy, (mismatch,))
    if rightful := shadowed_copy(copy, held):
        text = f"{copy} is loaded{_by(copy)} instead of {rightful.path} ({rightful.owner})"
        yield Finding("shadowed", "defect", text, remedy_of_a_shadow(copy))


def shadowed_copy(copy: Copy, held: Holdings) -> Copy | None:
    """The intact copy of a distribution that torch does not load because it loads this copy, which belongs to none."""
    if not copy.loaded or copy.record is not None or (SITE in copy.ways and copy.in_packages):
        return None
    return next((c for c in held.libraries if c.library == copy.library and c.record and not c.loaded), None)


def agree(version: str, reported: str) -> bool:
    """Whether two versions are equal in the components that both have: true for 12.5.2.13 and 12.5.2."""
    return all(one == other for one, other in zip(version.split("."), reported.split("."), strict=False))


def _by(copy: Copy) -> str:
    words = {LD_PRELOAD: " by LD_PRELOAD", LD_PATH: " by LD_LIBRARY_PATH"}
    return next((text for way, text in words.items() if way in copy.ways), "")


def remedy_of_a_shadow(copy: Copy) -> str:
    """How to stop the loading of a library that is not the one of its distribution."""
    variable = _by(copy).removeprefix(" by ")
    return f"unset {variable}, or remove {copy.folder} from it" if variable else f"remove {copy.path}"


def _several(name: str, copies: list[Copy]) -> Iterator[Finding]:
    """Report a library with several copies. The finding is a warning if more than one copy is in a package folder or on
    LD_LIBRARY_PATH or LD_PRELOAD, else a note."""
    # the loader never takes a copy with another file name, such as the system's libcudart.so.13 for libcudart.so.12
    own = {copy.soname or copy.name for copy in copies if copy.loaded or copy.in_packages}
    copies = [copy for copy in copies if not own or (copy.soname or copy.name) in own]
    kinds = [copy.library for copy in copies]
    if len(set(kinds)) == len(kinds):
        return
    heads = [next(group) for _, group in groupby(sorted(copies, key=_place), key=lambda copy: copy.folder)]
    if len(heads) == 1:
        heads = sorted(copies, key=_place)
    near = [copy for copy in heads if copy.in_packages or {LD_PATH, LD_PRELOAD} & set(copy.ways)]
    listed = "; ".join(str(copy) for copy in heads[:8]) + ("; ..." if len(heads) > 8 else "")
    text = f"{name} is installed {len(heads)} times: {listed}"
    remedy = "keep one copy: that of torch's own distributions"
    yield Finding("several-copies", "warn" if len(near) > 1 else "note", text, remedy)


def _place(copy: Copy) -> tuple[bool, str, str]:
    return not copy.loaded, copy.folder, copy.library


def _mixed(name: str, copies: list[Copy]) -> Iterator[Finding]:
    loaded = [copy for copy in copies if copy.loaded]
    listed = ", ".join(map(str, loaded))
    if len({copy.library for copy in loaded}) < len(loaded):
        yield Finding("loaded-twice", "defect", f"{name} is loaded more than once: {listed}", "keep one copy")
        return
    known = [copy.version for copy in loaded if copy.version]
    if len({copy.folder for copy in loaded}) > 1 or not all(agree(known[0], version) for version in known[1:]):
        ident = f"mixed-{loaded[0].group.lower()}"
        yield Finding(
            ident,
            "defect",
            f"the parts of {name} have different versions or folders: {listed}",
            "keep one copy of each",
        )


@dataclass(frozen=True)
class OverwrittenLibrary:
    """A library file of `wanted`, which torch requires, that the installation of `present` overwrote: both
    distributions contain the path. `dependents`: the installed distributions that require `present`."""

    path: str
    wanted: str
    present: str
    dependents: tuple[str, ...]


def overwritten_libraries(held: Holdings) -> Iterator[OverwrittenLibrary]:
    """Yield each library of a distribution that torch requires, if a different distribution overwrote it. Some of
    NVIDIA's wheels for CUDA 12 and for CUDA 13 contain the same paths."""
    copies = {copy.path: copy for copy in held.libraries if copy.record}
    required = torch_requirements(held)
    for altered in held.altered:
        copy, wanted = copies.get(altered.path), altered.owner.partition("==")[0]
        present = copy.distribution if copy else None
        if present and present != wanted and wanted in required and present not in required:
            dependents = {name for name, item in held_requirements(held) if canonicalize_name(item.name) == present}
            yield OverwrittenLibrary(altered.path, wanted, present, tuple(sorted(dependents)))


def requirement_clause(dependents: Sequence[str], required: str) -> str:
    """The clause "a requires x" or "a and b require x"."""
    *others, last = dependents
    return f"{', '.join(others)} and {last} require {required}" if others else f"{last} requires {required}"


def torch_requirements(held: Holdings) -> frozenset[str]:
    """Return torch and the installed distributions that it requires, directly or indirectly."""
    requirements = list(held_requirements(held))
    reached: set[str] = {"torch"}
    for _ in range(len(held.distributions)):
        more = {canonicalize_name(wanted.name) for owner, wanted in requirements if owner in reached} - reached
        if not more:
            break
        reached |= more
    return frozenset(reached & set(held.installed))


def _overwritten(held: Holdings) -> Iterator[Finding]:
    key = lambda item: (item.wanted, item.present, item.dependents)  # noqa: E731
    for (wanted, present, dependents), items in groupby(sorted(overwritten_libraries(held), key=key), key=key):
        paths = [item.path for item in items]
        more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
        text = f"{paths[0]}{more} is the file of {present}, which overwrote that of {wanted}; torch requires {wanted}"
        remedy = f"reinstall {wanted}" if dependents else f"uninstall {present}, then reinstall {wanted}"
        if dependents:
            text += f"; {requirement_clause(dependents, present)}"
        yield Finding("overwritten-library", "defect", text, remedy)


def _bundled(held: Holdings) -> Iterator[Finding]:
    """Report CUDA libraries in package folders other than those of NVIDIA's own distributions."""
    foreign = [copy for copy in held.libraries if copy.in_packages and "/nvidia/" not in copy.path]
    for owner, grouped in groupby(sorted(foreign, key=lambda c: (c.owner, c.path)), key=lambda c: c.owner):
        copies = list(grouped)
        others = [c for c in held.libraries if c not in copies and c.library in {copy.library for copy in copies}]
        whose = "of no distribution, in a package's folder" if owner == "unowned" else f"bundled by {owner}"
        remedy = (
            "remove these files"
            if owner == "unowned"
            else f"install a build of {copies[0].distribution} without bundled libraries"
        )
        text = f"CUDA libraries {whose}: {'; '.join(map(str, copies[:8]))}"
        if others and any(copy.loaded for copy in copies):
            text += "; torch loads them even if another version is installed as well"
        yield Finding("bundled-copy", "warn" if others or owner == "unowned" else "note", text, remedy)


def _on_the_loaders_path(held: Holdings) -> Iterator[Finding]:
    """Report the copies on LD_LIBRARY_PATH and LD_PRELOAD that torch does not load, but that other programs will."""
    whom = {LD_PATH: "programs without an RPATH load these", LD_PRELOAD: "every program loads these first"}
    for way, variable in ((LD_PATH, "LD_LIBRARY_PATH"), (LD_PRELOAD, "LD_PRELOAD")):
        others = {copy.library for copy in held.libraries if way not in copy.ways}
        foreign = [c for c in held.libraries if way in c.ways and not c.loaded and not c.in_packages]
        copies = [copy for copy in foreign if copy.library in others]
        if copies:
            text = f"{variable} leads to {'; '.join(map(str, copies[:8]))}: {whom[way]}"
            yield Finding(way, "warn", text, f"unset {variable}, in the image or the shell")


def _cublas_first(held: Holdings) -> Iterator[Finding]:
    order = held.order
    if order is None:
        return
    lts = {copy.path: copy for copy in held.libraries if copy.library == "cublasLt"}
    taken = [path for path in (*order.alone, *order.both) if path != order.cublaslt]
    if order.failure and not taken:
        taken = [
            path for path, copy in lts.items() if {LD_PATH, LD_PRELOAD} & set(copy.ways) and path != order.cublaslt
        ]
    if taken and order.cublaslt:
        text = (
            f"if loaded before libcublasLt, {order.cublas} loads {lts.get(taken[0], taken[0])}, not the one in its own "
            "folder; torch 2.10.0 and programs without torch load in that order"
        )
        text += f", which fails: {order.failure}" if order.failure else ""
        yield Finding(
            "cublaslt-order",
            "warn",
            text,
            "remove other copies of libcublasLt from LD_LIBRARY_PATH, or use torch 2.11 or newer",
        )
    elif order.failure:
        text = f"{order.cublas} cannot be loaded on its own: {order.failure}"
        yield Finding("cublas-alone", "warn", text, "reinstall cuBLAS, and keep one copy of it")


def distribution_findings(held: Holdings, keep: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings about duplicate distributions, and unmet requirements as reported by `pip check`. `keep`: library
    -> remedy, for each library whose installed version should stay although torch requires a different one."""
    places: dict[str, dict[str, list[str]]] = {}
    for item in held.distributions:
        places.setdefault(item.name, {}).setdefault(item.folder, []).append(item.version)
    for name, folders in places.items():
        for folder, versions in folders.items():
            if len(set(versions)) > 1:
                severity: Severity = "defect" if database.library_of(name) else "warn"
                text = f"{folder} has metadata of two versions of {name}, one of them left over: {', '.join(versions)}"
                remedy = f"remove both of its .dist-info folders, then install {name} again"
                yield Finding("duplicate-distribution", severity, text, remedy)
        first = [versions[0] for versions in folders.values()]
        if len(set(first)) > 1:
            text = (
                f"{name} is in several folders, {', '.join(first)}: Python imports the first, in {next(iter(folders))}"
            )
            yield Finding("shadowed-distribution", "note", text, "keep one of them")
    yield from _requirements(held, keep)


def _requirements(held: Holdings, keep: Mapping[str, str]) -> Iterator[Finding]:
    installed = held.installed
    unmet = []
    for name, wanted in held_requirements(held):
        if not _met(wanted, installed):
            version = installed.get(canonicalize_name(wanted.name))
            state = f"installed is {version}" if version else "it is not installed"
            mismatch = VersionMismatch(wanted.name, version, str(wanted.specifier))
            text = f"{name} requires {wanted}, but {state}"
            kept = keep.get(database.library_of(canonicalize_name(wanted.name)) or "") if name == "torch" else None
            remedy = kept or "install the required version, or override the requirement"
            unmet.append(Finding("requirement-unmet", "warn", text, remedy, (mismatch,)))
    yield from list(dict.fromkeys(unmet))[:_MOST_REQUIREMENTS]


def held_requirements(held: Holdings) -> Iterator[tuple[str, Requirement]]:
    """Yield (distribution, requirement) for every requirement that applies in this environment, including those of
    requested extras."""
    requires = {item.name: list(_parsed(item.requires)) for item in reversed(held.distributions)}
    todo = [(name, "") for name in requires]
    seen = set(todo)
    while todo:
        name, extra = todo.pop()
        for wanted in requires.get(name, ()):
            if not _holds(wanted, held.python.markers, extra) or (extra and _holds(wanted, held.python.markers, "")):
                continue
            yield name, wanted
            more = [(canonicalize_name(wanted.name), canonicalize_name(part)) for part in wanted.extras]
            todo += [item for item in more if item not in seen]
            seen.update(more)


def _parsed(texts: Iterable[str]) -> Iterator[Requirement]:
    for text in texts:
        try:
            yield Requirement(text)
        except (ValueError, RecursionError):
            continue  # old metadata has many invalid requirements


def _holds(wanted: Requirement, markers: Mapping[str, str], extra: str) -> bool:
    try:
        return wanted.marker is None or wanted.marker.evaluate({**markers, "extra": extra})
    except (ValueError, RecursionError):
        return False


def _met(wanted: Requirement, installed: Mapping[str, str]) -> bool:
    version = installed.get(canonicalize_name(wanted.name))
    return version is not None and wanted.specifier.contains(version, prereleases=True)
