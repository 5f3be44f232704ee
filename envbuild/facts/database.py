"""Facts about Debian suites, GPUs, CUDA, torch and known faults. The facts come from data files that are read once. A
site can add its own facts.

A function raises FactsError if the data that it reads are malformed. The error lists all malformed entries of those
data, with file and line. `suites` and `base_packages` do not validate the values that they read.
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
from envbuild.facts.advisory_model import Advisory, Situation, holding
from envbuild.facts.fact_field_types import (
    STRICT,
    Capability,
    FactRow,
    Name,
    Release,
    Sources,
    Specifier,
    Status,
    Text,
    is_version,
)
from envbuild.facts.gpu_fact_types import Gpu


@plain(frozen=True)
class Suite:
    """A Debian release: its Python version, its C library's version, and the major version of its g++."""

    name: str
    python: str
    glibc: str
    gcc: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Toolkit(FactRow):
    """A CUDA toolkit release, with the versions of the cuBLAS and the driver that it contains."""

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
    """Minimum driver versions for a CUDA toolkit; None if unknown. `exact`: the driver shipped with the toolkit.
    `compatible`: the oldest driver that runs toolkits of the same major version, with limits: it cannot compile PTX of
    a toolkit newer than itself."""

    exact: str | None
    compatible: str | None


