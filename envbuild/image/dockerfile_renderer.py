"""Renders a lock as a Dockerfile. Pure. The text is committed, so that a changed pin shows as a readable diff."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jinja2

from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import FOLDERS, UNPACKER, Archive
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.image.debian_base_tar import SOURCE_DATE_EPOCH
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.lock.lock_entry_types import Builder, LockedExtension, Nvcc
from envbuild.lock.lock_file import BUILDER, PACKAGES, Lock
from envbuild.registry.image_reference_patterns import BY_DIGEST
from envbuild.resolve.plan_resolver import VENV
from envbuild.util import package_data
from envbuild.util.errors import LockError

TEMPLATE = package_data.DOCKERFILES / "Dockerfile.j2"
# Files that the build mounts in /mnt/bin, in addition to uv.
TOOLS = (*(package_data.DOCKERFILES / name for name in ("install", "check", "repin")), UNPACKER)

# Directories of the build context for Debian packages: the image's, and those only used to compile extensions.
DEBS, BUILDER_DEBS = "debs", "builder/debs"

# The engine's overlay store allows at most 127 layers; some are left to child images.
MAX_LAYERS = 100

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_REFERENCE = re.compile(BY_DIGEST)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


@dataclass(frozen=True)
class Layer:
    """One RUN of the installer: its arguments, and what is mounted at `target`: a directory of the build context
    ("source=debs") or a separate context ("from=wheels-torch")."""

    title: str
    arguments: tuple[str, ...]
    source: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class BuildStage:
    """The stage in which an extension's wheel is compiled; its target is `wheel-<name>`."""

    name: str
    layer: Layer


@dataclass(frozen=True)
class Parts:
    """The layers of an image: `shared`, then `own`. Extensions are compiled on `shared` and `tools`, in separate
    stages."""

    shared: tuple[Layer, ...]
    own: tuple[Layer, ...]
    tools: tuple[Layer, ...] = ()
    stages: tuple[BuildStage, ...] = ()


def layer_parts(lock: Lock) -> Parts:
    """Return the layers in build order, from those shared between profiles to those of this profile alone."""
    epoch = str(SOURCE_DATE_EPOCH)
    # Debian packages come first: they remove bytecode, and a whiteout of a file in a lower layer has the time of the
    # build.
    shared = [_debs("Debian packages", lock.apt, DEBS)] if lock.apt else []
    shared.append(Layer("the virtual environment, /opt/venv", ("venv", epoch, lock.python)))
    wheels = [(name, list(group)) for name, group in itertools.groupby(lock.wheels, key=lambda locked: locked.layer)]
    overrides = {override.name: f"{override.name}=={override.version}" for override in lock.overrides}
    late = next((i for i, (name, _) in enumerate(wheels) if name in overrides or name == PACKAGES), len(wheels))
    own = next((i for i, (name, _) in enumerate(wheels) if name == PACKAGES), len(wheels))
    # Among torch and its dependencies the smallest layers come first, so that the builder has work while the large
    # wheels are transferred to it. The additional layers of a devel image come later, so that it shares all layers of a
    # runtime image.
    torchs = 1 + max((i for i, (name, _) in enumerate(wheels[:late]) if name in ("torch", "triton")), default=-1)
    early = sorted(wheels[:torchs], key=lambda layer: sum(wheel.bytes for wheel in layer[1]))
    shared += [_wheels(name, group, overrides.get(name)) for name, group in (*early, *wheels[torchs:late])]
    shared += map(_archive, lock.archives)
    shared += [_wheels(name, group, overrides.get(name)) for name, group in wheels[late:own]]
    last = [_extension(one, lock.builder.arch) for one in lock.extensions if lock.builder]
    last += [_wheels(name, group, overrides.get(name)) for name, group in wheels[own:]]
    if lock.nvcc:
        last.append(_nvcc(lock.nvcc))
    return Parts(tuple(shared), tuple(last), _tools(lock), tuple(_stages(lock)))


def wheels_context(layer: str) -> str:
    """Return the name of the build context that holds a layer's wheels."""
    return f"wheels-{layer}"


def image_layers(lock: Lock) -> list[Layer]:
    """Return the layers of the image."""
    found = layer_parts(lock)
    return [*found.shared, *found.own]


def _nvcc(nvcc: Nvcc) -> Layer:
    return Layer("nvcc, of torch's CUDA", ("nvcc", str(SOURCE_DATE_EPOCH), nvcc.home, nvcc.release))


def _extension(one: LockedExtension, arch: str) -> Layer:
    """Return the layer of an extension. The installer takes the only wheel in the directory; the arguments identify
    that wheel for BuildKit's cache."""
    arguments = ("extension", str(SOURCE_DATE_EPOCH), one.name, one.digest, arch)
    return Layer(
        f"{one.name}, compiled from {one.digest[:12]}", arguments, f"source=extensions/{one.name}", "/mnt/wheels"
    )


