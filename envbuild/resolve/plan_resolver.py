"""Turns profile and facts into a plan, with the reason for each choice. Pure: no network, no clock, no files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuild.facts import database, probe_catalogue_reader
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.fetch.archive_spec import COMPAT, ArchiveRequest
from envbuild.profile import inherited_value_reasons, profile_and_lock_name_lookup
from envbuild.profile.extension_spec import Extension
from envbuild.profile.loaded_profile import PIN, LoadedProfile
from envbuild.profile.model import Profile
from envbuild.profile.value_types import StartupFile
from envbuild.resolve import advisory_remedy, extension_toolchain_and_contradictions, nvcc_source
from envbuild.resolve.extension_toolchain_and_contradictions import ExtensionToolchain
from envbuild.resolve.nvcc_source import Toolchain
from envbuild.resolve.torch_compatibility_and_advisories import Advice, Choice, choose_stack
from envbuild.util.errors import Fault, ProfileError, UsageError
from envbuild.util.json_output_types import AdvisoryRow, plain
from envbuild.util.yaml_and_project_paths import Place, display

VENV = "/opt/venv"

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of a container whose image sets none."""
# HOME and the compilers' caches must be writable for any uid, also with a read-only root file system. torch looks up
# the user's name (pytorch/pytorch#140765), so USER is set. A profile's own values take precedence.
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": f"{VENV}/bin:{SEARCH_PATH}",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor",
    "TRITON_CACHE_DIR": "/tmp/triton",
    "USER": "envbuild",
    "VIRTUAL_ENV": VENV,
}
# Variables that a base image may have set.
_UNSET = {"PYTHONHOME": "", "PYTHONPATH": ""}
# pip is installed in the environment, so that a child image's `RUN pip install` works.
TOOLS = ("pip",)
# The variable with the GPU architectures for which extensions are compiled, in child images too.
ARCH_LIST = "TORCH_CUDA_ARCH_LIST"


def computing(versions: Mapping[str, str]) -> dict[str, str]:
    """The versions without pip, which may have any version in an environment outside our images."""
    return {name: version for name, version in versions.items() if name not in TOOLS}


@dataclass(frozen=True)
class Plan:
    """The inputs of a lock, before any package index or mirror is queried.

    `suite` or `image`: the base; `toolchain`: the CUDA toolkit that stays in the image; `extension_toolchain`: the
    toolkit that compiles extensions; `extensions`: name -> id of the source, None for an extension that is left out.
    `cli_words`, `notes`: as in LoadedProfile. `why`: as in Profile."""

    name: str
    cli_words: str
    platform: str
    python: str
    glibc: str
    suite: str | None
    image: str | None
    base_packages: tuple[str, ...]
    apt: tuple[str, ...]
    core: tuple[str, ...]
    packages: tuple[str, ...]
    constraints: tuple[str, ...]
    overrides: tuple[str, ...]
    environment: Mapping[str, str]
    choice: Choice
    toolchain: Toolchain | None = None
    startup: tuple[StartupFile, ...] = ()
    archives: tuple[ArchiveRequest, ...] = ()
    extension_toolchain: ExtensionToolchain | None = None
    extensions: Mapping[str, str | None] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def inputs(self) -> dict[str, object]:
        """The inputs of each part of a lock. A part with unchanged inputs keeps its locked content, unless an upgrade
        is requested or the mirrors have moved on."""
        return {
            "base": [self.platform, self.suite, self.image, list(self.base_packages)],
            "apt": list(self.apt),
            "wheels": [
                self.python,
                self.glibc,
                list(self.core),
                list(self.packages),
                *([list(self.constraints), list(self.overrides)] if self.constraints or self.overrides else []),
                *([{"toolchain": list(self.toolchain.requirements)}] if self.toolchain else []),
            ],
            "environment": dict(self.environment),
            **({"startup": [[file.file, file.sha256] for file in self.startup]} if self.startup else {}),
            **({"archives": [[a.name, a.sha256, a.fits] for a in self.archives]} if self.archives else {}),
            **({"extensions": self.extension_toolchain.inputs} if self.extension_toolchain else {}),
        }

    @property
    def advisories(self) -> tuple[AdvisoryRow, ...]:
        """Every advisory that applies, with its state: refused, accepted, warned or noted."""
        return self.choice.advisories

    def place(self, name: str) -> Place | None:
        """The position in the profile of the requirement for a distribution (normalised name). For any other name, such
        as a dependency of torch, the position of torch."""
        requirements = (text for text in self.packages if canonicalize_name(Requirement(text).name) == name)
        return self.places.get(next(requirements, self.core[-1]))

    def faults(self, message: str) -> list[Fault]:
        """A fault for each of the profile's requirements that a resolver's message names, with its position."""
        words = set(re.split(r"[^A-Za-z0-9+.-]+", message.replace("==", " ")))
        named = [text for text in self.places if re.split(r"[^A-Za-z0-9+.-]", text)[0] in words]
        return [Fault(text, self.places[text].file, self.places[text].line) for text in named]


