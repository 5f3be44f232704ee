"""Derives CUDA, torch's libraries, overrides of torch's pins, and advisories from a profile's GPUs and torch. Pure.

Advisories are checked twice: before an index is queried, with the exact versions in the profile, and later with the
locked versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from envbuild.facts import database, gpu_name_lookup, misleading_packages, mixed_gpu_settings
from envbuild.facts.advisory_model import Advisory, Situation
from envbuild.facts.database import TorchRelease
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.profile.loaded_profile import PIN, LoadedProfile
from envbuild.profile.model import Profile
from envbuild.resolve import minimum_driver
from envbuild.util.errors import Fault, near
from envbuild.util.json_output_types import AdvisoryRow
from envbuild.util.yaml_and_project_paths import Path

AppliedState = Literal["refused", "accepted", "warned", "noted"]
STATES: Mapping[str, AppliedState] = {"refuse": "refused", "warn": "warned", "note": "noted"}


@dataclass(frozen=True)
class Advice:
    """An advisory that applies to this profile."""

    advisory: Advisory
    state: AppliedState
    reason: str

    def __str__(self) -> str:
        fact = self.advisory
        return f"{fact.id}: {fact.title}. {fact.remedy} ({', '.join(fact.cite[:3])})"


@dataclass(frozen=True)
class Override:
    """A version that replaces a pin in torch's own metadata."""

    library: str
    distribution: str
    version: str
    torch_asks: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """The results derived from GPUs, torch and pins. `situation`: the known properties that advisories check. `driver`:
    the oldest driver that the image runs on."""

    situation: Situation
    driver: str | None
    pinned: Mapping[str, str]
    overrides: tuple[Override, ...]
    environment: Mapping[str, str]
    accepted: Mapping[str, str]
    advice: tuple[Advice, ...]
    faults: tuple[Fault, ...]

    @property
    def advisories(self) -> tuple[AdvisoryRow, ...]:
        """Every advisory that applies, for `--json`."""
        return tuple(AdvisoryRow(a.advisory.id, a.state, a.reason, a.advisory.remedy) for a in self.advice)

    def locked(self, versions: Mapping[str, str]) -> Choice:
        """The same choice with the locked versions (by distribution), and the advisories that then apply."""
        libraries = {**self.situation.libraries, **database.libraries_among(versions, self.situation.cuda)}
        now = replace(self.situation, libraries=libraries, distributions=versions)
        return replace(self, situation=now, advice=tuple(_advice(self.accepted, now)))


def choose_stack(loaded: LoadedProfile) -> Choice:
    """Derive the choice for a profile. Never raises: contradictions are collected in `faults`, to be reported
    together."""
    profile = loaded.profile
    faults: list[Fault] = []
    gpus = tuple(_gpus(loaded, faults))
    release = database.torch_release(profile.torch)
    faults += _torch(loaded, gpus, release)
    faults += _packages_with_other_torch(loaded)
    faults += _packages_with_other_libraries(loaded, release)
    pinned, overrides = _pins(loaded, release, faults)
    libraries = {
        **(database.libraries_of(release) if release else database.libraries_of_local_build(profile.torch)),
        **{k: profile.pins[k].version for k in profile.pins},
    }
    faults += _compat(loaded, gpus)
    situation = replace(
        stated(profile),
        gpus=gpus,
        libraries=libraries,
        distributions=_exact(profile),
        driver=_driver(loaded, release),
    )
    accepted = {item.advisory: item.reason for item in profile.accept}
    advice = tuple(_advice(accepted, situation))
    faults += _refusals(loaded, advice)
    oldest = minimum_driver.oldest(profile)
    return Choice(situation, oldest, pinned, overrides, _environment(gpus), accepted, advice, tuple(faults))


def stated(profile: Profile) -> Situation:
    """The situation given by the profile alone, without locked, measured or planned data."""
    release = database.torch_release(profile.torch)
    return Situation(
        torch=profile.torch,
        cuda=release.cuda if release else profile.cuda,
        gpu_count=profile.gpu_count,
        features=frozenset(profile.features),
        extensions=frozenset(one.name for one in profile.compiled),
        environment=frozenset({"cuda-compat"} if profile.driver.compat else ()),
    )


def _gpus(loaded: LoadedProfile, faults: list[Fault]) -> Iterator[Gpu]:
    platform = loaded.profile.platform
    for index, name in enumerate(loaded.profile.gpus):
        found, text = database.gpus().get(name), database.unsupported(name, platform)
        if found and not text:
            yield found
            continue
        if text is None:
            hint = gpu_name_lookup.question(name) or "docs/lines.md lists the known GPUs"
            text = f"unknown GPU {name!r} ({hint})"
        faults.append(loaded.document.fault(("gpus", index), text))


