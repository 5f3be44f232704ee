"""Lock -> Dockerfile. Pure: the rendered text is committed, so that a moved pin is a readable diff."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jinja2

from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import FOLDERS, UNPACKER, Archive
from envbuild.fetch.locked_artifact_types import Builder, LockedExtension, LockedWheel, Nvcc
from envbuild.image.debian_base_tar import SOURCE_DATE_EPOCH
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.lock.lock_file import BUILDER, PACKAGES, Lock
from envbuild.registry.image_reference_grammar import BY_DIGEST
from envbuild.resolve.plan_resolver import VENV
from envbuild.util import package_data
from envbuild.util.errors import LockError

TEMPLATE = package_data.DOCKERFILES / "Dockerfile.j2"
# What the build binds as /mnt/bin beside uv.
TOOLS = (*(package_data.DOCKERFILES / name for name in ("install", "check", "repin")), UNPACKER)

# Folders of the build context for Debian packages: the image's, and those of its extensions' builder alone.
DEBS, BUILDER_DEBS = "debs", "builder/debs"

# The engine's overlay store takes 127 layers at most; some are left to child images.
MAX_LAYERS = 100

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_REFERENCE = re.compile(BY_DIGEST)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


@dataclass(frozen=True)
class Layer:
    """One RUN of the installer: its arguments, and what it gets as `target`: a folder of the build context
    ("source=debs"), or a context of its own ("from=wheels-torch")."""

    title: str
    arguments: tuple[str, ...]
    source: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class BuildStage:
    """Where an extension's wheel is compiled; its target is `wheel-<name>`."""

    name: str
    layer: Layer


@dataclass(frozen=True)
class Parts:
    """The image is `shared`, then `own`. Extensions are compiled on `shared` and `tools`, in stages of their own."""

    shared: tuple[Layer, ...]
    own: tuple[Layer, ...]
    tools: tuple[Layer, ...] = ()
    stages: tuple[BuildStage, ...] = ()


def layer_parts(lock: Lock) -> Parts:
    """Layers in the order they are made, from what profiles share to what is this one's own."""
    epoch = str(SOURCE_DATE_EPOCH)
    # Debian packages first: they remove bytecode, and a whiteout of what a layer below has keeps the time of the build.
    shared = [_debs("Debian packages", lock.apt, DEBS)] if lock.apt else []
    shared.append(Layer("the virtual environment, /opt/venv", ("venv", epoch, lock.python)))
    wheels = [(name, list(group)) for name, group in itertools.groupby(lock.wheels, key=lambda locked: locked.layer)]
    overrides = {override.name: f"{override.name}=={override.version}" for override in lock.overrides}
    late = next((i for i, (name, _) in enumerate(wheels) if name in overrides or name == PACKAGES), len(wheels))
    own = next((i for i, (name, _) in enumerate(wheels) if name == PACKAGES), len(wheels))
    # Of what torch brings the smallest first, so that there is work while the large ones come to the builder. What a
    # devel image has more stays behind it: it shares all that a runtime image has.
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
    """The name of the build context that holds a layer's wheels."""
    return f"wheels-{layer}"


def image_layers(lock: Lock) -> list[Layer]:
    """Those of the image."""
    found = layer_parts(lock)
    return [*found.shared, *found.own]


def _nvcc(nvcc: Nvcc) -> Layer:
    return Layer("nvcc, of torch's CUDA", ("nvcc", str(SOURCE_DATE_EPOCH), nvcc.home, nvcc.release))


def _extension(one: LockedExtension, arch: str) -> Layer:
    """It takes the one wheel that is there; the other words only say which that is."""
    arguments = ("extension", str(SOURCE_DATE_EPOCH), one.name, one.digest, arch)
    return Layer(
        f"{one.name}, compiled from {one.digest[:12]}", arguments, f"source=extensions/{one.name}", "/mnt/wheels"
    )


def _tools(lock: Lock) -> tuple[Layer, ...]:
    """nvcc's release is looked at last, so before anything is compiled."""
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
    """The command that makes a wheel of a source. MAX_JOBS alone is free, which changes no result."""
    home = builder.nvcc.home
    fixed = {
        "CUDA_HOME": home,
        "HOME": "/build",
        # else the number of nvcc's process gets into what it makes
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
    """What the installer is to do: for an override also to mend the metadata that asked for another version."""
    task = ("override", str(SOURCE_DATE_EPOCH), override) if override else ("wheels", str(SOURCE_DATE_EPOCH))
    requirements = (f"{w.wheel.name}=={w.wheel.version} --hash=sha256:{w.wheel.sha256}" for w in wheels)
    return Layer(name, (*task, *requirements), f"from={wheels_context(name)}", "/mnt/wheels")


def _debs(title: str, debs: Sequence[Deb], source: str) -> Layer:
    return Layer(title, ("debs", str(SOURCE_DATE_EPOCH), *(deb.file for deb in debs)), f"source={source}", "/mnt/debs")


def _archive(archive: Archive) -> Layer:
    arguments = ("archive", str(SOURCE_DATE_EPOCH), archive.name, archive.sha256, FOLDERS[archive.name])
    return Layer(f"{archive.name} {archive.version}", arguments, f"source=archives/{archive.name}", "/mnt/archive")


# So that pip and Python in a RUN of a child image write no compiled code for locked modules, which `verify` refuses.
_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1"}


def render(lock: Lock, name: str) -> str:
    """The Dockerfile of a lock. Nothing in a lock can add an instruction to it or reach a shell."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(exec=_exec, variable=_variable, reference=_reference)
    found = layer_parts(lock)
    count = 1 + len(found.shared) + max(len(found.own), len(found.tools) + 1 if found.stages else 0)
    if count > MAX_LAYERS:
        raise LockError(f"the lock makes {count} layers; {MAX_LAYERS} is the most", hint="name fewer large packages")
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        lock_id=lock.id,
        lock_label=LOCK_LABEL,
        epoch=str(SOURCE_DATE_EPOCH),
        image=lock.image,
        **vars(found),
        environment=sorted({**_ENVIRONMENT, **lock.environment}.items()),
    )


def beginning(text: str) -> str:
    """Of a rendered Dockerfile what needs no wheel: the base, the virtual environment, Debian packages. Without
    comments, which name the lock: it is the same where another wheel alone was locked."""
    steps = itertools.takewhile(lambda step: "=wheels-" not in step, text.split("\n\n# "))
    lines = "\n\n# ".join(steps).splitlines()
    return "".join(f"{line}\n" for line in lines if line and not line.startswith("#"))


def _exec(arguments: Sequence[str]) -> str:
    """The JSON form of RUN, which no shell reads; an argument to a line."""
    return "[" + ", \\\n     ".join(json.dumps(argument) for argument in arguments) + "]"


def _variable(key: str, value: str) -> str:
    """NAME="value" as ENV and LABEL take it: quotes, backslashes and the builder's own $ expansion are escaped."""
    if not _VARIABLE.fullmatch(key) or _CONTROL.search(value):
        raise ValueError(f"not a name and a one-line value: {key!r}, {value!r}")
    escaped = re.sub(r"([\\\"$])", r"\\\1", value)
    return f'{key}="{escaped}"'


def _reference(text: str) -> str:
    if not _REFERENCE.fullmatch(text):
        raise ValueError(f"not an image by digest: {text!r}")
    return text
