"""What is wrong with a profile's value, in a person's words instead of pydantic's. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from envbuild.errors import near

# By the type of pydantic's error; the braces are filled from its context.
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
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than_equal": "must be {le} or less",
    "too_long": "must have {max_length} entries at most",
    "string_too_long": "must have {max_length} characters at most",
    "string_too_short": "must not be empty",
}
# What torch and others call the dtypes of a profile.
_DTYPES = {
    "float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16",
    "bfloat16": "bf16",
}  # fmt: skip
_LONGEST = 100  # characters of a value that are repeated


def said(item: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
    """One sentence for one of pydantic's errors; `path`: of the value in the profile."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_pattern_mismatch":
        return f"{item['input']!r} is not allowed here{_instead(str(item['input']), path)}"
    if kind == "literal_error":
        return _none_of(item["input"], re.findall("'([^']*)'", context["expected"]))
    return _WORDS[kind].format(**context) if kind in _WORDS else str(item["msg"])


def _none_of(value: object, known: list[str]) -> str:
    word = str(value).removeprefix("torch.").lower()
    meant = next((name for name in (word, _DTYPES.get(word)) if name in known), None)
    hint = f"did you mean {meant}?" if meant else near(word, known)
    choice = f"must be one of {', '.join(known)}" if len(known) > 1 else f"must be {known[0]}"
    return f"{choice}, not {repr(value)[:_LONGEST]}" + (f" ({hint})" if hint else "")


def _instead(text: str, path: tuple[str | int, ...]) -> str:
    """What to write where something else is often written."""
    name, pinned, _ = text.partition("=")
    if path[:1] == ("apt",) and pinned and re.fullmatch(r"[a-z0-9+.-]+", name):
        return f": the lock keeps the version that the mirror has; write {name}"
    if path == ("base", "image") and re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9._:/-]*", text):
        digest = f"`docker buildx imagetools inspect {text}` shows it"
        return f": give the digest, {text}@sha256:...; {digest}"
    if path[0] == "extensions" and path[-1] == "commit":
        return ": give it in full, 40 hex digits, as `git rev-parse` shows it"
    if path[0] == "extensions" and "settings" in path:
        return ": give NAME=VALUE, as in --build-option=--cpp_ext"
    return ""
