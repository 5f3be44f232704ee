"""Facts: what is known of suites, GPUs, CUDA, torch and faults. Data files in facts/, read once; a site adds its own.

A site's GPUs and advisories come from `facts.d/*.yaml` beside its config.yaml, in the format of facts/gpus.yaml and
facts/advisories.yaml. Every function raises FactsError with all that is malformed, each with file and line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass as plain
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from envbuild import settings
from envbuild.errors import FactsError, Fault, near
from envbuild.plan import document
from envbuild.plan.advisories import Advisory as Advisory
from envbuild.plan.advisories import Gpu as Gpu
from envbuild.plan.advisories import Situation as Situation
from envbuild.plan.advisories import holding
from envbuild.plan.document import Document
from envbuild.plan.fields import STRICT, Capability, Name, Release, Row, Sources, Specifier, Status, Text

_FOLDER = Path(__file__).parent / "facts"


@plain(frozen=True)
class Suite:
    """A Debian release: the Python it carries and its C library's version."""

    name: str
    python: str
    glibc: str


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Toolkit(Row):
    """A CUDA toolkit release, the cuBLAS it carries and the driver that came with it."""

    release: Release
    cublas: Release
    driver: Release | None = None
    driver_status: Status | None = None
    caution: Text | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Compatible(Row):
    major: int
    minimum: Release
    caution: Text | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Compiler(Row):
    """nvcc as wheels, for a major version of CUDA: extras of the distribution cuda-toolkit, and the folder below
    site-packages that is CUDA_HOME then. `lacks` says why there is none."""

    major: int
    extras: tuple[Name, ...] = ()
    folder: Annotated[str, Field(pattern=r"^[a-z0-9/]+$")] = ""
    lacks: Text | None = None


class DriverMinimum(NamedTuple):
    """`exact`: the driver that came with the toolkit. `compatible`: the oldest that runs its major version, within
    limits (no PTX of a newer toolkit). None where unknown."""

    exact: str | None
    compatible: str | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TorchRelease(Row):
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
        """How this build serves a card: code of the same major version and no newer minor, PTX to compile, or none."""
        card = Version(compute_capability)
        known = [Version(arch) for arch in self.arch_list]
        if any(arch.major == card.major and arch.minor <= card.minor for arch in known):
            return "compiled"
        return "ptx" if self.ptx and known[-1] <= card else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Library(Row):
    """A short name, the distribution that carries it for each CUDA, and the versions known to exist of those."""

    name: Name
    distributions: Mapping[str, Name]
    versions: Mapping[str, tuple[Release, ...]] = Field(default_factory=dict)


T = TypeVar("T", bound=Row)

_WORDS = {
    "missing": "missing",
    "unexpected_keyword_argument": "unknown key",
    "string_type": "must be text: write it in quotes",
    "tuple_type": "must be a list",
    "frozen_set_type": "must be a list",
    "dataclass_type": "must be a mapping of keys to values",
}
_CITED = re.compile(r"https://\S+|[\w.-]+/[\w.-]+(#[0-9]+|@[0-9a-f]{7,40})?")
"""A source in full: an address, or a GitHub repository, thread or commit."""


def _read(name: str) -> Document:
    return document.read(_FOLDER / f"{name}.yaml", FactsError)


def _raise(faults: list[Fault]) -> None:
    if faults:
        raise FactsError("the facts are not usable", hint="correct the lines named", faults=faults)


def _rows(doc: Document, kind: str, row: type[T], faults: list[Fault]) -> Iterator[tuple[T, document.Path]]:
    """The rows of a list that are well formed, each with its path; what is wrong with the others goes to `faults`."""
    listed = doc.data.get(kind, [])
    if not isinstance(listed, list) or not all(isinstance(value, dict) for value in listed):
        faults.append(doc.fault((kind,), "must be a list of mappings"))
        return
    common = {"as_of": doc.data["as_of"]} if "as_of" in doc.data else {}
    sources = doc.data.get("sources", {})
    adapter = TypeAdapter(row)
    for index, value in enumerate(listed):
        path = (kind, index)
        for key in ("match", "signature"):
            if isinstance(value.get(key), dict):  # one alternative needs no list around it
                value = {**value, key: [value[key]]}
        try:  # as JSON: lists become tuples and sets, while scalars stay strictly what they are
            found = adapter.validate_json(json.dumps({**common, **value}))
        except ValidationError as error:
            for item in error.errors():
                said = item["ctx"]["error"] if item["type"] == "value_error" else item["msg"]
                faults.append(doc.fault((*path, *item["loc"]), str(_WORDS.get(item["type"], said))))
            continue
        for key in ("source", "arch_source", "cite"):
            for text in getattr(found, key, ()):
                if text not in sources and not _CITED.fullmatch(text):
                    faults.append(doc.fault((*path, key), f"{text!r} is no key of sources, address or owner/repo#N"))
        yield found, path


@cache
def rows(name: str, kind: str, row: type[T]) -> tuple[T, ...]:
    """The list `kind` of facts/<name>.yaml."""
    faults: list[Fault] = []
    found = tuple(item for item, _ in _rows(_read(name), kind, row, faults))
    _raise(faults)
    return found


def site_files() -> tuple[Path, ...]:
    """A site's own facts, in order of name."""
    return tuple(sorted((settings.config_file().parent / "facts.d").glob("*.yaml")))


def digest() -> str:
    """sha256, hex, over the names and contents of all facts, a site's own included: which facts decided."""
    found = hashlib.sha256()
    for file in (*sorted(_FOLDER.glob("*.yaml")), *site_files()):
        content = file.read_bytes()
        found.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


