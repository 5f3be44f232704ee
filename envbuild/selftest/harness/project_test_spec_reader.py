"""Reads the tests that a profile adds to the self-test: shapes of GEMMs and of attention, and a script.

These tests are in the field `own` of the job document.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Callable

DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # profile's name -> torch's name
LAYOUTS = ("nn", "nt", "tn", "tt")
# what the name of a script may be: the script is written to a file with its name
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.py")
_MOST_BYTES = 256 << 10
_SIZES = ("m", "k", "n")
_ATTENTION_SIZES = ("heads", "length", "depth")
_ATTENTION_DTYPES = ("fp32", "fp16", "bf16")

Fault = Callable[[str, str], None]


@dataclass(frozen=True)
class ShapeSpec:
    """One matrix product (m, k) x (k, n). `dtype` is torch's name of the dtype. With `bias`, the product is computed as
    a linear layer."""

    m: int
    k: int
    n: int
    dtype: str
    layout: str
    bias: bool


@dataclass(frozen=True)
class AttentionSpec:
    """One call of attention on inputs of shape `heads` x `length` x `depth`. `dtype` is torch's name of the dtype."""

    heads: int
    length: int
    depth: int
    dtype: str
    causal: bool


@dataclass(frozen=True)
class ScriptSpec:
    """A Python script: its file name and its source."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class ProjectTestSpec:
    """The tests that a profile adds to the self-test. Most profiles add none."""

    shapes: tuple[ShapeSpec, ...] = ()
    attentions: tuple[AttentionSpec, ...] = ()
    script: ScriptSpec | None = None


def read(value: Any, fault: Fault) -> ProjectTestSpec:
    """Read the field `own` of a job document. `fault` is called with the location and the text of every fault."""
    if value is None:
        return ProjectTestSpec()
    if not isinstance(value, dict) or not set(value) <= {"shapes", "script"}:
        fault("own", "expected a mapping with shapes and script")
        return ProjectTestSpec()
    shapes = value.get("shapes", [])
    if not isinstance(shapes, list):
        fault("own.shapes", "expected a list")
        shapes = []
    found = [_shape(f"own.shapes[{index}]", item, fault) for index, item in enumerate(shapes)]
    return ProjectTestSpec(
        tuple(shape for shape in found if isinstance(shape, ShapeSpec)),
        tuple(shape for shape in found if isinstance(shape, AttentionSpec)),
        _script(value.get("script"), fault),
    )


def _shape(where: str, item: Any, fault: Fault) -> ShapeSpec | AttentionSpec | None:
    return (_attention if isinstance(item, dict) and "heads" in item else _gemm)(where, item, fault)


def _attention(where: str, item: dict[str, Any], fault: Fault) -> AttentionSpec | None:
    fields = {"causal": False, **item}
    if set(fields) != {*_ATTENTION_SIZES, "dtype", "causal"}:
        fault(where, "expected a mapping with heads, length, depth, dtype and causal")
    elif not all(type(fields[size]) is int and fields[size] > 0 for size in _ATTENTION_SIZES):
        fault(where, "heads, length and depth must be whole numbers above zero")
    elif fields["dtype"] not in _ATTENTION_DTYPES or not isinstance(fields["causal"], bool):
        fault(where, "dtype must be one of {}, causal true or false".format(", ".join(_ATTENTION_DTYPES)))
    else:
        return AttentionSpec(**dict(fields, dtype=DTYPES[fields["dtype"]]))
    return None


def _gemm(where: str, item: Any, fault: Fault) -> ShapeSpec | None:
    fields = {"layout": "nn", "bias": False, **item} if isinstance(item, dict) else {}
    if set(fields) != {*_SIZES, "dtype", "layout", "bias"}:
        fault(where, "expected a mapping with m, k, n, dtype, layout and bias")
        return None
    if not all(type(fields[size]) is int and fields[size] > 0 for size in _SIZES):
        fault(where, "m, k and n must be whole numbers above zero")
        return None
    words = fields["dtype"] in tuple(DTYPES), fields["layout"] in LAYOUTS, isinstance(fields["bias"], bool)
    if not all(words):
        known = ", ".join(DTYPES), ", ".join(LAYOUTS)
        fault(where, "dtype must be one of {}, layout one of {}, bias true or false".format(*known))
        return None
    return ShapeSpec(**dict(fields, dtype=DTYPES[fields["dtype"]]))


def _script(value: Any, fault: Fault) -> ScriptSpec | None:
    if value is None:
        return None
    name, text = (value.get("name"), value.get("text")) if isinstance(value, dict) else (None, None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fault("own.script.name", "expected the name of a .py file")
    elif not isinstance(text, str) or len(text) > _MOST_BYTES:
        fault("own.script.text", f"expected source code of at most {_MOST_BYTES} characters")
    else:
        return ScriptSpec(name, text)
    return None