# The glibc of a base image is unknown before the image is pulled. Wheels are chosen for the oldest glibc that torch's
# wheels support.
_IMAGE_GLIBC = "2.28"


def glibc_of_base(suite: str | None) -> str:
    """Return the version of glibc for which the wheels of an image are chosen. `suite`: that of Debian; None on a base
    image."""
    return database.suites()[suite].glibc if suite else _IMAGE_GLIBC


def resolve(loaded: LoadedProfile) -> Plan:
    """Resolve a profile to a plan. Raises ProfileError with every contradiction in the profile."""
    profile = loaded.profile
    suite = database.suites()[profile.base.bootstrap] if profile.base.bootstrap else None
    choice = choose_stack(loaded)
    chosen = nvcc_source.choose_toolchain(
        loaded, choice.situation.cuda, f"{VENV}/lib/python{profile.python}/site-packages"
    )
    refused = [chosen] if isinstance(chosen, Fault) else []
    unbuildable = extension_toolchain_and_contradictions.toolchain_contradictions(loaded, suite, choice.situation.cuda)
    faults = [*_contradictions(loaded, profile, suite, choice.situation.gpus), *choice.faults, *refused, *unbuildable]
    if faults:
        refusals = {str(item) for item in choice.advice if item.state == "refused"}  # these have their own hint
        others = [fault for fault in faults if fault.message not in refusals]
        hints = [_way_out(loaded, choice), _inherited_values(loaded, others), _other_lines(loaded, faults)]
        raise _refusal(loaded.name, choice, faults, hint="\n".join(filter(None, hints)) or None)
    overridden = {override.distribution for override in choice.overrides}
    compiler = chosen if isinstance(chosen, Toolchain) else None
    kept = compiler if profile.variant == "devel" else None
    return Plan(
        name=loaded.name,
        cli_words=loaded.cli_words,
        platform=profile.platform,
        python=profile.python,
        glibc=glibc_of_base(profile.base.bootstrap),
        suite=suite.name if suite else None,
        image=profile.base.image,
        base_packages=database.base_packages(bool(choice.situation.gpus)) if suite else (),
        apt=tuple(sorted(set(profile.apt))),
        core=(*TOOLS, _torch(profile)),
        packages=tuple(profile.packages),
        constraints=(
            *(f"{name}=={version}" for name, version in choice.pinned.items() if name not in overridden),
            *loaded.constraints,
        ),
        overrides=tuple(f"{name}=={choice.pinned[name]}" for name in sorted(overridden)),
        environment=dict(sorted({**_environment(suite, choice, kept), **profile.env}.items())),
        choice=choice,
        toolchain=kept,
        startup=tuple(StartupFile(file.file, file.sha256) for file in profile.startup),
        archives=tuple(_archives(loaded, choice, kept)),
        extension_toolchain=extension_toolchain_and_contradictions.choose_extension_toolchain(
            loaded, compiler, choice.environment.get(ARCH_LIST, "")
        )
        if compiler
        else None,
        extensions={one.name: one.source for one in profile.extensions},
        reasons=_reasons(loaded, suite, choice),
        why=profile.why,
        places=_places(loaded, choice, kept),
        notes=loaded.notes,
    )


def _environment(suite: database.Suite | None, choice: Choice, kept: Toolchain | None) -> dict[str, str]:
    compiler = kept.environment(ENVIRONMENT["PATH"]) if kept else {}
    return {**ENVIRONMENT, **({} if suite else _UNSET), **choice.environment, **compiler}


def _archives(loaded: LoadedProfile, choice: Choice, kept: Toolchain | None) -> Iterator[ArchiveRequest]:
    """The archives to unpack in the image. The toolkit comes first, because the folder of the compatibility libraries
    is inside that of the toolkit."""
    if kept and kept.archive:
        yield kept.archive
    compat = loaded.profile.driver.compat
    if compat:
        oldest = database.driver_minimum(choice.situation.cuda).compatible if choice.situation.cuda else None
        at = loaded.document.fault(("driver", "compat"), "")
        yield ArchiveRequest(COMPAT, compat.sha256, compat.url, f">={oldest}" if oldest else "", at)


