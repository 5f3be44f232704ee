"""Facts about compiling extensions: sources of nvcc, variables that compilers read, and their error messages.

A function raises FactsError if the data that it reads are malformed. The error lists all malformed entries of those
data, with file and line. `variables` and `debian_packages` do not validate the values that they read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated

from packaging.version import Version
from pydantic import Field
from pydantic.dataclasses import dataclass

from envbuild.facts import fact_file_reader
from envbuild.facts.fact_field_types import STRICT, FactRow, Name, Pattern, Release, Text

Folder = Annotated[str, Field(pattern=r"^(/[a-z0-9]+)+$")]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9+_.-]+$")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Wheels(FactRow):
    """nvcc from wheels, for a major version of CUDA. `extras`: of the distribution cuda-toolkit. `folder`: the folder
    below site-packages to use as CUDA_HOME. `lacks`: why the wheels cannot be used."""

    major: int
    extras: tuple[Name, ...] = ()
    folder: Annotated[str, Field(pattern=r"^[a-z0-9/]+$")] = ""
    lacks: Text | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Debian(FactRow):
    """nvcc of a CUDA release from packages of a Debian suite. `components`: components of the Debian archive; `home`:
    CUDA_HOME; `environment`: variables that name the matching host compiler."""

    cuda: Release
    suite: Name
    packages: tuple[Word, ...]
    components: tuple[Name, ...]
    home: Folder
    environment: Mapping[Word, Word] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HostCompiler(FactRow):
    """The first major version of gcc that torch's cpp_extension refuses to use with a CUDA release."""

    cuda: Release
    gcc_below: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Complaint(FactRow):
    """A compiler's error message. `say`: an explanation, in which braces stand for groups of the pattern."""

    pattern: Pattern
    say: Text = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CompiledPackage(FactRow):
    """A package whose source has CUDA kernels and for which the index has no usable wheels. `modules`: the compiled
    modules that its wheel must contain; `requires`: packages for its build in addition to torch; `packages`: those
    that it needs when it runs; `environment`: variables that make its build compile.

    `architectures`: for a build that does not read TORCH_CUDA_ARCH_LIST, the name of the architecture for each major
    compute capability, in `architecture_variable`; a GPU of another one is not supported. `torch_below`: the first
    torch with which releases up to `newest` do not compile."""

    name: Name
    modules: tuple[Word, ...]
    requires: tuple[Name, ...] = ()
    packages: tuple[Name, ...] = ()
    environment: Mapping[Word, Word] = Field(default_factory=dict)
    architecture_variable: Word = "TORCH_CUDA_ARCH_LIST"
    architectures: Mapping[Word, Word] = Field(default_factory=dict)
    torch_below: Release | None = None
    newest: Release | None = None

    def obstacle(self, version: str, torch: str | None, capabilities: Iterable[str]) -> str | None:
        """Why this version cannot be compiled for GPUs of these compute capabilities, and what to do; None if it
        can."""
        lacking = [one for one in capabilities if self.architectures and _major(one) not in self.architectures]
        if lacking:
            return f"has no kernels for compute capability {', '.join(lacking)}: remove it"
        known = self.newest is not None and Version(version) <= Version(self.newest)
        if known and torch and self.torch_below and Version(torch) >= Version(self.torch_below):
            return f"does not compile with torch {torch}: use a torch below {self.torch_below}"
        return None

    def variables(self, capabilities: Iterable[str]) -> dict[str, str]:
        """The environment variables of a build for GPUs of these compute capabilities."""
        names = dict.fromkeys(self.architectures[_major(one)] for one in capabilities if self.architectures)
        return {**self.environment, **({self.architecture_variable: ";".join(names)} if names else {})}


def _major(capability: str) -> str:
    return capability.partition(".")[0]


@cache
def compiled_packages() -> Mapping[str, CompiledPackage]:
    """The packages with CUDA kernels that are compiled from source, by name."""
    return {row.name: row for row in fact_file_reader.rows("compilers", "compiled_packages", CompiledPackage)}


@cache
def compiler_wheels() -> Mapping[int, Wheels]:
    """nvcc from wheels, by CUDA's major version."""
    return {row.major: row for row in fact_file_reader.rows("compilers", "wheels", Wheels)}


def debians() -> tuple[Debian, ...]:
    """nvcc from Debian, for every CUDA release and suite for which Debian has it."""
    return fact_file_reader.rows("compilers", "debian", Debian)


def debian(cuda: str) -> tuple[Debian, ...]:
    """nvcc from Debian for one CUDA release, for example "12.4"."""
    return tuple(row for row in debians() if row.cuda == cuda)


@cache
def hosts() -> Mapping[str, HostCompiler]:
    """Host compiler limits by CUDA release, for example "12.4"."""
    return {row.cuda: row for row in fact_file_reader.rows("compilers", "host_compilers", HostCompiler)}


@cache
def variables() -> frozenset[str]:
    """Environment variables that compilers and torch read themselves, so that they have an effect even if a package's
    source does not mention them."""
    return frozenset(fact_file_reader.read("compilers").data["variables"])


@cache
def debian_packages() -> str:
    """A pattern for the names of the Debian packages that determine the output of a compiler."""
    pattern: str = fact_file_reader.read("compilers").data["debian_packages"]
    return pattern


def complaints() -> tuple[Complaint, ...]:
    """Known error messages of compilers, in the order in which they are tried. The first match is used."""
    return fact_file_reader.rows("compilers", "complaints", Complaint)


def out_of_memory_messages() -> tuple[Complaint, ...]:
    return fact_file_reader.rows("compilers", "out_of_memory", Complaint)