def _torch(loaded: LoadedProfile, gpus: tuple[Gpu, ...], release: TorchRelease | None) -> Iterator[Fault]:
    """Conflicts between torch and the profile's CUDA, Python and GPUs."""
    profile, fault = loaded.profile, loaded.document.fault
    if gpus and Version(profile.torch).local == "cpu":
        yield fault(("torch",), f"torch {profile.torch} has no GPU code; {gpus[0].id} needs a CUDA build")
        return
    if release is None:
        own = database.cuda_of_label(profile.torch)
        if profile.cuda and own is None:
            text = f"the CUDA version of torch {profile.torch} is not known, so it cannot be compared with cuda"
            known = sorted(database.torch_releases(), key=Version)
            yield fault(("torch",), f"{text}: use one of {known[0]} to {known[-1]}, or a profile without cuda")
        elif profile.cuda and own and profile.cuda != own:
            text = f"torch {profile.torch} is built for CUDA {own}, not {profile.cuda}"
            yield fault(("cuda",), f"{text}: {_agreeing_cuda(loaded, own, profile.cuda)}")
        return
    if profile.cuda and profile.cuda != release.cuda:
        text = f"torch {release.version} is built for CUDA {release.cuda}, not {profile.cuda}"
        yield fault(("cuda",), f"{text}: {_agreeing_cuda(loaded, release.cuda, profile.cuda)}")
    if profile.python not in release.pythons:
        names = ", ".join(release.pythons)
        yield fault(("python",), f"torch {release.version} has no wheel for Python {profile.python} (it has: {names})")
    for gpu in gpus:
        if release.kernels(gpu.compute_capability) is None and not _accepts(profile, _NO_KERNEL):
            fits = _fitting(gpu)
            yield fault(
                ("torch",),
                f"torch {release.version} has no kernels for {gpu.id} (capability {gpu.compute_capability}): its "
                f"wheel has {', '.join(release.arch_list)} ({release.arch_source[0]}); use torch {fits}",
            )


def _agreeing_cuda(loaded: LoadedProfile, own: str, cuda: str) -> str:
    """What to change if the key `cuda` contradicts torch, which is built for CUDA `own`."""
    if loaded.document.place(("torch",)).file == PIN:
        return f"add --pin cuda={own}"
    built = sorted((r.version for r in database.torch_releases().values() if r.cuda == cuda), key=Version)
    other = f", or use torch {' or '.join(built)}" if built else ""
    return f'write cuda: "{own}"{other}'


# A profile that accepts one of these advisories uses its own build of torch, which has the missing architecture.
_NO_KERNEL = frozenset({"no-kernel-image-blackwell", "volta-dropped"})


def _accepts(profile: Profile, ids: frozenset[str]) -> bool:
    return any(item.advisory in ids for item in profile.accept)


def _fitting(gpu: Gpu) -> str:
    """The oldest and the newest release with code compiled for a GPU: "2.8.0 to 2.10.0"."""
    fits = [r.version for r in database.torch_releases().values() if r.kernels(gpu.compute_capability) == "compiled"]
    fits.sort(key=Version)
    return f"{fits[0]} to {fits[-1]}" if fits else "(none is known)"


def _pins(
    loaded: LoadedProfile, release: TorchRelease | None, faults: list[Fault]
) -> tuple[dict[str, str], tuple[Override, ...]]:
    """Distribution -> version of every pin, and the pins that replace torch's own."""
    pinned: dict[str, str] = {}
    overrides = []
    required = release.requirements if release else {}
    for name, pin in loaded.profile.pins.items():
        if name == "torch":
            faults.append(
                loaded.document.fault(("pins", name), f"a pin does not change torch: write torch: {pin.version}")
            )
            continue
        distribution = database.distribution_of(name, release.cuda) if release else None
        if distribution is None:
            faults.append(loaded.document.fault(("pins", name), _unknown_pin(name, release)))
            continue
        assert release is not None
        other = database.of_another_cuda(name, release.cuda, pin.version)
        if other is not None:
            text = f"{name} {pin.version} is for CUDA {other}; torch {release.version} is built for CUDA {release.cuda}"
            faults.append(loaded.document.fault(("pins", name), f"{text} and uses {distribution}"))
        pinned[distribution] = pin.version
        wanted = required.get(distribution)
        if wanted is not None and not SpecifierSet(wanted).contains(pin.version, prereleases=True):
            reason = pin.reason or loaded.profile.why.get(name) or "set in the profile"
            overrides.append(Override(name, distribution, pin.version, wanted, reason))
    return pinned, tuple(overrides)


def _packages_with_other_torch(loaded: LoadedProfile) -> Iterator[Fault]:
    """A fault for each entry of `packages` that requires a version of torch which the profile does not have."""
    torch = loaded.profile.torch
    message = f"the profile has torch {torch}: change its key torch instead"
    for index, requirement in enumerate(map(Requirement, loaded.profile.packages)):
        if canonicalize_name(requirement.name) == "torch" and torch not in requirement.specifier:
            yield loaded.document.fault(("packages", index), message)


