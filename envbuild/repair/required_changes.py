"""Decides what has to change in an environment, from its audit and from the causes that a log shows. Pure.

Every version comes from the facts: the changes that advisories state, and the known library versions and torch
releases.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import VERSION_PATTERN, Version

from envbuild.audit import environment_audit, library_and_distribution_findings
from envbuild.audit.collected_environment import LD_PATH, Copy, Holdings
from envbuild.audit.environment_audit import Audit, Expected
from envbuild.audit.finding_types import Finding
from envbuild.explain.cause_ranking import Explanation, SignatureMatch
from envbuild.explain.cause_scoring import NOT_LOADED
from envbuild.facts import database
from envbuild.facts.advisory_model import Advisory, Situation
from envbuild.facts.fact_field_types import VersionRange, is_version
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.facts.log_signatures import DRIVER_TOO_OLD, TORCH_WITHOUT_CUDA, UNRELATED_APEX
from envbuild.repair import environment_manager_detection
from envbuild.resolve import advisory_remedy, torch_companions

COMPANION_BUILD = "companion-build"
"""The id of the problem that torchvision or torchaudio was built for the CPU or a different CUDA version than torch."""
NO_GPU = (
    "no GPU was found on this machine or in a log, so faults of GPU models were not checked: repeat the command with "
    "the GPU model of the job, such as --gpu h20"
)
_MOST_ROUNDS = 5


@dataclass(frozen=True)
class LibraryPin:
    """A library version that fixes an advisory. `installed`: the installed version of the distribution already fits,
    but torch may load a different file; `now`: the version that is loaded or installed now."""

    library: str
    distribution: str
    version: str
    now: str | None
    installed: bool = False

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True)
class Changes:
    """What to change. `torch`: the release to install with the libraries that it requires; `companions`: requirements
    for the installed torchvision and torchaudio, to install together with `torch`; `rebuilt`: exact requirements for
    those that must become the same build as the installed torch, which stays; `packages`: other requirements to
    install; `variables`: environment variables to set; `reinstall`: distributions whose files were overwritten, with
    their installed versions; `reinstall_with_torch`: the names of distributions to replace together with `torch`, which
    pip, uv and Poetry would keep because their version fits, torch itself among them; `uninstall`: unrelated
    distributions to remove; `overwriting`: distributions to remove because they overwrote files of those that torch
    requires; `leftovers`: files to remove that no distribution owns; `bundled`: libraries that the installed torch
    bundles, so that only a different torch changes their version; `library_path`: LD_LIBRARY_PATH leads to the faulty
    libraries, so that their folders must be taken off it; `old_cuda`: libraries to remove because `torch` is built for
    another CUDA version."""

    pins: tuple[LibraryPin, ...] = ()
    torch: str | None = None
    packages: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    reinstall: tuple[str, ...] = ()
    reinstall_with_torch: tuple[str, ...] = ()
    uninstall: tuple[str, ...] = ()
    overwriting: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    bundled: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    rebuilt: tuple[str, ...] = ()
    library_path: bool = False
    old_cuda: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        removals = (self.uninstall, self.overwriting, self.leftovers)
        installs = (self.pins, self.torch, self.rebuilt, self.packages, self.reinstall)
        return not any((*installs, self.variables, self.library_path, *removals))

    @property
    def needs_changed_packages(self) -> bool:
        """Whether packages must be installed or removed, so that it is not enough to load different library files. A
        torch that is only replaced because of its `bundled` libraries can be kept."""
        torch = self.torch is not None and not self.bundled
        removals = (self.uninstall, self.harmful_overwriting, self.harmful_leftovers)
        return torch or any((self.rebuilt, self.packages, self.reinstall, *removals))

    @property
    def harmful_overwriting(self) -> tuple[str, ...]:
        """`overwriting`, if a program would still load the overwritten files with the pinned libraries."""
        return self.overwriting if all(pin.installed for pin in self.pins) else ()

    @property
    def harmful_leftovers(self) -> tuple[str, ...]:
        """The leftovers that a program would still load with the pinned libraries from a different folder."""
        missing = "|".join(re.escape(pin.library) for pin in self.pins if not pin.installed)
        replaced = re.compile(rf"lib({missing})(Lt|_[a-z_]+)?\.so" if missing else r"(?!)")
        return tuple(path for path in self.leftovers if not replaced.match(PurePosixPath(path).name))


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with an environment. `advisories`: the ones that the changes fix; `absent`: the ones that the log
    shows but that cannot apply to this environment; `absent_by_version`: the ids of those that would apply with other
    versions; `by_hand`: (problem, fix) of each fault that no command fixes; `problems`: (id, text) of each other fault
    that the changes fix. `driver`: the driver that the environment is judged for."""

    advisories: tuple[Advisory, ...]
    absent: tuple[Advisory, ...]
    changes: Changes
    by_hand: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    problems: tuple[tuple[str, str], ...] = ()
    driver: str | None = None
    absent_by_version: frozenset[str] = frozenset()

    @property
    def healthy(self) -> bool:
        return self.changes.empty and not self.by_hand

    @property
    def probes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(probe for advisory in self.advisories for probe in advisory.shows.probes))


