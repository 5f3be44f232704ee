"""Chooses the source of a profile's nvcc: NVIDIA's wheels, Debian's packages, an archive, or the base image. Pure.

nvcc must be of torch's own CUDA release: torch refuses to compile with a different major release, and some extensions,
such as apex, also refuse a different minor release. The key `variant` decides whether nvcc stays in the image;
extensions are compiled with it in both cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.version import Version

from envbuild.facts import database, extension_compilers
from envbuild.facts.extension_compilers import Debian
from envbuild.fetch.archive_spec import FOLDERS, TOOLKIT, ArchiveRequest
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.profile.model import Profile
from envbuild.profile.value_types import ToolkitArchive
from envbuild.util.errors import Fault
from envbuild.util.yaml_and_project_paths import Path


@dataclass(frozen=True)
class Toolchain:
    """A CUDA toolkit with nvcc. `home`: CUDA_HOME; `release`: torch's CUDA, such as "13.0", which must also be the
    release of nvcc.

    The toolkit comes from `requirements` (wheels), `archive`, or `debian` (packages). If all three are empty, it is
    part of the base image.
    """

    home: str
    release: str
    requirements: tuple[str, ...] = ()
    archive: ArchiveRequest | None = None
    debian: Debian | None = None

    def environment(self, path: str) -> Mapping[str, str]:
        """The toolkit's environment variables. `path`: PATH without the toolkit; the first folder is the virtual
        environment's."""
        first, _, rest = path.partition(":")
        return {"CUDA_HOME": self.home, "PATH": f"{first}:{self.home}/bin:{rest}"}


def choose_toolchain(loaded: LoadedProfile, cuda: str | None, packages: str) -> Toolchain | Fault | None:
    """The toolchain of a profile, or a fault if it is not available. None if the profile sets no toolchain and needs no
    nvcc.

    `cuda`: torch's CUDA, None if unknown; `packages`: site-packages of the environment.
    """
    profile, fault = loaded.profile, loaded.document.fault
    wanted = profile.toolchain
    compiled = [index for index, one in enumerate(profile.extensions) if one.none is None]
    if wanted is None and profile.variant == "runtime" and not compiled:
        return None
    where: Path = ("toolchain",) if wanted else ("variant",) if not compiled else ("extensions", compiled[0])
    if Version(profile.torch).local == "cpu":
        return fault(where, f"torch {profile.torch} has no CUDA to compile for")
    if cuda is None:
        return fault(where, f"unknown CUDA release of torch {profile.torch}: set cuda: in the profile")
    if isinstance(wanted, ToolkitArchive):
        archive = ArchiveRequest(TOOLKIT, wanted.sha256, wanted.url, f"=={cuda}.*", fault(where, ""))
        return Toolchain(FOLDERS[TOOLKIT], cuda, archive=archive)
    if wanted == "base":
        if profile.base.image:
            return Toolchain(FOLDERS[TOOLKIT], cuda)
        return fault(where, f"a bootstrap base has no nvcc: name a devel image of CUDA {cuda} as base")
    if wanted == "debian":
        found = _packaged(profile, cuda)
        return Toolchain(found.home, cuda, debian=found) if isinstance(found, Debian) else fault(where, found)
    compiler = extension_compilers.compiler_wheels().get(Version(cuda).major)
    if compiler and not compiler.lacks:
        return Toolchain(f"{packages}/{compiler.folder}", cuda, (_requirement(compiler, cuda, profile.torch),))
    return fault(where, str(reason_without_wheels(cuda)))


def reason_without_wheels(cuda: str) -> str | None:
    """Why nvcc of this CUDA release cannot be installed from wheels, and what to use instead; None if it can."""
    compiler = extension_compilers.compiler_wheels().get(Version(cuda).major)
    if compiler and not compiler.lacks:
        return None
    lacks = f" ({compiler.lacks})" if compiler else ""
    return (
        f"nvcc of CUDA {cuda} is not available as wheels{lacks}: set an archive of its toolkit (toolchain: {{sha256, "
        f"url}}), or a devel image as base and toolchain: base{_or_debian(cuda)}"
    )


def _packaged(profile: Profile, cuda: str) -> Debian | str:
    """Debian's nvcc for this CUDA, or why it is not available."""
    if profile.variant == "devel":
        return (
            "Debian's nvcc packages contain libcuda, which would replace the host's in an image, so they only compile "
            "extensions: for variant: devel, set an archive as toolchain, or a devel image as base"
        )
    suite = profile.base.bootstrap
    if suite is None:
        return "Debian packages need a bootstrap base: with an image as base, set toolchain: base or an archive"
    known = extension_compilers.debian(cuda)
    found = next((row for row in known if row.suite == suite), None)
    lacks = f"Debian {suite} has no nvcc of CUDA {cuda} (known: {_suites(known) or 'none in any suite'})"
    return found or f"{lacks}: {'; '.join(_instead(profile, cuda, known))}"


def _instead(profile: Profile, cuda: str, known: Iterable[Debian]) -> Iterator[str]:
    """Alternatives to Debian's nvcc, the cheapest first."""
    compiler = extension_compilers.compiler_wheels().get(Version(cuda).major)
    if compiler and not compiler.lacks:
        yield "remove toolchain, and nvcc comes as wheels"
        return
    for row in known:
        yield f"use {row.suite} as base.bootstrap, with its Python {database.suites()[row.suite].python}"
    yield "use an archive of the toolkit (toolchain: {sha256, url}), or a devel image as base (toolchain: base)"
    for row in extension_compilers.debians():
        fits = [release.version for release in database.torch_releases().values() if _serves(release, row, profile)]
        if row.cuda != cuda and fits:
            python = database.suites()[row.suite].python
            serves = f"whose nvcc is in {row.suite} (Python {python})"
            yield f"or use a torch for CUDA {row.cuda}, {serves}: {', '.join(sorted(fits))}"


def _serves(release: database.TorchRelease, row: Debian, profile: Profile) -> bool:
    """Whether a torch release is built for the CUDA of Debian's nvcc, has a wheel for the suite's Python, and has code
    for the profile's GPUs."""
    cards = [database.gpus()[name] for name in profile.gpus if name in database.gpus()]
    return (
        release.cuda == row.cuda
        and database.suites()[row.suite].python in release.pythons
        and all(release.kernels(card.compute_capability) for card in cards)
    )


def _or_debian(cuda: str) -> str:
    known = extension_compilers.debian(cuda)
    return f"; if only extensions are compiled, also toolchain: debian, on {_suites(known)}" if known else ""


def _suites(rows: Iterable[Debian]) -> str:
    return ", ".join(row.suite for row in rows)


def _requirement(compiler: extension_compilers.Wheels, cuda: str, torch: str) -> str:
    """The requirement for nvcc's wheels. Extras that torch already installs are left out: the meta-package would pin
    their version where torch allows a range."""
    release = database.torch_release(torch)
    brought = release.requirements if release else {}
    extras = [extra for extra in compiler.extras if database.distribution_of(extra, cuda) not in brought]
    return f"cuda-toolkit[{','.join(extras)}]=={cuda}.*"
