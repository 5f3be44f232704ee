"""The model of `profiles/<name>.yaml`. Its validation reports all faults at once, each with file and line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from packaging.version import Version
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from envbuild.facts.probe_catalogue_reader import Level
from envbuild.profile import project_test_shapes_and_script
from envbuild.profile.extension_spec import Extension
from envbuild.profile.value_types import (
    ALLOWED,
    PLATFORM,
    ArchiveFile,
    DebianPackage,
    GpuId,
    Id,
    ImageReference,
    LibraryName,
    Model,
    PackageSpec,
    Platform,
    ProbeName,
    ReasonName,
    Release,
    Sha256,
    SitePath,
    Text,
    ToolkitArchive,
    VariableName,
    one_line,
    shaped,
)
from envbuild.registry.image_reference_patterns import REPOSITORY
from envbuild.util.errors import Fault, ProfileError, near
from envbuild.util.yaml_and_project_paths import Document, Path


def _torch(text: str) -> str:
    """Complete a version with two numbers: torch's releases have three, so 2.7 means 2.7.0."""
    base = Version(text).base_version
    return text.replace(base, f"{base}.0", 1) if base.count(".") == 1 else text


class Base(Model):
    """The root file system: a Debian suite made by mmdebstrap, or an image in a registry."""

    bootstrap: Literal["bullseye", "bookworm", "trixie"] | None = Field(
        None, description="Debian suite; its Python: bullseye 3.9, bookworm 3.11, trixie 3.13"
    )
    image: ImageReference | None = Field(
        None,
        description="image by digest or tag: HOST/NAME@sha256:... or HOST/NAME:TAG; a lock has the tag's digest",
    )

    @model_validator(mode="after")
    def _one(self) -> Base:
        if (self.bootstrap is None) == (self.image is None):
            raise ValueError("give one of bootstrap or image")
        return self


class Pin(Model):
    """A library version that differs from the one that torch requires, with the reason."""

    version: Release = Field(description="exact version")
    reason: Text = Field("", description="why the version differs; shown by `envbuild show`")


def _pin(value: Any) -> Any:
    """Expand the short form: `cublas: 12.4.5.8` means `cublas: {version: 12.4.5.8}`."""
    if isinstance(value, int | float):
        raise ValueError(f'must be text: write it in quotes, "{value}"')
    return {"version": value} if isinstance(value, str) else value


# Source of nvcc. Error messages leave the tags in brackets out of field names.
ToolchainSource = Annotated[
    Annotated[Literal["wheels", "base", "debian"], Tag("[word]")] | Annotated[ToolkitArchive, Tag("[archive]")],
    Discriminator(lambda value: "[archive]" if isinstance(value, dict | ToolkitArchive) else "[word]"),
]


# Kept as NVIDIA writes it: 580.65.06 has a leading zero.
DriverRelease = Annotated[str, shaped(r"^[0-9]{1,5}(\.[0-9]{1,5}){0,3}$", "a driver's version, as in 580.65.06", 23)]


class Driver(Model):
    """The NVIDIA driver that the profile expects at run time."""

    minimum: DriverRelease | None = Field(
        None, description="the oldest driver on your machines; default: the oldest that torch's CUDA release supports"
    )
    compat: ArchiveFile | None = Field(
        None,
        description="NVIDIA's forward-compatibility libraries, for drivers older than torch's CUDA release needs; "
        "datacentre GPUs only",
    )


class Accept(Model):
    """An advisory whose risk this profile accepts."""

    advisory: Id = Field(description="id of the advisory, as `envbuild advisories` lists it")
    reason: Annotated[str, one_line(600, shortest=1)] = Field(description="why the risk is acceptable")


class Startup(Model):
    """A file in site-packages that may run code whenever Python starts (a .pth file, sitecustomize, usercustomize) or
    torch is imported (entry_points.txt with the group torch.backends)."""

    file: SitePath = Field(description="path below site-packages, as in my.pth")
    sha256: Sha256 = Field(description="sha256 of the file; a file with other content is refused")
    reason: Annotated[str, one_line(600, shortest=1)] = Field(description="why the file may run code")