def expected_hardware_from(held: Holdings, found: Explanation | None, gpus: Sequence[Gpu] = ()) -> Expected:
    """Return the GPUs and the driver that the environment is judged for. GPUs: `gpus`; if empty, those in the log;
    otherwise this machine's. Driver: the one in the log, otherwise this machine's, which is not used if `gpus` are
    given."""
    machine = environment_audit.of_gpus(gpus, image=False) if gpus else environment_audit.of_machine(held)
    if found is None:
        return machine
    situation = found.read.situation
    return replace(
        machine,
        gpus=tuple(gpus) or situation.gpus or machine.gpus,
        gpu_count=(situation.gpu_count or len(situation.gpus) or 1) if situation.gpus else machine.gpu_count,
        driver=situation.driver or machine.driver,
    )


def diagnose(
    audited: Audit, found: Explanation | None, *, files_only: bool = False, metadata_counts: bool = True
) -> Diagnosis:
    """Decide what to change. `found`: the explanation of a log from this environment. `files_only`: replace a faulty
    library by making the program load a different file, even if torch bundles the library; otherwise a bundled library
    is replaced by installing a different torch. `metadata_counts`: whether the environment's manager reads the
    requirements of installed packages from their METADATA, and may therefore reinstall the version that they
    require."""
    held, wanted = audited.held, audited.wanted
    now = environment_audit.held_situation(held, wanted)
    shown = [match for match in found.matches if match.advisory] if found else []
    named = [match.advisory for match in shown if match.advisory]
    absent = tuple(advisory for advisory in (*named, *_doubtful(found)) if _cannot_apply(advisory, now, held))
    shown_here = [advisory for advisory in named if advisory not in absent]
    kept = dict(environment_audit.libraries_to_keep(held, now, wanted)) if metadata_counts else {}
    fixed, left, changes = _version_changes(now, shown_here, held, wanted, files_only, kept)
    no_release = list(_driver_without_release(now, changes))
    left = [one for one in left if not (no_release and one.id.startswith(DRIVER_TOO_OLD))]
    by_hand = [*no_release, *_by_hand(audited, found, changes)]
    by_hand += [(f"{one.id}: {one.title}", one.remedy) for one in left]
    general = [match for match in found.matches if match.advisory is None] if found else []
    after = _with_torch(now, changes.torch) if changes.torch else now
    by_hand += [
        (f"{match.id} (line {match.lines[0].number}): {match.title}" if match.lines else match.title, match.remedy)
        for match in general
        if not _is_excluded(match.id, after, held, changes) and not (no_release and match.id == DRIVER_TOO_OLD)
    ]
    own = dict.fromkeys((problem, _with_own_pip(remedy, held)) for problem, remedy in by_hand)
    optional = [*_optional(held, found, changes), *_contradicted(general, now, held)]
    optional = [_with_own_pip(text, held) for text in optional]
    return Diagnosis(
        tuple(fixed), absent, changes, tuple(own), (*_notes(audited, found, changes), *optional), wanted.gpus,
        tuple(_problems(audited, now, changes)), wanted.driver,
        frozenset(advisory.id for advisory in absent if not _cannot_apply(advisory, _any_versions(now), held)),
    )  # fmt: skip


def _doubtful(found: Explanation | None) -> list[Advisory]:
    """The advisories that lines of the log name, and that only a version contradicts which may not be the loaded
    one."""
    possible = found.possible if found else ()
    return [match.advisory for match in possible if match.advisory and match.standing == NOT_LOADED]


def _is_excluded(cause: str, situation: Situation, held: Holdings, changes: Changes) -> bool:
    """Whether a cause without an advisory cannot apply in this situation, in which the changes may have been made."""
    if cause == TORCH_WITHOUT_CUDA:
        return changes.torch is not None or bool(held.torch and held.torch.cuda)
    if cause == UNRELATED_APEX:
        return not _has_nvidias_apex(held)  # the remaining step has its own row
    if cause == DRIVER_TOO_OLD:
        known = situation.driver and situation.cuda
        return bool(known) and database.driver_runs(str(situation.cuda), str(situation.driver))
    return False