def _tools(lock: Lock) -> tuple[Layer, ...]:
    """Return the layers with the tools that compile extensions. nvcc's release is checked last, just before
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
        command = compiling(one, lock.builder)
        title = f"{one.name} from {one.kind} {one.digest}"
        arguments = ("compile", str(SOURCE_DATE_EPOCH), *command)
        yield BuildStage(one.name, Layer(title, arguments, f"source=sources/{one.name}", "/mnt/source"))


def compiling(one: LockedExtension, builder: Builder) -> tuple[str, ...]:
    """Return the command that builds a wheel from source. Only MAX_JOBS is not fixed; it does not change the result."""
    home = builder.nvcc.home
    fixed = {
        "CUDA_HOME": home,
        "HOME": "/build",
        # otherwise nvcc's process id gets into the output
        "NVCC_APPEND_FLAGS": " ".join(filter(None, (one.env.get("NVCC_APPEND_FLAGS"), "--objdir-as-tempdir"))),
        "PATH": f"{VENV}/bin:{home}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONHASHSEED": "0",
        "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH),
        "TORCH_CUDA_ARCH_LIST": builder.arch,
    }
    variables = (f"{key}={value}" for key, value in sorted({**builder.environment, **one.env, **fixed}.items()))
    pip = ("-m", "pip", "wheel", "--verbose", "--disable-pip-version-check", "--no-build-isolation", "--no-deps",
           "--no-index", "--no-cache-dir", "--wheel-dir", "/out")  # fmt: skip
    settings = (f"--config-settings={setting}" for setting in one.settings)
    return ("/usr/bin/env", *variables, f"{VENV}/bin/python", *pip, *settings, ".")


def _wheels(name: str, wheels: Sequence[LockedWheel], override: str | None) -> Layer:
    """Return the layer that installs wheels; for an override it also repairs the metadata that requires another
    version."""
    task = ("override", str(SOURCE_DATE_EPOCH), override) if override else ("wheels", str(SOURCE_DATE_EPOCH))
    requirements = (f"{w.wheel.name}=={w.wheel.version} --hash=sha256:{w.wheel.sha256}" for w in wheels)
    return Layer(name, (*task, *requirements), f"from={wheels_context(name)}", "/mnt/wheels")


def _debs(title: str, debs: Sequence[Deb], source: str) -> Layer:
    return Layer(title, ("debs", str(SOURCE_DATE_EPOCH), *(deb.file for deb in debs)), f"source={source}", "/mnt/debs")


def _archive(archive: Archive) -> Layer:
    arguments = ("archive", str(SOURCE_DATE_EPOCH), archive.name, archive.sha256, FOLDERS[archive.name])
    return Layer(f"{archive.name} {archive.version}", arguments, f"source=archives/{archive.name}", "/mnt/archive")


# In a RUN of a child image, Python then writes no bytecode for locked modules that it imports; `verify` refuses such
# bytecode.
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1"}


def render(lock: Lock, name: str) -> str:
    """Render the Dockerfile of a lock. Nothing in a lock can add an instruction or reach a shell."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(exec=_exec, variable=environment_pair, reference=_reference)
    found = layer_parts(lock)
    count = 1 + len(found.shared) + max(len(found.own), len(found.tools) + 1 if found.stages else 0)
    if count > MAX_LAYERS:
        raise LockError(
            f"the lock needs {count} layers; an image can have at most {MAX_LAYERS}", hint="name fewer large packages"
        )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        lock_id=lock.id,
        lock_label=LOCK_LABEL,
        epoch=str(SOURCE_DATE_EPOCH),
        image=lock.image,
        **vars(found),
        environment=sorted({**ENVIRONMENT, **lock.environment}.items()),
    )


def _exec(arguments: Sequence[str]) -> str:
    """Format the JSON form of RUN, which uses no shell; one argument per line."""
    return "[" + ", \\\n     ".join(json.dumps(argument) for argument in arguments) + "]"


def environment_pair(key: str, value: str) -> str:
    """Format NAME="value" for ENV and LABEL; quotes, backslashes and $ (which the builder would expand) are escaped."""
    if not _VARIABLE.fullmatch(key) or _CONTROL.search(value):
        raise ValueError(f"not a name and a one-line value: {key!r}, {value!r}")
    escaped = re.sub(r"([\\\"$])", r"\\\1", value)
    return f'{key}="{escaped}"'


def _reference(text: str) -> str:
    if not _REFERENCE.fullmatch(text):
        raise ValueError(f"not an image by digest: {text!r}")
    return text