class Floor(Model):
    """The minimum speeds of a GPU, as fractions of its datasheet's values. A speed without a minimum is only
    reported."""

    gemm: Annotated[float, Field(gt=0, le=1, strict=False)] | None = Field(
        None, description="minimum TFLOP/s of matrix products, as a fraction of the datasheet's value"
    )
    memory: Annotated[float, Field(gt=0, le=1, strict=False)] | None = Field(
        None, description="minimum memory bandwidth, measured with a copy, as a fraction of the datasheet's value"
    )


class SelfTest(Model):
    """What the image must pass in its container before it is tagged `verified`."""

    level: Level = Field("standard", description="how much is tested")
    require: tuple[ProbeName, ...] = Field((), strict=False, description="probes that must pass; a skip is not a pass")
    allow_tf32: bool = Field(False, description="value of torch's allow_tf32 flags while the probes run")
    transport: Literal["p2p", "nvls", "shm", "ib", "net", "socket"] | None = Field(
        None, description="how NCCL must reach one GPU from another; dist.staged measures it"
    )
    timeout: int = Field(900, ge=1, le=86400, description="seconds for the whole self-test")
    memory_gb: float = Field(
        8, gt=0, le=100_000, strict=False, allow_inf_nan=False, description="memory limit of the container, GiB"
    )
    shapes: tuple[project_test_shapes_and_script.AnyShape, ...] = Field(
        (),
        strict=False,
        max_length=project_test_shapes_and_script.MOST_SHAPES,
        description="shapes of matrix products and attention that the probes gemm.crash and attention.* test first",
    )
    script: project_test_shapes_and_script.ScriptFile | None = Field(
        None, description="path of the project's own smoke test, relative to this file; the probe own.script runs it"
    )
    floor: Floor = Field(Floor(), description="minimum speed")
    burn_seconds: int = Field(60, ge=1, le=86400, description="seconds that the probe burn runs at level full")

    @model_validator(mode="after")
    def _has_time_to_burn(self) -> SelfTest:
        if "burn_seconds" in self.model_fields_set and self.burn_seconds >= self.timeout:
            raise ValueError(f"burn_seconds ({self.burn_seconds}) must be less than timeout ({self.timeout})")
        return self