def _contradicted(general: Sequence[SignatureMatch], now: Situation, held: Holdings) -> Iterator[str]:
    """Yield a note for each cause in the log that the environment contradicts."""
    for match in general:
        if match.id != UNRELATED_APEX and _is_excluded(match.id, now, held, Changes()):
            yield (
                f"the log shows {match.id}, but torch {now.torch} for CUDA {now.cuda} is installed now: no action is "
                "needed unless the job ran in a different environment, or fails again"
            )


def _cannot_apply(advisory: Advisory, now: Situation, held: Holdings) -> bool:
    """Whether the environment contradicts the advisory, or lacks NVIDIA's apex, which the advisory is about."""
    if advisory.about_apex and not _has_nvidias_apex(held):
        return True
    return bool(advisory.match) and advisory.standing(now) == "contradicted"


def _any_versions(situation: Situation) -> Situation:
    """The situation without versions, which are then unknown."""
    return replace(situation, torch=None, cuda=None, driver=None, libraries={}, distributions={})


def _version_changes(
    now: Situation,
    shown: Sequence[Advisory],
    held: Holdings,
    wanted: Expected,
    files_only: bool,
    kept: Mapping[str, str],
) -> tuple[list[Advisory], list[Advisory], Changes]:
    """Return the advisories that the changes fix, those that they leave, and the changes. If an advisory of severity
    `refuse` applies only after a change, it is fixed too. Advisories that the profile accepts count only if a log shows
    them. `kept`: installed libraries that stay, although torch requires other versions.

    A fault that LD_LIBRARY_PATH causes is fixed by changing that variable. In an image, it is fixed by a different
    torch, because the variables of its containers are unknown."""
    acted, decided = list(shown), list[Advisory]()  # decided: those that have chosen a torch, each at most once
    library_path = False
    torch = _gpu_torch(now, held)
    initial = {} if torch or files_only else {**kept, **dict(_pins_of_leftovers(held, now))}
    pins = dict(initial)
    packages: dict[str, None] = {}
    variables: dict[str, str] = {}
    after = _with_torch(now, torch) if torch else replace(now, libraries={**now.libraries, **pins})
    # an advisory that only a log can show never holds in a situation
    todo = [advisory for advisory in shown if torch is None or advisory.standing(after) != "contradicted"]
    own = (copy.library for copy in held.libraries if copy.loaded and is_bundled(copy))
    bundled, instead = frozenset(() if files_only else own), dict[str, None]()
    for _ in range(_MOST_ROUNDS):
        todo += [item for item in _refused(after, wanted) if item not in todo]
        todo += [item for item in (_arising(now, after, wanted) if torch else ()) if item not in (*todo, *acted)]
        if not todo:
            break
        acted += [item for item in todo if item not in acted]
        for advisory in todo:
            if advisory.by_library_path and not wanted.image:
                library_path = True
                continue
            written = advisory_remedy.written(advisory.change, after)
            release = written.get("torch") if advisory not in decided else None
            linked = sorted(bundled & set(advisory.change.pins)) if release is None and torch is None else []
            if linked:
                release = _release_with(advisory.change.pins, after)
                if release is None:
                    continue  # separately installed versions have no effect
                instead |= dict.fromkeys(linked)
            if release:
                # what was chosen so far was for a different torch
                torch, after = release, _with_torch(now, release)
                decided.append(advisory)
                pins, packages, variables = {}, {}, {}
                acted = [one for one in acted if one in shown or one.holds(now)]
                todo = [one for one in acted if one.standing(after) != "contradicted"]
                break
            pins |= written.get("pins", {})
            packages |= dict.fromkeys(text for text in written.get("packages", ()) if _name(text) in held.installed)
            variables |= written.get("env", {})
            after = replace(after, libraries={**after.libraries, **pins})
        else:
            todo = []
    if _is_installed(torch, now, held) and not instead:
        # one advisory excludes a newer torch, and another one the older releases
        torch, after, pins = None, now, initial | pins
        acted = [advisory for advisory in acted if advisory in shown or advisory.holds(now)]
    cuda = after.cuda or now.cuda or ""
    replaced = torch is not None
    found = tuple(filter(None, (_pin(*pin, cuda, now, held, acted, replaced=replaced) for pin in pins.items())))
    damaged = _damaged(held, {pin.distribution for pin in found if not pin.installed})
    # the new torch may require other versions of these than the installed ones
    with_torch = library_and_distribution_findings.torch_requirements(held) if torch else frozenset()
    companions = _companions(held) if torch else {}
    again = _kept_by_resolver({"torch": held.installed.get("torch", ""), **companions}, torch) if torch else []
    changes = Changes(
        found, torch, tuple(packages), variables,
        tuple(f"{name}=={held.installed[name]}" for name in damaged if name not in with_torch),
        (*again, *(name for name in damaged if name in with_torch)), _unrelated(held), _overwriting(held),
        tuple(_leftovers(held, {pin.library for pin in found}, cuda)), tuple(instead),
        tuple(torch_companions.companion_requirement(name, torch) for name in companions if torch),
        tuple(_rebuilt_companions(held)) if now.gpus and not torch else (), library_path,
        _old_cuda(held, now.cuda, after.cuda) if torch else (),
    )  # fmt: skip
    after = _with_torch(now, torch) if torch else now
    after = replace(after, libraries={**after.libraries, **{pin.library: pin.version for pin in found}})
    acted += [advisory for advisory in _refused(after, wanted) if advisory not in acted]
    fixed = [advisory for advisory in acted if _is_fixed(advisory, changes, now, after)]
    return fixed, [advisory for advisory in acted if advisory not in fixed], changes