def _packages_with_other_libraries(loaded: LoadedProfile, release: TorchRelease | None) -> Iterator[Fault]:
    """A fault for each entry of `packages` that requires a CUDA library of another CUDA version than torch's, or a
    version of a library which torch, or the profile's pin, excludes."""
    if release is None:
        return
    required = release.exact_versions
    for index, requirement in enumerate(map(Requirement, loaded.profile.packages)):
        name = canonicalize_name(requirement.name)
        library = database.library_of(name)
        if library is None or requirement.marker:
            continue
        if database.is_cuda_library(name) and name != database.distribution_of(library, release.cuda):
            text = f"torch {release.version} is built for CUDA {release.cuda}, and has its own {library}"
            yield loaded.document.fault(("packages", index), f"{text}: leave {name} out")
            continue
        if name not in required:
            continue
        pin = loaded.profile.pins.get(library)
        torch = f"torch {release.version} requires"
        version, whose = (pin.version, "the profile pins") if pin else (required[name], torch)
        if not requirement.specifier.contains(version, prereleases=True):
            message = f"{whose} {library} {version}: to change it, write the version under pins: {library}"
            yield loaded.document.fault(("packages", index), message)


_PACKAGES = "to pin any other package, add NAME==VERSION to `packages`"


def _unknown_pin(name: str, release: TorchRelease | None) -> str:
    meant = misleading_packages.refusal_reason(name)
    if meant:
        return meant
    if release is None:
        return f"libraries can only be pinned for a known release of torch; {_PACKAGES}"
    known = [row for row in database.libraries() if row != "torch" and database.distribution_of(row, release.cuda)]
    return f"no such library for CUDA {release.cuda} ({near(name, known) or ', '.join(known)}); {_PACKAGES}"


def _driver(loaded: LoadedProfile, release: TorchRelease | None) -> str | None:
    """The oldest driver that advisories must consider: the profile's minimum, otherwise the oldest driver that runs
    this CUDA by minor-version compatibility."""
    declared = loaded.profile.driver.minimum
    return declared or (database.driver_minimum(release.cuda).compatible if release and loaded.profile.gpus else None)


def _compat(loaded: LoadedProfile, gpus: tuple[Gpu, ...]) -> Iterator[Fault]:
    """A fault if the profile has forward-compatibility libraries and lists GPUs whose driver refuses them, or no
    GPU."""
    if loaded.profile.driver.compat is None:
        return
    others = [gpu.id for gpu in gpus if not gpu.datacentre]
    if others:
        cited = ", ".join(next(item.cite for item in database.advisories() if item.id == _NO_COMPAT)[:2])
        text = f"{_FOR_DATACENTRE}; on {', '.join(others)}, CUDA can fail with error 804 ({cited})"
        yield loaded.document.fault(("driver", "compat"), text)
    elif not loaded.profile.gpus:
        text = f"{_FOR_DATACENTRE}, and this profile lists no GPU: remove driver: compat"
        yield loaded.document.fault(("driver", "compat"), text)


_FOR_DATACENTRE = "forward-compatibility libraries are for datacentre GPUs"
_NO_COMPAT = "error-804-forward-compat"


def _environment(gpus: tuple[Gpu, ...]) -> dict[str, str]:
    """The image's variables for NVIDIA's container toolkit, for compiling extensions, and for a mix of GPU models."""
    if not gpus:
        return {}
    capabilities = sorted({gpu.compute_capability for gpu in gpus}, key=Version)
    return {
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "TORCH_CUDA_ARCH_LIST": ";".join(capabilities),
        **{setting.variable: setting.value for setting in mixed_gpu_settings.mixed_gpu_settings(gpus)},
    }


def _exact(profile: Profile) -> dict[str, str]:
    """Versions of packages that the profile itself pins exactly; the others are known only after locking."""
    found: dict[str, str] = {}
    for text in profile.packages:
        name, _, version = text.partition("==")
        if version and not set(version) & set(",*; "):
            found[canonicalize_name(name)] = version
    return found


def _advice(accepted: Mapping[str, str], situation: Situation) -> Iterator[Advice]:
    for advisory in database.matching(situation):
        if not advisory.decidable:
            continue
        if advisory.severity != "note" and advisory.id in accepted:
            yield Advice(advisory, "accepted", accepted[advisory.id])
        else:
            yield Advice(advisory, STATES[advisory.severity], advisory.title)


def _refusals(loaded: LoadedProfile, advice: tuple[Advice, ...]) -> Iterator[Fault]:
    ids = {item.id for item in database.advisories()}
    for index, item in enumerate(loaded.profile.accept):
        if item.advisory not in ids:
            hint = near(item.advisory, ids)
            message = f"unknown advisory {item.advisory!r}{f' ({hint})' if hint else ''}"
            yield loaded.document.fault(("accept", index, "advisory"), message)
    for given in advice:
        if given.state == "refused":
            yield loaded.document.fault(_blamed(loaded, given.advisory), str(given))


def _blamed(loaded: LoadedProfile, advisory: Advisory) -> Path:
    """The path in the profile at which a refusal is reported: the pin that the advisory changes, otherwise torch."""
    for name in advisory.change.pins:
        if ("pins", name) in loaded.document.places:
            return ("pins", name)
    return ("torch",)
