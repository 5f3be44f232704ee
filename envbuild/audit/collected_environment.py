"""Reads and validates the document in which a collector reports the contents of the environment that it ran in."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from envbuild.testrun.output_judge import frame
from envbuild.testrun.run_result import RawOutput
from envbuild.util.errors import CheckFailed

SITE, LD_PATH, LD_PRELOAD, LD_CACHE = "environment", "ld-library-path", "ld-preload", "ld-cache"
"""Ways in which a process finds a copy of a library. The collector writes the same values."""

_LARGEST = 16 << 20  # maximum size of the collector's output in bytes


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("contains characters that a terminal does not show as text")
    return text


Text = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_printable)]
Word = Annotated[str, StringConstraints(max_length=200), AfterValidator(_printable)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, defer_build=True)


class Copy(_Model):
    """A library file. `library`: cublas, cublasLt, cudnn, ... `owner`: its distribution. `record`: whether the file
    matches that distribution's RECORD; None if no RECORD lists it. `ways`: how a process finds it.

    `version`: that of the distribution if `record` is true, else the version in the file name, else `reported`.
    `reported`: the version that the library itself reports, or None.
    """

    library: Word
    name: Word
    path: Text
    version: Word | None
    reported: Word | None
    sha256: Sha256 | None
    owner: Word
    record: bool | None
    loaded: bool
    ways: list[Word] = Field(max_length=10)
    soname: Text | None = None
    build_id: Word | None = None
    rpath: Text | None = None
    runpath: Text | None = None

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def group(self) -> str:
        """The name that is common to libraries which must have the same version and folder: "cublas" for cuBLAS and
        cuBLASLt, "cudnn" for cuDNN and its parts."""
        return next((name for name in ("cublas", "cudnn") if self.library.startswith(name)), self.library)

    @property
    def distribution(self) -> str | None:
        name = self.owner.partition("==")[0]
        return None if name == "unowned" else name

    @property
    def in_packages(self) -> bool:
        return "/site-packages/" in self.path or "/dist-packages/" in self.path

    def __str__(self) -> str:
        return f"{self.path} ({self.version or 'version unknown'}{', loaded' if self.loaded else ''})"


class Distribution(_Model):
    name: Word
    version: Word
    folder: Text
    requires: list[Text] = Field(max_length=2000)


class HeldStartupFile(_Model):
    """A file that runs code whenever Python starts or torch is imported. `owner`: the distribution whose RECORD lists
    it; None if no RECORD does."""

    path: Text
    sha256: Sha256
    owner: Word | None

    @property
    def file(self) -> str:
        """The path of the file, relative to the package folder that contains the file."""
        return re.split(r"/(?:site|dist)-packages/", self.path)[-1]


class Altered(_Model):
    """A file that differs from the one that its distribution (`owner`, name==version) installed. `by`: whether the file
    was compared with the wheel or with RECORD. `sha256`: None if the file is missing."""

    path: Text
    owner: Word
    sha256: Sha256 | None
    by: Word


class Torch(_Model):
    """The installed torch. `failure`: how the process that imported it ended, if abnormally. `imported` may be true
    even then: the process may have failed after the import."""

    version: Word | None
    cuda: Word | None
    hip: Word | None
    path: Text | None
    imported: bool
    architectures: list[Word] = Field(max_length=100)
    failure: Text | None


class LoadOrder(_Model):
    """The libcublasLt files that a process has loaded. `alone`: after it loaded only `cublas`. `both`: after it then
    also loaded `cublaslt`, the libcublasLt in the same folder."""

    cublas: Text
    cublaslt: Text | None
    alone: list[Text] = Field(max_length=100)
    both: list[Text] = Field(max_length=100)
    failure: Text | None


class Apex(_Model):
    path: Text
    parts: list[Word] = Field(max_length=20)
    compiled: list[Word] = Field(max_length=20)


class HeldExtension(_Model):
    """A file of a compiled extension. `there`: whether the file, which RECORD lists, exists. `module`: None for a
    library. `architectures`: of its device code, such as "sm_90"; None if it has only host code. `tried`: whether the
    collector tried to load it. `failure`: why it could not be loaded or was not tried; else None."""

    distribution: Word
    version: Word
    path: Text
    there: bool
    module: Text | None
    architectures: list[Word] | None = Field(max_length=100)
    damaged: bool
    tried: bool
    failure: Text | None


class Python(_Model):
    version: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,3}\.[0-9]{1,3}[A-Za-z0-9.+]*$", max_length=60)]
    executable: Text
    prefix: Text
    markers: dict[Word, Word] = Field(max_length=30)


class HeldMachine(_Model):
    gpus: list[Word] = Field(max_length=100)
    driver: Word | None


class Holdings(_Model):
    """The complete contents of an environment. `torch`: None if it is not installed. `unrecorded`: files that no
    distribution installed. `preferred`: libraries that the dynamic loader prefers to those of other packages.
    `unchecked`: bytecode that Python never compares with its source. `cut`: whether a limit excluded some files."""

    python: Python
    distributions: list[Distribution] = Field(max_length=5000)
    startup: list[HeldStartupFile] = Field(default=[], max_length=1000)
    altered: list[Altered] = Field(default=[], max_length=1000)
    unrecorded: list[Text] = Field(default=[], max_length=1000)
    preferred: list[Text] = Field(default=[], max_length=1000)
    unchecked: list[Text] = Field(default=[], max_length=1000)
    torch: Torch | None
    libraries: list[Copy] = Field(max_length=1000)
    order: LoadOrder | None
    apex: Apex | None
    extensions: list[HeldExtension] = Field(default=[], max_length=1000)
    variables: dict[Word, Annotated[str, StringConstraints(max_length=1 << 17), AfterValidator(_printable)]]
    compat: list[Text] = Field(max_length=100)
    machine: HeldMachine
    cut: bool
    seconds: dict[Word, float] = Field(max_length=20)

    @property
    def installed(self) -> dict[str, str]:
        """Distribution -> version. Of a distribution that is installed twice, the version that an import uses."""
        return {item.name: item.version for item in reversed(self.distributions)}

    @property
    def extended(self) -> dict[tuple[str, str], list[HeldExtension]]:
        """The files of each compiled extension, by its name and version."""
        key = lambda file: (file.distribution, file.version)  # noqa: E731
        return {who: list(files) for who, files in groupby(sorted(self.extensions, key=key), key=key)}

    def loaded(self, library: str) -> Copy | None:
        return next((copy for copy in self.libraries if copy.loaded and copy.library == library), None)


def read(output: RawOutput, nonce: str, target: str) -> Holdings:
    """Read the document in a collector's output. Raises CheckFailed if it is missing or invalid. `nonce`: that of the
    collector's job. `target`: the name of the environment in messages."""
    if output.timed_out:
        raise CheckFailed(f"the audit of {target} was stopped after {output.seconds:.0f} s")
    if len(output.stdout) <= _LARGEST and not output.too_long:
        frames = [found for line in output.stdout.split(b"\n") for found in [frame(line, nonce)] if found]
    else:
        frames = []
    if len(frames) != 1 or frames[0][0] != 0 or output.exit_code != 0:
        raise CheckFailed(f"the audit of {target} gave no result{_why(output)}", hint=_last_words(output))
    return _parsed(frames[0][1], target)


def _parsed(document: dict[str, object], target: str) -> Holdings:
    try:
        return Holdings.model_validate(document)
    except (ValidationError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "nested too deep"}
        where = ".".join(map(str, first["loc"]))[:200]
        raise CheckFailed(
            f"invalid result from the audit of {target}: {where}: {first['msg']}",
            hint="its Python may have been tampered with",
        ) from None


def _why(output: RawOutput) -> str:
    if output.out_of_memory:
        return ": out of memory"
    return f": exit code {output.exit_code}" if output.exit_code else ""


def _last_words(output: RawOutput) -> str | None:
    lines = [line for line in output.stderr.splitlines() if line.strip()][-3:]
    return "\n".join(line[:300] for line in lines) or None