def _refused(situation: Situation, wanted: Expected) -> list[Advisory]:
    """The advisories of severity `refuse` that apply to a situation and that the profile does not accept."""
    matching = database.matching(situation)
    return [advisory for advisory in matching if advisory.severity == "refuse" and advisory.id not in wanted.accepted]


def _arising(now: Situation, after: Situation, wanted: Expected) -> list[Advisory]:
    """The warnings that apply only after a change, and that other versions of packages fix, such as NumPy 2 with an old
    torch. Warnings that the profile accepts are left out."""
    new = [one for one in database.matching(after) if one.id not in wanted.accepted and not one.holds(now)]
    by_package = (one for one in new if one.change.pins and not set(one.change.pins) & set(database.libraries()))
    return [one for one in by_package if one.severity == "warn"]


def _is_fixed(advisory: Advisory, changes: Changes, now: Situation, after: Situation) -> bool:
    """Whether the changes fix an advisory: it cannot apply after them, or they include all that it requires. `now`,
    `after`: the situation before and after the changes."""
    if advisory.by_library_path and changes.library_path:
        return True
    if advisory.match and advisory.standing(after) == "contradicted":
        return True
    required, packages = advisory.change, {_name(text) for text in changes.packages}
    made = [
        after.libraries.get(name, "") in versions
        if name in database.libraries()
        else canonicalize_name(name) in packages
        for name, versions in required.pins.items()
    ]
    made += [after.torch is not None and after.torch in required.torch] if required.torch else []
    made += [bool(advisory_remedy.change_variables(required, now))] if required.env or required.env_with else []
    return bool(made) and all(made)


def _is_installed(torch: str | None, now: Situation, held: Holdings) -> bool:
    """Whether this torch release is the installed one, and runs on the GPUs that the environment is judged for."""
    present = now.torch.partition("+")[0] if now.torch else None
    return torch is not None and torch == present and _gpu_torch(now, held) is None


def _companions(held: Holdings) -> dict[str, str]:
    """The versions of the installed torchvision and torchaudio."""
    names = (name for name in database.torch_index().packages if name != "torch")
    return {name: held.installed[name] for name in names if name in held.installed}


def _kept_by_resolver(installed: Mapping[str, str], torch: str) -> list[str]:
    """The distributions that pip, uv and Poetry would keep when this torch is installed, although they are a different
    build: a requirement without a local label, such as ==0.22.*, accepts 0.22.1+cpu. `installed`: the versions of
    torch, torchvision and torchaudio."""
    kept = []
    for name, version in installed.items():
        if name == "torch":
            fits = version.partition("+")[0] == torch
        else:
            wanted = Requirement(torch_companions.companion_requirement(name, torch)).specifier
            fits = "+" in version and is_version(version) and wanted.contains(version, prereleases=True)
        if fits:
            kept.append(name)
    return kept


def _rebuilt_companions(held: Holdings) -> Iterator[str]:
    """Yield the exact requirement for each torchvision and torchaudio that was built for the CPU or for a different
    CUDA major version than the installed torch, such as torchvision==0.22.1 for 0.22.1+cpu. The requirement names the
    same release: a release that does not belong to the installed torch is not changed."""
    torch, _, label = held.installed.get("torch", "").partition("+")
    if held.torch is None or not held.torch.cuda or not is_version(torch) or not re.fullmatch(r"(cu[0-9]+)?", label):
        return
    for name, installed in _companions(held).items():
        release, _, build = installed.partition("+")
        series = torch_companions.companion_series(name, torch)
        if re.fullmatch(rf"{re.escape(series)}(\.[0-9]+)?", release) and _other_build(build, held.torch.cuda):
            yield f"{name}=={release}{f'+{label}' if label else ''}"


def index_options(torch: str) -> tuple[str, ...]:
    """The options of pip and uv for the package index of this build of torch; empty for a build of PyPI."""
    label = torch.partition("+")[2]
    return ("--index-url", database.torch_index().address.format(build=label)) if label else ()