@plain(frozen=True)
class _Extensible:
    """What a site can add to."""

    gpus: Mapping[str, Gpu]
    names: Mapping[str, Gpu]
    mig: re.Pattern[str]
    advisories: tuple[Advisory, ...]


@cache
def _extensible(site: tuple[Path, ...]) -> _Extensible:
    shipped = _read("gpus")
    faults: list[Fault] = []
    documents = [shipped, _read("advisories")]
    for file in site:
        try:
            documents.append(document.read(file, FactsError))
        except FactsError as error:
            faults += error.faults or [Fault(error.message)]
    for doc in documents[2:]:
        for key in sorted(set(doc.data) - {"as_of", "sources", "gpus", "advisories"}):
            faults.append(doc.fault((key,), "unknown key (known: as_of, sources, gpus, advisories)"))
    gpus: dict[str, Gpu] = {}
    names: dict[str, Gpu] = {}
    found: dict[str, tuple[Advisory, Document, document.Path]] = {}
    for doc in documents:
        for gpu, path in _rows(doc, "gpus", Gpu, faults):
            taken = [gpu.id] if gpu.id in gpus else [name for name in gpu.all_names if name in names]
            faults += [doc.fault(path, f"{name!r} is known already") for name in taken]
            gpus[gpu.id] = gpu
            names.update(dict.fromkeys(gpu.all_names, gpu))
        for advisory, path in _rows(doc, "advisories", Advisory, faults):
            if advisory.id in found:
                faults.append(doc.fault(path, f"advisory {advisory.id!r} is known already"))
            found[advisory.id] = (advisory, doc, path)
    for advisory, doc, path in found.values():
        asked = {gpu for match in advisory.match for gpu in match.gpus}
        faults += [doc.fault((*path, "match"), _no(f"GPU {gpu!r}", gpu, gpus)) for gpu in sorted(asked - set(gpus))]
        for other in sorted(advisory.shows.like - set(found)):
            faults.append(doc.fault((*path, "shows", "like"), _no(f"advisory {other!r}", other, found)))
    _raise(faults)
    mig = re.compile(shipped.data["mig_suffix"])
    return _Extensible(gpus, names, mig, tuple(advisory for advisory, _, _ in found.values()))


def _no(what: str, name: str, known: Mapping[str, Any]) -> str:
    hint = near(name, known)
    return f"there is no {what}{f' ({hint})' if hint else ''}"


@cache
def suites() -> Mapping[str, Suite]:
    return {name: Suite(name, row["python"], row["glibc"]) for name, row in _read("debian").data["suites"].items()}


@cache
def base_packages(gpu: bool = False) -> tuple[str, ...]:
    """What a base holds; for a GPU also what torch needs at run time: a compiler, headers, RDMA libraries."""
    data = _read("debian").data
    return (*data["packages"], *(data["gpu_packages"] if gpu else ()))


@cache
def released_selftests() -> frozenset[str]:
    """Ids (sha256:...) of self-tests whose evidence counts beside this tree's own."""
    return frozenset(_read("selftests").data["released"])


def advisories() -> tuple[Advisory, ...]:
    """The shipped ones, then the site's."""
    return _extensible(site_files()).advisories


def matching(situation: Situation) -> list[Advisory]:
    """The advisories that hold in a situation, the severe ones first."""
    return holding(advisories(), situation)


def gpus() -> Mapping[str, Gpu]:
    """GPU models by id, the shipped ones first."""
    return _extensible(site_files()).gpus


def gpu_by_name(name: str) -> Gpu | None:
    """The model that a driver's name means: whole names only, 'NVIDIA H20' is no 'NVIDIA H200'. A MIG slice is its
    card's model. Names that no source confirms are taken too."""
    known = _extensible(site_files())
    return known.names.get(known.mig.sub("", name))


def family(gpu: Gpu) -> tuple[Gpu, ...]:
    """The models that share a proof with this one, itself included."""
    return tuple(other for other in gpus().values() if other.family == gpu.family)


@cache
def toolkits() -> Mapping[str, Toolkit]:
    return {row.release: row for row in rows("cuda", "toolkits", Toolkit)}


@cache
def _compatible() -> Mapping[int, str]:
    return {row.major: row.minimum for row in rows("cuda", "compatible", _Compatible)}


def driver_minimum(cuda: str) -> DriverMinimum:
    """For a CUDA version as torch says it ("12.4", its first release) or a toolkit's ("12.4.1")."""
    try:
        release = Version(cuda).release
    except InvalidVersion:
        return DriverMinimum(None, None)
    toolkit = toolkits().get(".".join(map(str, (*release, 0, 0)[:3])))
    return DriverMinimum(toolkit.driver if toolkit else None, _compatible().get(release[0]))


@cache
def compilers() -> Mapping[int, Compiler]:
    """By CUDA's major version."""
    return {row.major: row for row in rows("cuda", "compilers", Compiler)}


@cache
def torch_releases() -> Mapping[str, TorchRelease]:
    return {row.version: row for row in rows("torch", "releases", TorchRelease)}


def torch_release(version: str) -> TorchRelease | None:
    """None for a release without a row, and for every local build: 2.13.0+cpu has no GPU code, 2.5.0+cu121 has other
    libraries than 2.5.0."""
    return torch_releases().get(version)


@cache
def libraries() -> Mapping[str, Library]:
    return {row.name: row for row in rows("libraries", "libraries", Library)}


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