def as_locked(plan: Plan, versions: Mapping[str, str]) -> Choice:
    """The plan's choice with the locked versions (distribution -> version).

    Raises ProfileError if an advisory refuses one of these versions.
    """
    choice = plan.choice.locked(versions)
    faults = [_locked_fault(plan, choice, item) for item in choice.advice if item.state == "refused"]
    if faults:
        raise _refusal(plan.name, choice, faults, hint=_OTHERWISE)
    return choice


def _way_out(loaded: LoadedProfile, choice: Choice) -> str | None:
    """A hint with the nearest versions that fit the refusing advisories: as --pin options if the user gave such
    options, otherwise as profile values."""
    found: dict[str, Any] = {}
    unpinned = (
        choose_stack(loaded.unpinned).situation if any(item.state == "refused" for item in choice.advice) else None
    )
    for item in choice.advice:
        if item.state == "refused":
            found |= advisory_remedy.written(item.advisory.change, choice.situation, unpinned)
    if not found:
        return None
    if any(place.file == PIN for place in loaded.document.places.values()):
        own = {key: found[key] for key in ("torch", *(["cuda"] if loaded.profile.cuda else [])) if key in found}
        return " ".join(f"--pin {name}={version}" for name, version in {**own, **found.get("pins", {})}.items()) or None
    return f"in the profile: {'; '.join(advisory_remedy.yaml_lines(found))}"


def _inherited_values(loaded: LoadedProfile, faults: Sequence[Fault]) -> str | None:
    """A hint with the inherited keys that must change, because the faults name the file of the profile that this one
    extends. None if no such key is inherited."""
    own = display(loaded.file)
    keys = {re.sub(r"\[\d+\].*", "", fault.field) for fault in faults if fault.field and fault.file not in (own, PIN)}
    if loaded.meant and loaded.meant.requirements:
        keys.discard("packages")  # of the requirements file
    if loaded.parent is None or not keys:
        return None
    return f"{own} inherits {', '.join(sorted(keys))}: to replace inherited values, write these keys there"


_OF_A_LINE = re.compile(r"(torch|cuda|driver|extensions|pins)\b")


def _other_lines(loaded: LoadedProfile, faults: Sequence[Fault]) -> str | None:
    """A hint with the profiles of other CUDA versions for the GPU whose profile this one extends, if a fault concerns a
    key in which they differ."""
    lines = profile_and_lock_name_lookup.lines_of(loaded.parent) if loaded.parent else {}
    if not lines or not any(_OF_A_LINE.match(fault.field or "") for fault in faults):
        return None
    return f"for another CUDA version or an older driver: extends: {' or '.join(lines.values())}"


_OTHERWISE = "set a different version in the profile's packages or pins, or add the advisory to accept, with a reason"


def _locked_fault(plan: Plan, choice: Choice, advice: Advice) -> Fault:
    met = advice.advisory.met_by(choice.situation)
    place = plan.place(next(iter(met), ""))
    named = ", ".join(f"{name} {version}" for name, version in met.items())
    return Fault(f"locked {named}: {advice}" if named else str(advice), *((place.file, place.line) if place else ()))


def _refusal(name: str, choice: Choice, faults: list[Fault], hint: str | None = None) -> ProfileError:
    refusal = ProfileError(f"profile {name} is refused", hint=hint, faults=faults)
    refusal.partial = {"profile": name, "advisories": plain(choice.advisories)}
    return refusal


def pinned_distribution(plan: Plan, pin: str) -> str:
    """The distribution for the name of a pin: torch, a package of the profile, or the wheel of a library.

    Raises UsageError for any other name.
    """
    name = canonicalize_name(pin)
    if name in {"torch", *(canonicalize_name(Requirement(text).name) for text in plan.packages)}:
        return name
    found = database.distribution_of(pin, plan.choice.situation.cuda) if plan.choice.situation.cuda else None
    if found is None:
        raise UsageError(
            f"{pin} is neither torch, nor a package of {plan.name}, nor a known CUDA library",
            hint=f"see: envbuild show {plan.cli_words}",
        )
    return found


def _torch(profile: Profile) -> str:
    """The requirement for torch. For GPUs it uses ===, because ==2.13.0 would also accept 2.13.0+cpu from find-links
    (PEP 440)."""
    exact = "===" if profile.gpus and "+" not in profile.torch else "=="
    return f"torch{exact}{profile.torch}"