def _other_build(build: str, cuda: str) -> bool:
    """Whether a label of PyTorch's builds, such as cu126, is that of the CPU or of a different CUDA major version."""
    major = re.fullmatch(r"cu([0-9]{2})[0-9]+", build)
    return build == "cpu" or (major is not None and major[1] != cuda.partition(".")[0])


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def _with_torch(situation: Situation, torch: str) -> Situation:
    """The situation after the installation of a torch release with the libraries that it requires."""
    release = database.torch_release(torch)
    if release is None:
        return situation
    return replace(situation, torch=torch, cuda=release.cuda, libraries=database.libraries_of(release))


def _pin(
    name: str, version: str, cuda: str, now: Situation, held: Holdings, acted: Sequence[Advisory], *, replaced: bool
) -> LibraryPin | None:
    """The pin of a library; None if it has no distribution for this CUDA version. `replaced`: torch is replaced, so the
    installed version does not stay."""
    distribution = database.distribution_of(name, cuda)
    if distribution is None:
        return None
    ranges = [advisory.change.pins[name] for advisory in acted if name in advisory.change.pins]
    present = held.installed.get(distribution)
    fits = not replaced and present is not None and all(present in wanted for wanted in ranges)
    loaded = held.loaded(name)
    return LibraryPin(
        name, distribution, present if fits and present else version,
        (loaded.version if loaded else None) or now.libraries.get(name), fits,
    )  # fmt: skip


def _gpu_torch(now: Situation, held: Holdings) -> str | None:
    """The torch release to install if the present one has no GPU code or needs a newer driver; otherwise None."""
    if not now.gpus:
        return None
    present = now.torch.partition("+")[0] if now.torch else None
    if now.build == "cpu" or (held.torch and held.torch.imported and not held.torch.cuda and not held.torch.hip):
        return _nearest_release(present, now)
    if now.driver and now.cuda and not database.driver_runs(now.cuda, now.driver):
        return _nearest_release(present, now)
    return None


def _release_with(pins: Mapping[str, VersionRange], now: Situation) -> str | None:
    """The next torch release of this CUDA major version that brings fitting library versions, has code for the GPUs and
    runs with the driver; the newest older one if no newer one does. Used if torch bundles its libraries, which
    separately installed ones would not replace."""
    major = (now.cuda or "").partition(".")[0]
    present = now.torch.partition("+")[0] if now.torch else None
    fits = []
    for release in database.torch_releases().values():
        own = database.libraries_of(release)
        if (
            (not major or release.cuda.partition(".")[0] == major)
            and all(own.get(name) in versions for name, versions in pins.items() if name in database.libraries())
            and all(release.kernels(gpu.compute_capability) for gpu in now.gpus)
            and (now.driver is None or database.driver_runs(release.cuda, now.driver))
        ):
            fits.append(release.version)
    fits.sort(key=Version)
    newer = [version for version in fits if present is None or Version(version) >= Version(present)]
    return newer[0] if newer else fits[-1] if fits else None


def _nearest_release(present: str | None, now: Situation) -> str | None:
    """The nearest release that has code for the GPUs and runs with the driver. Releases not newer than the present one
    come first, so that code written for the present one keeps working."""
    fits = [
        release.version
        for release in database.torch_releases().values()
        if all(release.kernels(gpu.compute_capability) for gpu in now.gpus)
        and (now.driver is None or database.driver_runs(release.cuda, now.driver))
    ]
    fits.sort(key=Version)
    older = [version for version in fits if present is None or Version(version) <= Version(present)]
    return older[-1] if older else fits[0] if fits else None


def _damaged(held: Holdings, replaced: set[str]) -> tuple[str, ...]:
    """NVIDIA's distributions, except those that are replaced anyway, with a library file that differs from its checksum
    in RECORD."""
    differing = (copy.distribution for copy in held.libraries if copy.record is False and copy.sha256 is not None)
    overwritten = (item.wanted for item in library_and_distribution_findings.overwritten_libraries(held))
    names = (name for name in dict.fromkeys((*differing, *overwritten)) if name and _is_nvidias(name, held))
    return tuple(name for name in names if name not in replaced)


def _overwriting(held: Holdings) -> tuple[str, ...]:
    """The distributions that overwrote libraries which torch requires, and that no installed distribution requires."""
    found = library_and_distribution_findings.overwritten_libraries(held)
    return tuple(
        dict.fromkeys(item.present for item in found if not item.dependents and _is_nvidias(item.present, held))
    )