class Profile(Model):
    """A profile after merging with the profiles that it extends."""

    description: Text = Field("", description="one line, shown by `envbuild show`")
    platform: Platform = Field(PLATFORM, description="platform of the image")
    base: Base = Field(description="the root file system of the image")
    python: Annotated[str, shaped(r"^3\.[0-9]{1,2}$", 'two numbers in quotes, as in "3.11"', 4)] = Field(
        description="release of Python, in quotes; a Debian suite has exactly one"
    )
    torch: Annotated[Release, AfterValidator(_torch)] = Field(
        description="exact version, with its local label where it has one (2.13.0+cpu)"
    )
    gpus: tuple[GpuId, ...] = Field(
        (), strict=False, description="ids of GPU models (`envbuild show` lists them); empty: an image for the CPU"
    )
    gpu_count: int = Field(1, ge=1, le=100000, description="largest number of GPUs that work together in one job")
    cuda: Annotated[str, shaped(r"^[0-9]{2}\.[0-9]{1,2}$", 'a release of two numbers, as in "12.4"', 5)] | None = Field(
        None, description="the CUDA release that this torch is built for; it is checked, and selects no build of torch"
    )
    pins: dict[LibraryName, Annotated[Pin, BeforeValidator(_pin, json_schema_input_type=Release | Pin)]] = Field(
        default_factory=dict, description="versions that differ from torch's own: cublas, cudnn, nccl, ..."
    )
    variant: Literal["runtime", "devel"] = Field("runtime", description="devel: with nvcc of torch's CUDA release")
    toolchain: ToolchainSource | None = Field(
        None,
        description="where nvcc comes from: wheels (CUDA 13; the default), base (a devel image), debian, or an archive",
    )
    extensions: tuple[Extension, ...] = Field(
        (), strict=False, max_length=20, description="packages compiled from source for these GPUs"
    )
    driver: Driver = Field(Driver(), description="the NVIDIA driver at run time")
    features: tuple[Literal["fp8", "bf16", "tf32"], ...] = Field(
        (), strict=False, description="number formats that the project uses, so that advisories about them apply"
    )
    accept: tuple[Accept, ...] = Field((), strict=False, description="advisories whose risk is accepted")
    packages: tuple[PackageSpec, ...] = Field((), strict=False, description="further packages, as in requirements.txt")
    startup: tuple[Startup, ...] = Field(
        (), strict=False, max_length=20, description="files of packages that may run code when Python starts"
    )
    apt: tuple[DebianPackage, ...] = Field(
        (), strict=False, description="Debian packages, by name; the lock has their versions"
    )
    env: dict[VariableName, Text] = Field(default_factory=dict, description="environment variables of the image")
    why: dict[ReasonName, Annotated[str, one_line(600, shortest=1)]] = Field(
        default_factory=dict,
        description="reasons for values, under the name of a key (torch, driver, ...), library, package or variable; "
        "shown by `envbuild show`, not part of the lock",
    )
    partial: tuple[Annotated[str, one_line(600, shortest=1)], ...] = Field(
        (),
        strict=False,
        max_length=20,
        description="what the project requires and this profile does not have, one sentence each; shown by `envbuild "
        "show`, not part of the lock",
    )
    selftest: SelfTest = Field(SelfTest(), description="what the image must pass")

    @property
    def compiled(self) -> tuple[Extension, ...]:
        """The extensions that are built, that is, without those that `none` leaves out."""
        return tuple(one for one in self.extensions if one.none is None)

    @field_validator("extensions")
    @classmethod
    def _named_once(cls, extensions: tuple[Extension, ...]) -> tuple[Extension, ...]:
        names = [extension.name for extension in extensions]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"named twice: {', '.join(twice)}")
        return extensions

    @field_validator("gpus")
    @classmethod
    def _each_once(cls, gpus: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted({name for name in gpus if gpus.count(name) > 1})
        if twice:
            raise ValueError(f"named twice: {', '.join(twice)}")
        return gpus

    @field_validator("selftest")
    @classmethod
    def _transport_is_between_gpus(cls, selftest: SelfTest, info: ValidationInfo) -> SelfTest:
        if selftest.transport and info.data.get("gpus") == ():
            raise ValueError("transport needs GPUs, and gpus is empty")
        return selftest


def validate_profile(merged: Document, name: str, known: Sequence[Fault] = ()) -> Profile:
    """Validate a profile and return its model. `known`: faults that the caller has found already.

    Raises ProfileError with all faults, including `known`, each with its file and line.
    """
    found = tried(merged)
    if known or not isinstance(found, Profile):
        malformed = [] if isinstance(found, Profile) else found
        raise profile_error(name, [*known, *(fault for _, fault in malformed)])
    return found


def profile_error(name: str, faults: Iterable[Fault], hint: str | None = None) -> ProfileError:
    """The error for an invalid profile, with its faults in the order of the file."""
    ordered = sorted(faults, key=lambda fault: (fault.file or "", fault.line or 0))
    return ProfileError(f"profile {name} is not valid", faults=ordered, hint=hint)


Malformed = tuple[Path, Fault]
"""The path to an invalid value, and what is wrong with it."""


def tried(merged: Document) -> Profile | list[Malformed]:
    """Return the model of a profile, or all its faults."""
    try:
        return Profile.model_validate(merged.data)
    except ValidationError as error:
        return list(_malformed(error, merged))


def _malformed(error: ValidationError, merged: Document) -> Iterator[Malformed]:
    for item in error.errors():
        # Drop the parts in brackets that pydantic and our union tags add. Keep the last part of an unknown-key error:
        # it is the user's key, which may itself begin with "[".
        own = item["loc"][-1:] if item["type"] == "extra_forbidden" else ()
        outer = item["loc"][: len(item["loc"]) - len(own)]
        path = (*(part for part in outer if not str(part).startswith("[")), *own)
        yield path, merged.fault(path, _message(item, path))


def _message(item: Any, path: tuple[str | int, ...]) -> str:
    if item["type"] != "extra_forbidden":
        return validation_message(item, path)
    known = _keys(item["loc"][:-1])
    hint = near(str(path[-1]), known) or f"known: {', '.join(known)}"
    return f"unknown key ({hint})"


def _keys(path: tuple[str | int, ...]) -> list[str]:
    """The known keys of the mapping at `path`."""
    model: type[BaseModel] = Profile
    options: list[type[BaseModel]] = []
    for part in map(str, path):
        field = model.model_fields.get(part)  # None: a list's index, a mapping's key, or the tag of a model in a union
        options = list(_models(field.annotation)) if field else options
        named = [option for option in options if part == f"[{option.__name__.lower()}]"]
        model = next(iter(named or (options if field else ())), model)
    return sorted([*model.model_fields, *(["extends"] if model is Profile else [])])


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models within a type such as tuple[Accept, ...] or dict[str, Pin]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def schema() -> dict[str, Any]:
    """The JSON Schema of a profile file. A file with `extends` needs no other key."""
    result = Profile.model_json_schema()
    result |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "envbuild profile"}
    result["properties"]["extends"] = {
        "type": "string",
        "description": "name or path of the profile whose values this one inherits",
    }
    required = result.pop("required")
    for names in ("env", "why"):
        result["properties"][names]["additionalProperties"] = False
    result["anyOf"] = [{"required": ["extends"]}, {"required": required}]
    return result


