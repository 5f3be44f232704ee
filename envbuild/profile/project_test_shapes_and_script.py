"""What a profile adds to the self-test: the project's shapes of GEMMs and attention, and the project's own script.

Shapes and script are not part of a lock: they define what an image must pass, not what it contains.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, InstanceOf, Tag, WithJsonSchema, model_validator

from envbuild.util.errors import Fault, FileError
from envbuild.util.yaml_and_project_paths import Document, display, home, inside, regular

MOST_SHAPES = 200
MOST_BYTES = 256 << 10  # per script
# Limits in elements. _SCORES: PyTorch's math path stores the scores of four problems. _VALUES: 64 MiB in float64.
_SCORES, _VALUES = 1 << 28, 1 << 23
_RESULT = 1 << 26  # elements of a product: 512 MiB in float64, the dtype in which it is compared
# The most elements of a factor: 4 GiB at most, so that both factors fit into the memory of a GPU with 16 GB.
_FACTOR = {"fp64": 1 << 29, "fp32": 1 << 30, "fp16": 1 << 30, "bf16": 1 << 30}
_PATH = r"^(\.\./)*([A-Za-z0-9_][A-Za-z0-9_.-]*/)*[A-Za-z0-9_][A-Za-z0-9_.-]*\.py$"
_HERE = ("selftest", "script")

Size = Annotated[int, Field(ge=1, le=1 << 24)]


class Shape(BaseModel):
    """A matrix product (m, k) x (k, n). The probe gemm.crash tests it before its own products."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    m: Size = Field(description="rows of the first factor")
    k: Size = Field(description="columns of the first factor, rows of the second")
    n: Size = Field(description="columns of the second factor")
    dtype: Literal["fp64", "fp32", "fp16", "bf16"] = Field(description="dtype of factors and product")
    layout: Literal["nn", "nt", "tn", "tt"] = Field("nn", description="one letter per factor; t: transposed in memory")
    bias: bool = Field(False, description="as a linear layer with a bias, instead of a plain product")

    @model_validator(mode="after")
    def _fits(self) -> Shape:
        if self.bias and self.layout != "nn":
            raise ValueError("a linear layer has a fixed layout: remove layout or bias")
        if max(self.m * self.k, self.k * self.n) > _FACTOR[self.dtype]:
            raise ValueError(f"a factor may have {_FACTOR[self.dtype]} elements at most in {self.dtype}")
        if self.m * self.n > _RESULT:
            raise ValueError(f"the product may have {_RESULT} elements at most")
        return self


class Attention(BaseModel):
    """Attention over q, k and v of heads x length x depth. The probes attention.* test it before their own cases."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    heads: Annotated[int, Field(ge=1, le=1024, description="number of heads")]
    length: Annotated[int, Field(ge=1, le=1 << 14, description="number of queries, and of keys")]
    depth: Annotated[int, Field(ge=1, le=512, description="size of a head")]
    dtype: Literal["fp32", "fp16", "bf16"] = Field(description="dtype of q, k and v")
    causal: bool = Field(False, description="with a causal mask")

    @model_validator(mode="after")
    def _fits(self) -> Attention:
        if self.heads * self.length**2 > _SCORES:
            raise ValueError(f"heads x length x length may be {_SCORES} at most: fewer heads test the same kernel")
        if self.heads * self.length * self.depth > _VALUES:
            raise ValueError(f"heads x length x depth may be {_VALUES} at most: fewer heads test the same kernel")
        return self


def _kind(item: object) -> str:
    """The tag of a shape in a profile: attention if it has a key that only attention has, otherwise a GEMM."""
    keys = set(item) if isinstance(item, dict) else {"heads"} if isinstance(item, Attention) else set()
    return "[attention]" if keys & {"heads", "length", "depth"} else "[shape]"


AnyShape = Annotated[Annotated[Shape, Tag("[shape]")] | Annotated[Attention, Tag("[attention]")], Discriminator(_kind)]


@dataclass(frozen=True)
class Script:
    """The project's own smoke test: its path as written in the profile, and the source text of that file."""

    path: str
    text: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


# In the profile file this is a path. Before validation, `read_script` replaces the path with a `Script`, the only valid
# type here, and refuses text that is not a path. So a profile cannot contain the source itself.
ScriptFile = Annotated[InstanceOf[Script], WithJsonSchema({"type": "string", "pattern": _PATH, "maxLength": 300})]


def read_script(merged: Document) -> list[Fault]:
    """Replace the script's path in the profile with a `Script`; return the faults of the path and the script."""
    selftest = merged.data.get("selftest")
    path = selftest.get("script") if isinstance(selftest, dict) else None
    if not isinstance(selftest, dict) or not isinstance(path, str):
        return []
    try:
        file, text = _read(path, Path(merged.place(_HERE).file))
    except ValueError as error:
        selftest["script"] = None
        return [merged.fault(_HERE, str(error))]
    selftest["script"] = Script(path, text)
    return list(syntax(text, display(file), str(merged.data.get("python"))))


def syntax(text: str, name: str, python: str) -> Iterator[Fault]:
    """The syntax errors of a script. `name`: the file's name in faults; `python`: the release that will run the script
    ("3.11"). A release newer than the Python that runs envbuild may accept more, so nothing is checked for such a
    release."""
    minor = re.fullmatch(r"3\.([0-9]{1,2})", python)
    if minor and int(minor[1]) > sys.version_info.minor:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text, name, feature_version=(3, int(minor[1])) if minor else None)
            compile(tree, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        yield Fault(f"invalid Python: {error.msg}", name, error.lineno)
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        yield Fault(f"invalid Python: {str(error) or 'nested too deeply'}", name)


def _read(path: str, profile: Path) -> tuple[Path, str]:
    """The file at `path`, relative to the profile that names it, and its source. Raises ValueError with the reason."""
    if len(path) > 300 or not re.fullmatch(_PATH, path):
        raise ValueError(f"{path[:300]!r} is not a path of a .py file, relative to the profile")
    file = inside(path, profile.parent, home(profile))
    try:
        if not file.is_file():
            raise ValueError(f"file not found: {display(file)}")
    except OSError as error:  # the name is too long
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return file, _text(file, path)


def _text(file: Path, path: str) -> str:
    try:
        raw = regular(file, MOST_BYTES)
        if len(raw) > MOST_BYTES:
            raise ValueError(f"{path} is larger than {MOST_BYTES} bytes")
        return raw.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def given(file: Path, python: str) -> Script:
    """Read a script named on the command line. `python`: the release that will run it ("3.11"). Raises FileError if the
    script cannot be read or has syntax errors."""
    try:
        text = _text(file, display(file))
    except ValueError as error:
        raise FileError(str(error)) from None
    faults = list(syntax(text, display(file), python))
    if faults:
        raise FileError(f"{display(file)} is not a valid script", faults=faults)
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", file.stem).lstrip(".-")
    return Script(f"{stem or 'script'}.py", text)