def _old_cuda(held: Holdings, before: str | None, after: str | None) -> tuple[str, ...]:
    """NVIDIA's libraries for the CUDA version of the installed torch, if the new torch needs those of another version:
    some have files at the same paths. Libraries that other distributions than torch require, directly or indirectly,
    are left out."""
    old, new = ((cuda or "").partition(".")[0] for cuda in (before, after))
    if not old or not new or old == new:
        return ()
    libraries = database.libraries().values()
    wanted = {library.distributions.get(new) for library in libraries}
    names = {library.distributions.get(old, "") for library in libraries} - wanted
    rows = [
        (owner, canonicalize_name(item.name))
        for owner, item in library_and_distribution_findings.held_requirements(held)
    ]
    required = {name for owner, name in rows if owner not in {*names, "torch", "cuda-toolkit"}}
    while more := {name for owner, name in rows if owner in required} - required:
        required |= more
    return tuple(sorted(name for name in names - required if _is_nvidias(name, held)))


def _is_nvidias(name: str, held: Holdings) -> bool:
    """Whether this is an installed distribution with a name of NVIDIA's packages and a valid version. The environment
    chooses both, and pip would take a different text for a URL or an option."""
    version = held.installed.get(name, "")
    return bool(re.fullmatch(r"nvidia-[a-z0-9-]+", name) and re.fullmatch(VERSION_PATTERN, version, re.X | re.I))


def _unrelated(held: Holdings) -> tuple[str, ...]:
    return ("apex",) if "apex" in held.installed and not _has_nvidias_apex(held) else ()


def _has_nvidias_apex(held: Holdings) -> bool:
    """Whether the package apex is NVIDIA's. The distribution apex from the package index is unrelated to it."""
    return held.apex is not None and bool({"normalization", "multi_tensor_apply"} & set(held.apex.parts))


def _leftovers(held: Holdings, pinned: set[str], cuda: str) -> Iterator[str]:
    """Library files in the folders of NVIDIA's wheels that no distribution owns, if they belong to a pinned library, or
    are loaded although the library's distribution is installed. If that distribution is not installed, a loaded file
    stays, because torch would lack the library without this file."""
    for copy in held.libraries:
        installed = database.distribution_of(copy.group, cuda) in held.installed
        if is_leftover(copy) and (copy.group in pinned or (copy.loaded and installed)):
            yield copy.path


def _pins_of_leftovers(held: Holdings, now: Situation) -> Iterator[tuple[str, str]]:
    """Yield (library, version) for each loaded leftover whose distribution is not installed: the version that torch's
    metadata require, else that of the torch release."""
    requirements = library_and_distribution_findings.held_requirements(held)
    exact = {canonicalize_name(item.name): item.specifier for owner, item in requirements if owner == "torch"}
    release = database.torch_release(now.torch.partition("+")[0]) if now.torch else None
    own = database.libraries_of(release) if release else {}
    for library in dict.fromkeys(copy.group for copy in held.libraries if copy.loaded and is_leftover(copy)):
        distribution = database.distribution_of(library, now.cuda or "")
        if distribution is None or distribution in held.installed:
            continue
        required = re.fullmatch(r"==([0-9.]+)", str(exact.get(canonicalize_name(distribution), "")))
        version = required[1] if required else own.get(library)
        if version:
            yield library, version


def is_bundled(copy: Copy) -> bool:
    """Whether the file belongs to a package other than NVIDIA's library packages."""
    return copy.in_packages and "/nvidia/" not in copy.path and copy.distribution is not None


def is_leftover(copy: Copy) -> bool:
    return copy.record is None and copy.in_packages and "/nvidia/" in copy.path


# Ids of audit findings that the changes fix, or that an advisory covers.
_COVERED = {
    "modified-library", "overwritten-library", "cpu-only", "no-kernel",
}  # fmt: skip
_NEEDS_TORCH = {"cpu-only", "no-kernel"}  # the findings that only a different torch fixes


def _is_covered(finding: Finding, audited: Audit, changes: Changes) -> bool:
    """Whether the changes fix a finding of the audit."""
    if finding.id == "left-behind":  # some are kept, because nothing else would be loaded
        release = database.torch_release(changes.torch) if changes.torch else None
        copy = _leftover_of(finding, audited.held)
        brought = copy is not None and release is not None and copy.group in database.libraries_of(release)
        return brought or any(finding.message.startswith(f"{path} ") for path in changes.leftovers)
    if finding.id == "shadowed":
        pinned = {pin.library for pin in changes.pins}
        copies = [copy for copy in audited.held.libraries if copy.loaded and copy.group in pinned]
        copies += foreign_on_library_path(audited.held) if changes.library_path else []
        # the variables of an image cannot be followed to its files from here
        return not audited.wanted.image and any(finding.message.startswith(f"{copy} ") for copy in copies)
    if changes.library_path and finding.id.startswith(("mixed-", "loaded-twice")):
        return any(str(copy) in finding.message for copy in foreign_on_library_path(audited.held))
    if finding.id == "wrong-apex":
        return bool(changes.uninstall)
    return finding.id in _COVERED and (finding.id not in _NEEDS_TORCH or changes.torch is not None)


