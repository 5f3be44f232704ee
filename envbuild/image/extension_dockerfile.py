"""Renders the Dockerfile in which the extensions of a lock are compiled. Pure.

Its stages contain what an extension is compiled with: the base, the locked wheels, and nvcc. Nothing but the compiled
wheels leaves the build; image layers are written without an engine (image/layers/).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import FOLDERS, UNPACKER, Archive
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.image.debian_base_tar import SOURCE_DATE_EPOCH
from envbuild.image.oci.image_description import FEWER_LAYERS, MAX_LAYERS
from envbuild.lock.lock_entry_types import Builder, LockedExtension, Nvcc
from envbuild.lock.lock_file import BUILDER, PACKAGES, Lock
from envbuild.registry.image_reference_patterns import BY_DIGEST
from envbuild.resolve.plan_resolver import SEARCH_PATH, VENV
from envbuild.util import package_data
from envbuild.util.errors import LockError

TEMPLATE = package_data.DOCKERFILES / "extension.Dockerfile.j2"
# Files that the build mounts in /mnt/bin, in addition to uv.
TOOLS = (*(package_data.DOCKERFILES / name for name in ("install", "check", "repin")), UNPACKER)

# Directories of the build context for Debian packages: the image's, and those only used to compile extensions.
DEBS, BUILDER_DEBS = "debs", "builder/debs"

_REFERENCE = re.compile(BY_DIGEST)


@dataclass(frozen=True)
class InstallStep:
    """A RUN instruction that calls the installer: its arguments, and what is mounted at `target`: a directory of the
    build context ("source=debs") or a separate context ("from=wheels-torch")."""

    title: str
    arguments: tuple[str, ...]
    source: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class BuildStage:
    """The stage in which an extension's wheel is compiled; its target is `wheel-<name>`."""

    name: str
    step: InstallStep


def _common_steps(lock: Lock) -> tuple[InstallStep, ...]:
    """Return the steps before the tools: everything that may be needed to import torch and to compile."""
    epoch = str(SOURCE_DATE_EPOCH)
    debs = [_debs("Debian packages", lock.apt, DEBS)] if lock.apt else []
    overrides = {override.name: f"{override.name}=={override.version}" for override in lock.overrides}
    groups = [(name, list(group)) for name, group in itertools.groupby(lock.wheels, key=lambda locked: locked.layer)]
    shared = [(name, group) for name, group in groups if name != PACKAGES]
    return (
        *debs,
        InstallStep("the virtual environment, /opt/venv", ("venv", epoch, lock.python)),
        *(_wheels(name, group, overrides.get(name)) for name, group in shared),
        *map(_archive, lock.archives),
    )


def wheels_context(layer: str) -> str:
    """Return the name of the build context that holds a layer's wheels."""
    return f"wheels-{layer}"


def _nvcc(nvcc: Nvcc) -> InstallStep:
    return InstallStep("nvcc, of torch's CUDA", ("nvcc", str(SOURCE_DATE_EPOCH), nvcc.home, nvcc.release))


def _tools(lock: Lock) -> tuple[InstallStep, ...]:
    """Return the steps that install the tools for compiling extensions. nvcc's release is checked last, just before
    compiling."""
    if lock.builder is None:
        return ()
    debs = [_debs("nvcc, of Debian", lock.builder.debs, BUILDER_DEBS)] if lock.builder.debs else []
    archives = map(_archive, lock.builder.archives)
    wheels = [_wheels(BUILDER, lock.builder.wheels, None)] if lock.builder.wheels else []
    return (*debs, *archives, *wheels, _nvcc(lock.builder.nvcc))


def _stages(lock: Lock) -> Iterator[BuildStage]:
    for one in lock.extensions:
        assert lock.builder
        command = compile_command(one, lock.builder)
        title = f"{one.name} from {one.kind} {one.digest}"
        arguments = ("compile", str(SOURCE_DATE_EPOCH), *command)
        yield BuildStage(one.name, InstallStep(title, arguments, f"source=sources/{one.name}", "/mnt/source"))


def compile_command(one: LockedExtension, builder: Builder) -> tuple[str, ...]:
    """Return the command that builds a wheel from source. Only MAX_JOBS is not fixed; it does not change the result."""
    home = builder.nvcc.home
    fixed = {
        "CUDA_HOME": home,
        "HOME": "/build",
        # otherwise nvcc's process id gets into the output
        "NVCC_APPEND_FLAGS": " ".join(filter(None, (one.env.get("NVCC_APPEND_FLAGS"), "--objdir-as-tempdir"))),
        "PATH": f"{VENV}/bin:{home}/bin:{SEARCH_PATH}",
        "PYTHONHASHSEED": "0",
        "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH),
        "TORCH_CUDA_ARCH_LIST": builder.arch,
    }
    variables = (f"{key}={value}" for key, value in sorted({**builder.environment, **one.env, **fixed}.items()))
    pip = ("-m", "pip", "wheel", "--verbose", "--disable-pip-version-check", "--no-build-isolation", "--no-deps",
           "--no-index", "--no-cache-dir", "--wheel-dir", "/out")  # fmt: skip
    settings = (f"--config-settings={setting}" for setting in one.settings)
    return ("/usr/bin/env", *variables, f"{VENV}/bin/python", *pip, *settings, ".")


def _wheels(name: str, wheels: Sequence[LockedWheel], override: str | None) -> InstallStep:
    """Return the step that installs wheels; for an override, the step also changes the metadata that requires another
    version."""
    task = ("override", str(SOURCE_DATE_EPOCH), override) if override else ("wheels", str(SOURCE_DATE_EPOCH))
    requirements = (locked.wheel.hashed_pin() for locked in wheels)
    return InstallStep(name, (*task, *requirements), f"from={wheels_context(name)}", "/mnt/wheels")


def _debs(title: str, debs: Sequence[Deb], source: str) -> InstallStep:
    return InstallStep(
        title, ("debs", str(SOURCE_DATE_EPOCH), *(deb.file for deb in debs)), f"source={source}", "/mnt/debs"
    )


def _archive(archive: Archive) -> InstallStep:
    arguments = ("archive", str(SOURCE_DATE_EPOCH), archive.name, archive.sha256, FOLDERS[archive.name])
    return InstallStep(
        f"{archive.name} {archive.version}", arguments, f"source=archives/{archive.name}", "/mnt/archive"
    )


def render(lock: Lock) -> str:
    """Render the Dockerfile for the extensions of a lock. Nothing in a lock can add an instruction or reach a shell.
    Raises LockError if the stages would have too many layers."""
    import jinja2  # only extensions need it

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(exec=_exec, reference=_reference)
    steps = _common_steps(lock) + _tools(lock)
    count = 2 + len(steps)  # the base, and the stage that compiles
    if count > MAX_LAYERS:
        raise LockError(f"compiling needs {count} layers; an image can have at most {MAX_LAYERS}", hint=FEWER_LAYERS)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        lock_id=lock.id,
        epoch=str(SOURCE_DATE_EPOCH),
        image=lock.image,
        steps=steps,
        stages=list(_stages(lock)),
    )


def _exec(arguments: Sequence[str]) -> str:
    """Format the JSON form of RUN, which uses no shell; one argument per line."""
    return "[" + ", \\\n     ".join(json.dumps(argument) for argument in arguments) + "]"


def _reference(text: str) -> str:
    if not _REFERENCE.fullmatch(text):
        raise ValueError(f"not an image by digest: {text!r}")
    return text
