"""The record of a tested Python environment, and the differences between two of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

from envbuild.util.errors import printable

Sha256Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_MOST = 10  # maximum number of changed groups in a message


class _EnvironmentPart(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, defer_build=True)


class FileGroup(_EnvironmentPart):
    """The files of a folder, or a single file. `sha256`: their digest, as `environment_measurement.files_digest`
    computes it."""

    name: str
    files: int
    sha256: Sha256Hex


class MeasuredFile(_EnvironmentPart):
    path: str
    sha256: Sha256Hex


class MeasuredInterpreter(_EnvironmentPart):
    """The interpreter. `executable`, `libpython`: sha256 of its program, and of its shared library if it has one."""

    version: str
    executable: Sha256Hex
    libpython: Sha256Hex | None
    standard_library: FileGroup


class MeasuredEnvironment(_EnvironmentPart):
    """An environment. `sha256`: the digest of its locked files, which is the subject of evidence. `distributions`: the
    locked distributions, with their versions.

    `path`: sys.path without the standard library. `further`: all other files below these folders, grouped by the first
    part of their path; this includes other distributions and `.pth` files, but not what installers note. `loaded`: the
    folders from which the dynamic loader takes libraries, and CUDA libraries in other folders. `library_path`: the
    folders of LD_LIBRARY_PATH that contain libraries, in order. `preloaded`: the files of LD_PRELOAD, in order.

    In paths, {site} is the folder with the locked distributions, {prefix} the environment, and {base} the Python that
    the environment was created from.
    """

    sha256: Sha256Hex
    files: int
    distributions: dict[str, str]
    path: list[str]
    further: list[FileGroup]
    loaded: list[FileGroup]
    library_path: list[str]
    preloaded: list[MeasuredFile]
    interpreter: MeasuredInterpreter
    libc: MeasuredFile | None
    libstdcxx: MeasuredFile | None
    driver: str | None
    gpus: list[str]

    @property
    def id(self) -> str:
        return f"sha256:{self.sha256}"


def environment_differences(before: MeasuredEnvironment, now: MeasuredEnvironment, *, with_gpu: bool) -> list[str]:
    """Return a message for each difference; none if evidence about `before` is valid for `now`. `with_gpu`: compare
    also the driver and the GPU models."""
    found = [] if before.sha256 == now.sha256 else ["files of the locked distributions changed"]
    if before.distributions != now.distributions:
        found.append("the locked distributions differ")
    if before.path != now.path:
        found.append("the folders of sys.path changed")
    found += _changed_groups("{}: files were added, removed or changed", before.further, now.further)
    found += _changed_groups("{}: libraries were added, removed or changed", before.loaded, now.loaded)
    for variable, first, second in (
        ("LD_LIBRARY_PATH", before.library_path, now.library_path),
        ("LD_PRELOAD", [one.path for one in before.preloaded], [one.path for one in now.preloaded]),
    ):
        if first != second:
            found.append(f"{variable} changed: {':'.join(first) or 'empty'}, now {':'.join(second) or 'empty'}")
    found += [
        f"{second.path}: the preloaded library changed"
        for first, second in zip(before.preloaded, now.preloaded, strict=False)
        if first.path == second.path and first != second
    ]
    if before.interpreter.version != now.interpreter.version:
        found.append(f"the interpreter changed: {before.interpreter.version}, now {now.interpreter.version}")
    elif before.interpreter != now.interpreter:
        found.append(f"the files of the interpreter changed ({now.interpreter.version})")
    found += [
        f"{name} changed: {now_file.path if now_file else 'missing'}"
        for name, before_file, now_file in (
            ("libc", before.libc, now.libc), ("libstdc++", before.libstdcxx, now.libstdcxx),
        )
        if before_file != now_file
    ]  # fmt: skip
    if with_gpu and before.driver != now.driver:
        found.append(f"the driver changed: {before.driver}, now {now.driver}")
    if with_gpu and (now.driver is None or not now.gpus):
        found.append("the driver's version and the GPU models cannot be read from /proc/driver/nvidia")
    if with_gpu and before.gpus != now.gpus:
        found.append(f"the GPU changed: {', '.join(before.gpus) or 'none'}, now {', '.join(now.gpus) or 'none'}")
    return [printable(text) for text in found]


def _changed_groups(text: str, before: Sequence[FileGroup], now: Sequence[FileGroup]) -> Iterator[str]:
    first, second = ({one.name: one for one in groups} for groups in (before, now))
    changed = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    if before != now and not changed:  # only the order changed, or a name occurs twice
        changed = ["the order of the search"]
    yield from (text.format(name) for name in changed[:_MOST])
    if len(changed) > _MOST:
        yield f"and {len(changed) - _MOST} more"