def _contradictions(
    loaded: LoadedProfile, profile: Profile, suite: database.Suite | None, gpus: Sequence[Gpu]
) -> list[Fault]:
    found = []
    where = loaded.document.fault
    if suite and suite.python != profile.python:
        fits = ", ".join(f"{s.name} {s.python}" for s in database.suites().values())
        found.append(where(("python",), f"{suite.name} has Python {suite.python}, not {profile.python} ({fits})"))
    for index, name in enumerate(profile.selftest.require):
        probe = probe_catalogue_reader.known_probes().get(name)
        if probe is None:
            found.append(where(("selftest", "require", index), probe_catalogue_reader.unknown_probe(name)))
        elif probe.needs == "cuda" and not profile.gpus:
            found.append(where(("selftest", "require", index), f"{name} needs a GPU; this profile is for the CPU"))
        elif probe.needs == "script" and profile.selftest.script is None:
            found.append(where(("selftest", "require", index), f"{name} needs selftest.script, which is not given"))
        else:
            least = "{}.{}".format(*probe.least_capability)
            older = [f"{gpu.id} has {gpu.compute_capability}" for gpu in gpus if _below(gpu, probe.least_capability)]
            if older:
                message = (
                    f"{name} needs compute capability {least} ({', '.join(older)}): remove it from selftest.require"
                )
                found.append(where(("selftest", "require", index), message))
    for name in _UNSET.keys() & set(profile.env):
        found.append(where(("env", name), "Python would then prefer other packages to the locked and tested ones"))
    if f"{VENV}/bin" not in profile.env.get("PATH", f"{VENV}/bin").split(":"):
        found.append(where(("env", "PATH"), f"must contain {VENV}/bin, which has the image's Python"))
    for name in profile.why:
        if not inherited_value_reasons.named_values(loaded.document.data, name):
            found.append(
                where(("why", name), f"the profile sets no key, library, package or variable {name} to explain")
            )
        elif name in profile.pins and profile.pins[name].reason:
            found.append(where(("why", name), f"pins.{name} has a reason already: keep one of the two"))
    if profile.apt and not suite:
        found.append(where(("apt",), "Debian packages need a bootstrap base; put them into the base image instead"))
    return found


def _below(gpu: Gpu, least: tuple[int, int]) -> bool:
    major, minor = gpu.compute_capability.split(".")
    return (int(major), int(minor)) < least


def _places(loaded: LoadedProfile, choice: Choice, kept: Toolchain | None) -> dict[str, Place]:
    """The position of each requirement, pin and Debian package in the profile."""
    profile, place = loaded.profile, loaded.document.place
    found = {_torch(profile): place(("torch",))}
    found |= {text: place(("packages", index)) for index, text in enumerate(profile.packages)}
    found |= {text: place(("apt", index)) for index, text in enumerate(profile.apt)}
    pins = {f"{name}=={version}": database.library_of(name) for name, version in choice.pinned.items()}
    found |= {text: place(("pins", str(name))) for text, name in pins.items()}
    found |= {text: place(("variant",)) for text in (kept.requirements if kept else ())}
    return found


def _reasons(loaded: LoadedProfile, suite: database.Suite | None, choice: Choice) -> dict[str, str]:
    def stated(*path: str | int) -> str:
        place = loaded.document.place(path)
        return f"{place.file}:{place.line}"

    packages = enumerate(loaded.profile.packages)
    return {
        "python": stated("python") + (f"; Debian {suite.name}'s own" if suite else ""),
        "pip": "so that pip works in child images",
        "torch": stated("torch"),
        **{canonicalize_name(Requirement(text).name): stated("packages", index) for index, text in packages},
        **_libraries(loaded, choice),
        **{one.name: _compiled(one, stated("extensions", i)) for i, one in enumerate(loaded.profile.extensions)},
    }


def _compiled(one: Extension, where: str) -> str:
    return f"{where}; {f'none: {one.none}' if one.none else 'compiled from source'}"


def required_by(torch: str) -> str:
    return f"required by torch {torch}"


def _libraries(loaded: LoadedProfile, choice: Choice) -> dict[str, str]:
    """The reason for each CUDA library's version: torch's metadata, or a pin of the profile."""
    overrides = {override.library: override for override in choice.overrides}
    found = dict.fromkeys(choice.situation.libraries, required_by(loaded.profile.torch))
    for name in loaded.profile.pins:
        place = loaded.document.place(("pins", name))
        found[name] = f"{place.file}:{place.line}"
        if name in overrides:
            found[name] += f", overriding torch's {overrides[name].torch_asks}: {overrides[name].reason}"
        elif loaded.profile.pins[name].reason:
            found[name] += f"; {loaded.profile.pins[name].reason}"
    return found
