"""Facts: what is known of suites, GPUs, CUDA, torch and faults. Data files, read once; a site adds its own.

Every function raises FactsError with all that is malformed, each with file and line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass as plain
from functools import cache
from typing import Annotated, Literal, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import Field
from pydantic.dataclasses import dataclass

from envbuild.facts import fact_file_reader, torch_cuda_arch_list_parser
from envbuild.facts.advisory_matching import Advisory, Situation, holding
from envbuild.facts.fact_field_types import STRICT, Capability, FactRow, Name, Release, Sources, Specifier, Status, Text
from envbuild.facts.gpu_models import Gpu


@plain(frozen=True)
class Suite:
    """A Debian release: the Python it carries, its C library's version, and the major version of its g++."""

    name: str
    python: str
    glibc: str
    gcc: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Toolkit(FactRow):
    """A CUDA toolkit release, the cuBLAS it carries and the driver that came with it."""

    release: Release
    cublas: Release
    driver: Release | None = None
    driver_status: Status | None = None
    caution: Text | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Compatible(FactRow):
    major: int
    minimum: Release
    caution: Text | None = None


class DriverMinimum(NamedTuple):
    """`exact`: the driver that came with the toolkit. `compatible`: the oldest that runs its major version, within
    limits (no PTX of a newer toolkit). None where unknown."""

    exact: str | None
    compatible: str | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TorchRelease(FactRow):
    """A torch release as the index has it for Linux x86_64. `pins`, `expands_to`: distribution -> specifier."""

    version: Release
    cuda: Release
    requires_python: Specifier
    pythons: tuple[Annotated[str, Field(pattern=r"^3\.[0-9]{1,2}t?$")], ...]
    arch_list: tuple[Capability, ...]
    ptx: bool
    arch_source: Sources
    arch_status: Status
    pins: Mapping[str, Specifier]
    toolkit_extras: tuple[str, ...] = ()
    expands_to: Mapping[str, Specifier] = Field(default_factory=dict)
    note: Text | None = None

    def kernels(self, compute_capability: str) -> Literal["compiled", "ptx"] | None:
        """How this build serves a card: as architectures.serves says of its list, PTX being of the last one alone."""
        codes = [arch.replace(".", "") for arch in self.arch_list]
        ptx = [f"compute_{codes[-1]}"] if self.ptx else []
        return torch_cuda_arch_list_parser.serves([*(f"sm_{code}" for code in codes), *ptx], compute_capability)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TorchIndex(FactRow):
    """PyTorch's own index of builds with a local label, for which {build} stands in `address`."""

    address: Annotated[str, Field(pattern=r"^https://[!-~]+$")]
    packages: tuple[Name, ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Library(FactRow):
    """A short name, the distribution that carries it for each CUDA, and the versions known to exist of those."""

    name: Name
    distributions: Mapping[str, Name]
    versions: Mapping[str, tuple[Release, ...]] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class XidError(FactRow):
    """An error of the driver's in the kernel's log. `application`: a program's doing, no fault of the card."""

    number: int
    title: Text
    application: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Namespace(FactRow):
    """The text of an __init__.py that several distributions may install, each in its own form."""

    text: Annotated[str, Field(max_length=600)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KnownStartup(FactRow):
    """A file that runs code whenever Python starts, known as the work of this distribution; None: of no distribution,
    but the system's own."""

    distribution: Name | None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    what: Text


@cache
def namespace_texts() -> frozenset[bytes]:
    """What an __init__.py may hold that several distributions install: nothing else, to the byte."""
    rows = fact_file_reader.rows("packages", "namespaces", Namespace)
    return frozenset(f"{row.text}{end}".encode() for row in rows for end in ("", "\n"))


@cache
def startup_files() -> tuple[KnownStartup, ...]:
    return fact_file_reader.rows("packages", "startup", KnownStartup)


@cache
def xids() -> Mapping[int, XidError]:
    return {row.number: row for row in fact_file_reader.rows("xids", "xids", XidError)}


@cache
def suites() -> Mapping[str, Suite]:
    return {
        name: Suite(name, row["python"], row["glibc"], row["gcc"])
        for name, row in fact_file_reader.read("debian").data["suites"].items()
    }


@cache
def base_packages(gpu: bool = False) -> tuple[str, ...]:
    """What a base holds; for a GPU also what torch needs at run time: a compiler, headers, RDMA libraries."""
    data = fact_file_reader.read("debian").data
    return (*data["packages"], *(data["gpu_packages"] if gpu else ()))


def advisories() -> tuple[Advisory, ...]:
    """The shipped ones, then the site's."""
    return fact_file_reader.extensible().advisories


def matching(situation: Situation) -> list[Advisory]:
    """The advisories that hold in a situation, the severe ones first."""
    return holding(advisories(), situation)


def gpus() -> Mapping[str, Gpu]:
    """GPU models by id, the shipped ones first."""
    return fact_file_reader.extensible().gpus


def gpu_by_name(name: str) -> Gpu | None:
    """The model that a driver's name means: whole names only, 'NVIDIA H20' is no 'NVIDIA H200'. A MIG slice is its
    card's model. Names that no source confirms are taken too."""
    known = fact_file_reader.extensible()
    return known.names.get(known.mig.sub("", name))


OLDEST_CAPABILITY = "7.0"
"""The oldest compute capability that envbuild builds for."""


def unsupported(name: str, platform: str) -> str | None:
    """Why no image of this platform can serve a GPU of the facts; None where one can, or for another name."""
    gpu = gpus().get(name)
    if gpu is None:
        return None
    reasons = [gpu.unsupported] if gpu.unsupported else []
    if f"linux/{gpu.host}" != platform:
        reasons = [f"{name} has an {gpu.host} host, and envbuild builds {platform} images only", *reasons]
    if Version(gpu.compute_capability) < Version(OLDEST_CAPABILITY):
        reasons.append(
            f"{name} has compute capability {gpu.compute_capability}, and envbuild builds for {OLDEST_CAPABILITY} and "
            f"newer; {_last_torch(gpu.compute_capability)}"
        )
    return f"unsupported: {'; '.join(reasons)}" if reasons else None


def _last_torch(compute_capability: str) -> str:
    fits = [row.version for row in torch_releases().values() if row.kernels(compute_capability) == "compiled"]
    return f"the last torch with code for it is {max(fits, key=Version)}" if fits else "no known torch has code for it"


def family(gpu: Gpu) -> tuple[Gpu, ...]:
    """The models that share a proof with this one, itself included."""
    return tuple(other for other in gpus().values() if other.family == gpu.family)


@cache
def toolkits() -> Mapping[str, Toolkit]:
    return {row.release: row for row in fact_file_reader.rows("cuda", "toolkits", Toolkit)}


@cache
def _compatible() -> Mapping[int, str]:
    return {row.major: row.minimum for row in fact_file_reader.rows("cuda", "compatible", _Compatible)}


def driver_minimum(cuda: str) -> DriverMinimum:
    """For a CUDA version as torch says it ("12.4", its first release) or a toolkit's ("12.4.1")."""
    try:
        release = Version(cuda).release
    except InvalidVersion:
        return DriverMinimum(None, None)
    toolkit = toolkits().get(".".join(map(str, (*release, 0, 0)[:3])))
    return DriverMinimum(toolkit.driver if toolkit else None, _compatible().get(release[0]))


@cache
def torch_releases() -> Mapping[str, TorchRelease]:
    return {row.version: row for row in fact_file_reader.rows("torch", "releases", TorchRelease)}


@cache
def torch_index() -> TorchIndex:
    found: TorchIndex = fact_file_reader.rows("torch", "indexes", TorchIndex)[0]
    return found


def torch_release(version: str) -> TorchRelease | None:
    """None for a release without a row, and for every local build: 2.13.0+cpu has no GPU code, 2.5.0+cu121 has other
    libraries than 2.5.0."""
    return torch_releases().get(version)


@cache
def libraries() -> Mapping[str, Library]:
    return {row.name: row for row in fact_file_reader.rows("libraries", "libraries", Library)}


def distribution_of(library: str, cuda: str) -> str | None:
    """cublas and 12.1 -> nvidia-cublas-cu12."""
    row = libraries().get(library)
    return row.distributions.get(cuda.partition(".")[0]) if row else None


def library_of(distribution: str) -> str | None:
    """nvidia-cublas -> cublas."""
    name = canonicalize_name(distribution)
    return next((row.name for row in libraries().values() if name in row.distributions.values()), None)


def is_cuda_library(distribution: str) -> bool:
    """Whether this is a library that comes for each CUDA under a name of its own."""
    row = libraries().get(library_of(distribution) or "")
    return row is not None and len(set(row.distributions.values())) > 1


def libraries_among(versions: Mapping[str, str], cuda: str | None) -> dict[str, str]:
    """Short name -> version of the distributions that carry a library, where CUDA is known for that one alone."""
    held: dict[str, str] = {canonicalize_name(name): version for name, version in versions.items()}
    return {
        row.name: held[distribution]
        for row in libraries().values()
        for major, distribution in row.distributions.items()
        if distribution in held and (cuda is None or major == cuda.partition(".")[0])
    }


def known_versions(distribution: str) -> tuple[str, ...]:
    """Those the index is known to have, oldest first; none where nothing is known."""
    name = canonicalize_name(distribution)
    return next((row.versions[name] for row in libraries().values() if name in row.versions), ())


def of_another_cuda(library: str, cuda: str, version: str) -> str | None:
    """The CUDA release (major number) whose wheels of a library begin with this version's first number, where those for
    `cuda` never do; None where that is not known, or not so. Judged by the versions that the facts know."""
    majors: dict[str, set[int]] = {}
    for major, distribution in libraries()[library].distributions.items():
        asked = (
            f"{row.expands_to.get(distribution, '')},{row.pins.get(distribution, '')}"
            for row in torch_releases().values()
        )
        exact = {
            part.removeprefix("==") for text in asked for part in text.split(",") if re.fullmatch(r"==[0-9.]+", part)
        }
        majors[major] = {Version(known).major for known in (*known_versions(distribution), *exact)}
    first, own = Version(version).major, majors.get(cuda.partition(".")[0])
    if not own or first in own:
        return None
    return next((major for major, known in majors.items() if first in known), None)


def libraries_of(release: TorchRelease) -> dict[str, str]:
    """Short name -> version that an install of this release gives: its exact pins, and the newest of a range."""
    found = {}
    for distribution, specifier in {**release.expands_to, **release.pins}.items():
        name = library_of(distribution)
        fits = list(SpecifierSet(specifier).filter(known_versions(distribution)))
        if name and re.fullmatch(r"==[^*,]+", specifier):
            found[name] = specifier.removeprefix("==")
        elif name and fits:
            found[name] = fits[-1]
    return found
