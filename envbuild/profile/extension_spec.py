"""The section of a profile that describes an extension compiled from source.

Extensions such as apex, flash-attn or a project's own differ only in these values, never in code. A build reads its
flags from environment variables, or from pip's --config-settings, for example in older commits that read no variables.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from envbuild.profile.value_types import Model, PackageSpec, SourceArchive, Text, VariableName, shaped
from envbuild.util import url_redaction

# Installed for the build of every extension, because setuptools and torch's cpp_extension use them. `build.requires`
# adds further packages.
BUILD_TOOLS = ("ninja", "setuptools", "wheel")

ExtensionName = Annotated[
    str, shaped(r"^[a-z0-9]+(-[a-z0-9]+)*$", "lower case letters and digits, with single dashes between them", 50)
]
GitAddress = Annotated[
    str,
    shaped(r"^(https?|ssh|file)://[A-Za-z0-9/][!-~]*$", "an address of https, http, ssh or file, without spaces", 1000),
    AfterValidator(url_redaction.validate_url),
]
Commit = Annotated[
    str,
    shaped(r"^([0-9a-f]{40}|[0-9a-f]{64})$", "give it in full, 40 hex digits, as `git rev-parse` shows it", 64),
]
ModuleName = Annotated[
    str,
    shaped(
        r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$",
        "a module as Python imports it, as in kernels.norms",
        200,
    ),
]
Setting = Annotated[
    str,
    shaped(
        r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*=[A-Za-z0-9_.,:/=+@ -]*$", "give NAME=VALUE, as in --build-option=--cpp_ext", 300
    ),
]

# Variables that a profile must not set for a build: the wheel would no longer match its cache key, or would be compiled
# for GPUs that the profile does not list.
_OURS = frozenset(
    {"CUDA_HOME", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "MAX_JOBS", "PATH", "PYTHONHASHSEED", "PYTHONHOME",
     "PYTHONPATH", "SOURCE_DATE_EPOCH", "TMPDIR", "TORCH_CUDA_ARCH_LIST", "VIRTUAL_ENV"}
)  # fmt: skip


# Names that `show` and reports use for other things than extensions.
_TAKEN = frozenset({"cublas", "cuda", "cudnn", "nccl", "python", "torch"})


def _reason(value: object) -> object:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("write the reason why the profile leaves this extension out, as a text in quotes")
    return value


class Build(Model):
    """How an extension is built, and what its build needs in addition to torch."""

    env: dict[VariableName, Text] = Field(
        default_factory=dict,
        description="environment variables of the build; each name must occur in a build file of the source",
    )
    settings: tuple[Setting, ...] = Field(
        (), strict=False, max_length=50, description="pip's --config-settings, as in --build-option=--cpp_ext"
    )
    requires: tuple[PackageSpec, ...] = Field(
        (),
        strict=False,
        max_length=50,
        description=f"packages for the build, in addition to torch, {', '.join(BUILD_TOOLS)}; not in the image",
    )

    @field_validator("env")
    @classmethod
    def _leaves_ours_alone(cls, env: dict[str, str]) -> dict[str, str]:
        taken = sorted(_OURS & set(env))
        if taken:
            raise ValueError(f"set by envbuild itself: {', '.join(taken)}")
        return env


class Extension(Model):
    """One extension, built from a git commit or an sdist; or left out, with the reason in `none`."""

    name: ExtensionName = Field(description="name of the distribution")
    git: GitAddress | None = Field(
        None, description="URL of the repository; the setting git_mirror, if set, replaces it"
    )
    commit: Commit | None = Field(None, description="commit in full, 40 hex digits")
    submodules: Literal["omit"] | None = Field(
        None, description="omit: build without the git submodules; required if the commit has submodules"
    )
    sdist: SourceArchive | None = Field(None, description="source as a tar, instead of git")
    build: Build = Field(Build(), description="how it is built")
    modules: tuple[ModuleName, ...] = Field(
        (), strict=False, max_length=200, description="compiled modules that the wheel must contain"
    )
    none: Annotated[Text | None, BeforeValidator(_reason)] = Field(
        None, description="instead of a source: the reason why this profile leaves the extension out"
    )

    @field_validator("name")
    @classmethod
    def _has_a_name_of_its_own(cls, name: str) -> str:
        if name in _TAKEN:
            raise ValueError(f"{name} is not an extension: a profile has its own key for it")
        return name

    @model_validator(mode="after")
    def _is_one_thing(self) -> Extension:
        if sum(value is not None for value in (self.git, self.sdist, self.none)) != 1:
            raise ValueError("give one of git, sdist, or none (a reason)")
        besides = sorted(self.model_fields_set - {"name", "none"})
        if self.none is not None and besides:
            describe, keys = ("describes", "this key") if len(besides) == 1 else ("describe", "these keys")
            raise ValueError(
                f"none leaves the extension out, but {', '.join(besides)} {describe} how to build it: remove none or "
                f"{keys}"
            )
        if (self.git is None) != (self.commit is None):
            raise ValueError("git and commit (40 hex digits) go together")
        if self.none is None and not self.modules:
            raise ValueError(
                "modules: name the modules that the wheel must contain, because a build can silently omit them"
            )
        return self

    @property
    def source(self) -> str | None:
        """The id of the extension's source: a commit, or an sdist's sha256; None if the extension is left out."""
        return self.commit or (self.sdist.sha256 if self.sdist else None)