# Messages by pydantic's error type; the context of the error fills the braces.
_WORDS = {
    "missing": "missing",
    "string_type": "must be text: write it in quotes",
    "tuple_type": "must be a list",
    "model_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "bool_type": "must be true or false",
    "is_instance_of": "must be a path",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than_equal": "must be {le} or less",
    "too_long": "must have {max_length} entries at most",
    "string_too_long": "must have {max_length} characters at most",
    "string_too_short": "must not be empty",
}
# Names of the dtypes in torch and other libraries -> names in a profile.
_DTYPES = {
    "float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16",
    "bfloat16": "bf16",
}  # fmt: skip
_LONGEST = 100  # characters of a value shown in a message


def validation_message(item: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
    """The message for a pydantic error. `path`: the keys and indexes that lead to the value in the profile."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_pattern_mismatch":
        instead = _instead(str(item["input"]), path) or ALLOWED[context["pattern"]]
        return f"{item['input']!r} is not allowed here: {instead}"
    if kind == "literal_error":
        return _none_of(item["input"], re.findall("'([^']*)'", context["expected"]))
    if kind == "tuple_type" and isinstance(item["input"], str):
        return f"must be a list: [{item['input'][:_LONGEST]}]"
    return _WORDS[kind].format(**context) if kind in _WORDS else str(item["msg"])


def _none_of(value: object, known: list[str]) -> str:
    word = str(value).removeprefix("torch.").lower()
    meant = next((name for name in (word, _DTYPES.get(word)) if name in known), None)
    hint = f"did you mean {meant}?" if meant else near(word, known)
    choice = f"must be one of {', '.join(known)}" if len(known) > 1 else f"must be {known[0]}"
    return f"{choice}, not {repr(value)[:_LONGEST]}" + (f" ({hint})" if hint else "")


def _instead(text: str, path: tuple[str | int, ...]) -> str:
    """What to write instead of a common mistake; empty if unknown."""
    name, pinned, _ = text.partition("=")
    if path[:1] == ("apt",) and pinned and re.fullmatch(r"[a-z0-9+.-]+", name):
        return f"write {name}: the lock records the version that the mirror has"
    if path[:1] == ("gpus",):
        from envbuild.facts import gpu_name_lookup  # only for errors

        return gpu_name_lookup.question(text) or ""
    if path == ("base", "image") and re.fullmatch(REPOSITORY, text):
        return f"name a tag or a digest too: {text}:TAG or {text}@sha256:..."
    return ""
