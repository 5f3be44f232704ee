"""Chooses the compiler toolchain and GPU architectures for a profile's extensions, before anything is downloaded.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.version import Version

from envbuild.facts import database, extension_compilers, probe_catalogue_reader
from envbuild.facts.database import Suite
from envbuild.profile.extension_spec import BUILD_TOOLS, Extension
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve.nvcc_source import Toolchain
from envbuild.util.errors import Fault


@dataclass(frozen=True)
class ExtensionRequest:
    """An extension to compile. `at`: its position in the profile; `places`: the positions of the variables in
    build.env."""

    extension: Extension
    at: Fault
    places: Mapping[str, Fault]


@dataclass(frozen=True)
class ExtensionToolchain:
    """The toolchain for a profile's extensions. `arch`: TORCH_CUDA_ARCH_LIST, with the architectures of the profile's
    GPUs; `requires`: packages for the builds; `wanted`: the extensions."""

    toolchain: Toolchain
    arch: str
    requires: tuple[str, ...]
    wanted: tuple[ExtensionRequest, ...]

    @property
    def inputs(self) -> list[object]:
        """The inputs of the extensions' part of a lock, without URLs."""
        archive, debian = self.toolchain.archive, self.toolchain.debian
        return [
            self.arch,
            self.toolchain.home,
            list(self.toolchain.requirements),
            [archive.name, archive.sha256, archive.fits] if archive else None,
            list(self.requires),
            [_extension_inputs(item.extension) for item in self.wanted],
            *([[list(debian.packages), list(debian.components), dict(debian.environment)]] if debian else []),
        ]


def _extension_inputs(extension: Extension) -> list[object]:
    build = extension.build
    return [extension.name, extension.source, dict(build.env), list(build.settings), list(extension.modules)]


def choose_extension_toolchain(loaded: LoadedProfile, toolchain: Toolchain, arch: str) -> ExtensionToolchain | None:
    """The toolchain for a profile's extensions; None if the profile compiles no extension."""
    named = enumerate(loaded.profile.extensions)
    wanted = tuple(_wanted(loaded, index, one) for index, one in named if one.none is None)
    tools = {text for item in wanted for text in (*BUILD_TOOLS, *item.extension.build.requires)}
    return ExtensionToolchain(toolchain, arch, tuple(sorted(tools)), wanted) if wanted else None


def _wanted(loaded: LoadedProfile, index: int, extension: Extension) -> ExtensionRequest:
    fault = loaded.document.fault
    here = ("extensions", index)
    places = {name: fault((*here, "build", "env", name), "") for name in extension.build.env}
    return ExtensionRequest(extension, fault(here, ""), places)


def toolchain_contradictions(loaded: LoadedProfile, suite: Suite | None, cuda: str | None) -> Iterator[Fault]:
    """Contradictions known before the build: required probes of a missing extension, no GPU to compile for, a compiler
    that nvcc refuses."""
    yield from _without_extension(loaded)
    compiled = [index for index, one in enumerate(loaded.profile.extensions) if one.none is None]
    if not compiled:
        return
    fault = loaded.document.fault
    # a CPU build of torch is reported elsewhere
    if not loaded.profile.gpus and Version(loaded.profile.torch).local != "cpu":
        yield fault(("extensions", compiled[0]), "extensions are compiled for the profile's GPUs, but gpus is empty")
    bound = extension_compilers.hosts().get(cuda) if cuda else None
    own = loaded.profile.toolchain == "debian"  # Debian's nvcc comes with a matching g++
    if suite and bound and suite.gcc >= bound.gcc_below and not own:
        fits = [f"{s.name} (g++ {s.gcc})" for s in database.suites().values() if s.gcc < bound.gcc_below]
        yield fault(
            ("base", "bootstrap"),
            f"{suite.name} has g++ {suite.gcc}, but nvcc of CUDA {cuda} needs g++ below {bound.gcc_below}: "
            f"use {' or '.join(fits)}, or a torch release for a newer CUDA",
        )


def _without_extension(loaded: LoadedProfile) -> Iterator[Fault]:
    """Faults for required probes of an extension that the profile does not compile, such as `norm.apex` of apex. The
    extension may be missing because a child profile's list replaces that of its parent."""
    required = loaded.profile.selftest.require
    for extension in probe_catalogue_reader.EXTENSIONS - {one.name for one in loaded.profile.compiled}:
        named = [index for index, name in enumerate(required) if name.endswith(f".{extension}")]
        if named:
            place = loaded.document.place(("selftest", "require", named[0]))
            probes = " and ".join(required[index] for index in named)
            message = (
                f"{probes} must pass ({place.file}:{place.line}), but the profile does not compile {extension}: add it "
                "to extensions (this list replaces that of the extended profile), or require other probes"
            )
            given = "extensions" in loaded.document.data
            yield loaded.document.fault(("extensions",) if given else ("selftest", "require", named[0]), message)