def _leftover_of(finding: Finding, held: Holdings) -> Copy | None:
    return next((copy for copy in held.libraries if finding.message.startswith(f"{copy} ")), None)


def _problems(audited: Audit, now: Situation, changes: Changes) -> Iterator[tuple[str, str]]:
    """Yield (id, text) of each problem, except advisories, that the changes fix."""
    for finding in audited.findings:
        if finding.severity == "defect" and _is_covered(finding, audited, changes):
            yield finding.id, finding.message
    if changes.torch and now.driver and now.cuda and not database.driver_runs(now.cuda, now.driver):
        minimum = database.driver_minimum(now.cuda).compatible
        release = database.torch_release(changes.torch)
        instead = f"; torch {changes.torch} is built for CUDA {release.cuda}" if release else ""
        text = f"driver {now.driver} does not run CUDA {now.cuda}, for which torch {now.torch} was built"
        yield DRIVER_TOO_OLD, f"{text}: it needs driver {minimum} or newer{instead}"
    unkept = dict(environment_audit.libraries_to_keep(audited.held, now, audited.wanted))
    for pin in changes.pins:
        if pin.installed and pin.library in unkept:
            text = f"the next pip install of a package that requires torch may replace {pin.distribution} {pin.version}"
            yield "requirement-unmet", f"{text}, because torch requires a version with a known fault on this GPU"
    for requirement in changes.rebuilt:
        name = requirement.partition("=")[0]
        version = audited.held.installed[name]
        fault = "has no GPU code" if version.endswith("+cpu") else "was built for a different CUDA version"
        yield COMPANION_BUILD, f"{name} {version} {fault}; torch {now.torch} was built for CUDA {now.cuda}"


def _by_hand(audited: Audit, found: Explanation | None, changes: Changes) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) of each defect that no command fixes."""
    known = {advisory.id for advisory in database.advisories()}
    for finding in audited.findings:
        if finding.severity == "defect" and finding.id not in known and not _is_covered(finding, audited, changes):
            yield f"{finding.id}: {finding.message}", _remedy(finding, audited.held)
    dependents = _dependents("apex", audited.held)
    if ("apex" in changes.uninstall and dependents) or (_uses_apex(found) and not _has_nvidias_apex(audited.held)):
        needed = "the log shows that the program uses it"
        if dependents:
            needed = library_and_distribution_findings.requirement_clause(dependents, "it")
        yield f"NVIDIA's apex is not on the package index, and {needed}", f"build it from source{_BUILD_APEX}"


def _driver_without_release(now: Situation, changes: Changes) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) if the driver does not run the CUDA of torch, nor that of any release for these GPUs."""
    if changes.torch or "cuda-compat" in now.environment or not (now.gpus and now.driver and now.cuda):
        return
    if database.driver_runs(now.cuda, now.driver):
        return
    releases = database.torch_releases().values()
    fits = (one for one in releases if all(one.kernels(gpu.compute_capability) for gpu in now.gpus))
    minima = {minimum for one in fits if (minimum := database.driver_minimum(one.cuda).compatible)}
    if minima:
        names = ", ".join(gpu.id for gpu in now.gpus)
        text = f"{DRIVER_TOO_OLD}: no torch release runs with driver {now.driver} on {names}"
        yield text, f"install driver {min(minima, key=Version)} or newer, then run this command again"


_BUILD_APEX = (
    ", with nvcc of torch's CUDA version: APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation "
    "git+https://github.com/NVIDIA/apex"
)


def _uses_apex(found: Explanation | None) -> bool:
    """Whether the log shows that the program imports NVIDIA's apex. transformers only uses it where it is installed."""
    return found is not None and any(match.id == UNRELATED_APEX for match in found.matches)


def _dependents(name: str, held: Holdings) -> tuple[str, ...]:
    """The installed distributions that require a distribution."""
    requirements = library_and_distribution_findings.held_requirements(held)
    return tuple(dict.fromkeys(owner for owner, item in requirements if canonicalize_name(item.name) == name))


def _optional(held: Holdings, found: Explanation | None, changes: Changes) -> Iterator[str]:
    """What is only needed if the program itself uses NVIDIA's apex."""
    if "apex" in changes.uninstall and not _dependents("apex", held) and not _uses_apex(found):
        yield (
            "no installed package requires apex, so removing the unrelated package is enough: no action is needed "
            f"unless your program itself imports NVIDIA's apex; then build it from source{_BUILD_APEX}"
        )