_EXACT = re.compile(r"==([^*,]+)")  # the specifier of exactly one version


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TorchRelease(FactRow):
    """A torch release on the package index, for Linux x86_64. `pins`: distribution -> specifier of its requirements.
    `expands_to`: the same for the libraries that its pin on cuda-toolkit installs."""

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

    @property
    def requirements(self) -> dict[str, str]:
        """Distribution -> specifier of all that this release installs: its pins, and what cuda-toolkit brings."""
        return {**self.expands_to, **self.pins}

    @property
    def exact_versions(self) -> dict[str, str]:
        """The distributions of which this release requires exactly one version, with this version."""
        found = {name: _EXACT.fullmatch(bound) for name, bound in self.requirements.items()}
        return {name: match[1] for name, match in found.items() if match}

    def kernels(self, compute_capability: str) -> Literal["compiled", "ptx"] | None:
        """How this build supports a GPU, by the rules of torch_cuda_arch_list_parser.serves. If the build has PTX, the
        PTX is that of the last architecture."""
        codes = [arch.replace(".", "") for arch in self.arch_list]
        ptx = [f"compute_{codes[-1]}"] if self.ptx else []
        return torch_cuda_arch_list_parser.serves([*(f"sm_{code}" for code in codes), *ptx], compute_capability)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LocalBuild(FactRow):
    """A build of torch with a local label. `pins`: distribution -> specifier, for libraries that advisories name."""

    version: Release
    pins: Mapping[str, Specifier]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TorchIndex(FactRow):
    """PyTorch's own index of builds with a local label. In `address`, {build} stands for the label."""

    address: Annotated[str, Field(pattern=r"^https://[!-~]+$")]
    packages: tuple[Name, ...]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Library(FactRow):
    """A short library name, its distribution for each CUDA major version, and their known versions."""

    name: Name
    distributions: Mapping[str, Name]
    versions: Mapping[str, tuple[Release, ...]] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class XidError(FactRow):
    """An error that the driver writes to the kernel log. `application`: whether a program causes it, not a GPU
    fault."""

    number: int
    title: Text
    application: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Namespace(FactRow):
    """A text that is allowed for an __init__.py which several distributions install with different contents."""

    text: Annotated[str, Field(max_length=600)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class KnownStartup(FactRow):
    """A file that runs code whenever Python starts, and that is known to belong to `distribution`; None: to the
    operating system."""

    distribution: Name | None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    what: Text


@cache
def namespace_texts() -> frozenset[bytes]:
    """The contents that are allowed for an __init__.py which several distributions install."""
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
    """Debian packages of a base image. For a GPU, these include what torch needs at run time: a compiler, headers, RDMA
    libraries."""
    data = fact_file_reader.read("debian").data
    return (*data["packages"], *(data["gpu_packages"] if gpu else ()))


def advisories() -> tuple[Advisory, ...]:
    """The shipped advisories, then the site's."""
    return fact_file_reader.extensible().advisories


def matching(situation: Situation) -> list[Advisory]:
    """The advisories that apply in a situation, by severity."""
    return holding(advisories(), situation)


def gpus() -> Mapping[str, Gpu]:
    """GPU models by id, the shipped ones first."""
    return fact_file_reader.extensible().gpus


def gpu_by_name(name: str) -> Gpu | None:
    """The GPU model for a name that the driver reports; None if it is unknown. Only whole names match: 'NVIDIA H20'
    does not match 'NVIDIA H200'. For a MIG slice, it is the model of the whole GPU. Unconfirmed names match too."""
    known = fact_file_reader.extensible()
    return known.names.get(known.mig.sub("", name))


OLDEST_CAPABILITY = "7.0"
"""The oldest compute capability that envbuild builds for."""


def unsupported(name: str, platform: str) -> str | None:
    """Why envbuild cannot build an image of this platform for the GPU model `name`; None if it can, or if the name is
    unknown."""
    gpu = gpus().get(name)
    if gpu is None:
        return None
    reasons = [gpu.unsupported] if gpu.unsupported else []
    if f"linux/{gpu.host}" != platform:
        reasons = [f"{name} has an {gpu.host} host, and envbuild builds only {platform} images", *reasons]
    if Version(gpu.compute_capability) < Version(OLDEST_CAPABILITY):
        reasons.append(
            f"{name} has compute capability {gpu.compute_capability}, and envbuild builds for {OLDEST_CAPABILITY} and "
            f"newer; {_last_torch(gpu.compute_capability)}"
        )
    return f"unsupported: {'; '.join(reasons)}" if reasons else None


def _last_torch(compute_capability: str) -> str:
    fits = [row.version for row in torch_releases().values() if row.kernels(compute_capability) == "compiled"]
    return (
        f"the last torch whose default build has code for it is {max(fits, key=Version)}"
        if fits
        else "no known torch has code for it"
    )


def family(gpu: Gpu) -> tuple[Gpu, ...]:
    """The models that share evidence with this one, itself included."""
    return tuple(other for other in gpus().values() if other.family == gpu.family)


@cache
def toolkits() -> Mapping[str, Toolkit]:
    return {row.release: row for row in fact_file_reader.rows("cuda", "toolkits", Toolkit)}


@cache
def _compatible() -> Mapping[int, str]:
    return {row.major: row.minimum for row in fact_file_reader.rows("cuda", "compatible", _Compatible)}


def driver_minimum(cuda: str) -> DriverMinimum:
    """The two minimum drivers of a CUDA version: that of this release, and that of its major version. "12.4", as torch
    reports it, means the first release of 12.4; "12.4.1" is the release of a toolkit."""
    try:
        release = Version(cuda).release
    except InvalidVersion:
        return DriverMinimum(None, None)
    toolkit = toolkits().get(".".join(map(str, (*release, 0, 0)[:3])))
    return DriverMinimum(toolkit.driver if toolkit else None, _compatible().get(release[0]))


def driver_runs(cuda: str, driver: str) -> bool:
    """Whether a driver is at least the oldest one that runs programs of this CUDA major version. True if `driver`
    is not a version: it may be any text in a log or from an environment."""
    minimum = driver_minimum(cuda).compatible
    return minimum is None or not is_version(driver) or Version(driver) >= Version(minimum)


@cache
def torch_releases() -> Mapping[str, TorchRelease]:
    return {row.version: row for row in fact_file_reader.rows("torch", "releases", TorchRelease)}


@cache
def local_builds() -> Mapping[str, LocalBuild]:
    """The builds of torch with a local label whose libraries are known, by version: 2.5.1+cu121."""
    return {row.version: row for row in fact_file_reader.rows("torch", "local_builds", LocalBuild)}


@cache
def torch_index() -> TorchIndex:
    found: TorchIndex = fact_file_reader.rows("torch", "indexes", TorchIndex)[0]
    return found


def torch_release(version: str) -> TorchRelease | None:
    """The facts about a torch release. Torch's own index has the same build with the label of its CUDA version: 2.5.0
    is 2.5.0+cu124 there. None for an unknown release, and for any other label: 2.13.0+cpu has no GPU code, and
    2.5.0+cu121 has other libraries than 2.5.0."""
    release = torch_releases().get(version.partition("+")[0])
    same = release is not None and ("+" not in version or cuda_of_label(version) == release.cuda)
    return release if same else None


def cuda_of_label(torch: str) -> str | None:
    """The CUDA version in the label of a build from torch's own index: 2.7.1+cu128 -> 12.8. None without a label."""
    found = re.fullmatch(r"cu(\d{2})(\d)", torch.partition("+")[2])
    return f"{found[1]}.{found[2]}" if found else None


@cache
def libraries() -> Mapping[str, Library]:
    return {row.name: row for row in fact_file_reader.rows("libraries", "libraries", Library)}


def distribution_of(library: str, cuda: str) -> str | None:
    """The distribution of a library: cublas and 12.1 -> nvidia-cublas-cu12."""
    row = libraries().get(library)
    return row.distributions.get(cuda.partition(".")[0]) if row else None


def library_of(distribution: str) -> str | None:
    """The library of a distribution: nvidia-cublas -> cublas."""
    name = canonicalize_name(distribution)
    return next((row.name for row in libraries().values() if name in row.distributions.values()), None)


def is_cuda_library(distribution: str) -> bool:
    """Whether this is a library with a separate distribution for each CUDA major version."""
    row = libraries().get(library_of(distribution) or "")
    return row is not None and len(set(row.distributions.values())) > 1


def libraries_among(versions: Mapping[str, str], cuda: str | None) -> dict[str, str]:
    """Short name -> version of the libraries among distributions. If `cuda` is set, only distributions for this major
    version of CUDA count. `versions`: distribution -> version."""
    held: dict[str, str] = {canonicalize_name(name): version for name, version in versions.items()}
    return {
        row.name: held[distribution]
        for row in libraries().values()
        for major, distribution in row.distributions.items()
        if distribution in held and (cuda is None or major == cuda.partition(".")[0])
    }


def known_versions(distribution: str) -> tuple[str, ...]:
    """The known versions of a distribution on the package index, the oldest first; empty if none are known."""
    name = canonicalize_name(distribution)
    return next((row.versions[name] for row in libraries().values() if name in row.versions), ())


def of_another_cuda(library: str, cuda: str, version: str) -> str | None:
    """The CUDA major version that a version of a library belongs to, if it is not that of `cuda`.

    The known versions of the library's wheels decide: those for `cuda` must not have the same major number, and those
    for the returned CUDA version must have it. Otherwise None is returned.
    """
    majors: dict[str, set[int]] = {}
    for major, distribution in libraries()[library].distributions.items():
        ranges = (
            f"{row.expands_to.get(distribution, '')},{row.pins.get(distribution, '')}"
            for row in torch_releases().values()
        )
        exact = {
            part.removeprefix("==") for text in ranges for part in text.split(",") if re.fullmatch(r"==[0-9.]+", part)
        }
        majors[major] = {Version(known).major for known in (*known_versions(distribution), *exact)}
    first, own = Version(version).major, majors.get(cuda.partition(".")[0])
    if not own or first in own:
        return None
    return next((major for major, known in majors.items() if first in known), None)


def libraries_of(release: TorchRelease) -> dict[str, str]:
    """Short name -> version of the libraries that are installed with a torch release. For a pin that is a range, the
    version is the newest known one in the range."""
    return _short_names(release.requirements)


def libraries_of_local_build(version: str) -> dict[str, str]:
    """Short name -> version of the libraries that are installed with a build of torch with a local label. Empty if the
    build's libraries are unknown."""
    build = local_builds().get(version)
    return _short_names(build.pins) if build else {}


def _short_names(pins: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for distribution, specifier in pins.items():
        name = library_of(distribution)
        fits = list(SpecifierSet(specifier).filter(known_versions(distribution)))
        if name and (exact := _EXACT.fullmatch(specifier)):
            found[name] = exact[1]
        elif name and fits:
            found[name] = fits[-1]
    return found