def _remedy(finding: Finding, held: Holdings) -> str:
    """Return the finding's remedy. For an extension built against a different torch, add the rebuild command. For a
    file that was left behind, add the installation of the distribution that contains the library, because torch needs
    the library."""
    if finding.id == "left-behind":
        copy = _leftover_of(finding, held)
        cuda = (held.torch and held.torch.cuda) or ""
        name = database.distribution_of(copy.group, cuda) if copy else None
        return f"{finding.remedy}, then install {name or 'the distribution that contains it'}: torch needs the library"
    if finding.id == "extension-symbol":
        for name, version in held.extended:
            if f" of {name} {version} " in finding.message:
                return (
                    f"{finding.remedy}: pip install --no-deps --no-build-isolation --no-cache-dir --force-reinstall "
                    f"{shlex.quote(f'{name}=={version}')}"
                )
    return finding.remedy


def _with_own_pip(remedy: str, held: Holdings) -> str:
    """Return a remedy whose pip commands change this environment, whichever environment is active in the shell."""
    words = environment_manager_detection.pip_words
    commands: Mapping[str, str] = {
        "pip install": shlex.join(words(held, "install")),
        "pip uninstall": shlex.join(words(held, "uninstall")),
    }
    return re.sub(r"(?<!uv )(?<!-m )\bpip (un)?install\b", lambda found: commands[found[0]], remedy)


def foreign_on_library_path(held: Holdings) -> list[Copy]:
    """The CUDA libraries outside of Python's packages to which LD_LIBRARY_PATH leads."""
    return [copy for copy in held.libraries if LD_PATH in copy.ways and not copy.in_packages]


_MAY_REVERT = (
    "; no action is needed unless you install packages later: the next pip install of a package that requires torch "
    "may bring the required version back: envbuild fix --apply "
    "keeps the installed one, by changing what torch requires, if the required one has a known fault on the GPU (--gpu)"
)


def _notes(audited: Audit, found: Explanation | None, changes: Changes) -> Iterator[str]:
    held = audited.held
    kept = [pin.distribution for pin in changes.pins if pin.installed]
    removed = (*changes.uninstall, *changes.overwriting)
    torch = found.read.situation.torch if found else None
    present = held.installed.get("torch")
    place, option = ("this image", "--image") if audited.wanted.image else ("this environment", "--python")
    if not audited.wanted.gpus:
        yield NO_GPU
    if torch and present and torch.partition("+")[0] != present.partition("+")[0]:
        yield (
            f"the log shows torch {torch}, but {place} has {present}: no action is needed unless the job ran "
            f"in a different one; then name that one with {option}"
        )
    shown = {match.id for match in (*found.matches, *found.possible)} if found else set()
    if found and found.unknown and changes.empty and not _doubtful(found):
        yield "no known cause found in the log: run `envbuild explain` on it, which shows what to check next"
    for item in dict.fromkeys(
        (item.wanted, item.present, item.dependents)
        for item in library_and_distribution_findings.overwritten_libraries(held)
        if item.dependents
    ):
        wanted, overwriting, dependents = item
        required = library_and_distribution_findings.requirement_clause(dependents, overwriting)
        yield (
            f"{wanted} and {overwriting} contain the same files, and {required}: each installation of {overwriting} "
            "overwrites the files that torch requires; action needed: use two environments"
        )
    covered = [item for item in audited.findings if item.id in ("shadowed", "loaded-twice")]
    covered = [item for item in covered if _is_covered(item, audited, changes)]
    solved = tuple(  # the beginnings of warnings about libraries of which the changes leave one copy
        f"{library_and_distribution_findings.NAMES[copy.group]} is installed "
        for copy in held.libraries
        if any(str(copy) in item.message for item in covered)
    )
    for finding in audited.findings:
        if finding.id == "requirement-unmet" and finding.message.startswith(tuple(f"{name} " for name in removed)):
            continue
        if finding.id == "requirement-unmet" and finding.message.startswith("torch requires nvidia-"):
            if any(finding.message.startswith(f"torch requires {name}=") for name in kept):
                continue
            yield f"{finding.id}: {finding.message}{_MAY_REVERT}"
        elif finding.severity == "warn" and not finding.message.startswith(solved):
            action = f"only if this affects your program: {_with_own_pip(finding.remedy, held)}"
            yield f"{finding.id}: {finding.message}; {action if finding.remedy else 'no action is known'}"
        elif finding.severity == "note" and finding.message.startswith("on ") and finding.id not in shown:
            yield f"{finding.id}: {finding.message}; no action is needed unless the job runs on these GPU models"
