"""Generates docs/profile-format.md, the page of every key of a profile, from the JSON Schema that editors use.

python -m unit.profile.profile_reference        in tests/; writes the page
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envbuild.profile import model as profile_model

PAGE = Path(__file__).parents[3] / "docs" / "profile-format.md"
_HEAD = """# Format of a profile

Made from the JSON Schema of profiles by `python -m unit.profile.profile_reference` in `tests/`; a test compares it.

A profile is a YAML file. `base`, `python` and `torch` are required, unless the profile extends another one. An unknown
key is an error. [Your own project](guides/project.md) shows the common keys, and [profiles in detail](profiles.md)
explains the others. `envbuild export schema` writes the schema for an editor.
"""
_EXTENDS = "another profile, by name or by a path within the project: mappings are merged, other values replaced"
Schema = Mapping[str, Any]


def page() -> str:
    schema = profile_model.schema()
    return _HEAD + "".join(_section("", "Top level", schema, schema["$defs"]))


def _section(path: str, title: str, model: Schema, models: Mapping[str, Schema]) -> Iterator[str]:
    """Return the table of a mapping's keys, then the tables of the mappings inside it. `path`: the prefix of the
    mapping's keys, such as `selftest.`."""
    yield f"\n## {title}\n"
    if path:
        yield f"\n{_sentence(model['description'])}\n"
    yield "\n| key | value | default | meaning |\n|---|---|---|---|\n"
    required = {*model.get("required", ()), *({"base", "python", "torch"} if not path else ())}
    keys = sorted(model["properties"].items(), key=lambda item: item[0] != "extends")
    for key, value in keys:
        meaning = _EXTENDS if key == "extends" else value.get("description", "")
        default = "required" if key in required else _default(value.get("default"))
        yield f"| `{key}` | {_type(value, models)} | {default} | {_one_line(meaning)} |\n"
    for key, value in keys:
        for name in dict.fromkeys(_models(value)):
            if "properties" not in models[name]:
                continue
            several = len(set(_models(value))) > 1 and key == "shapes"
            below = f"{path}{key}"
            suffix = {"array": "[]", "object": ".NAME"}.get(str(value.get("type")), "")
            what = f": {name.lower()}" if several else ""
            yield from _section(f"{below}.", f"`{below}{suffix}`{what}", models[name], models)


def _models(value: Schema) -> Iterator[str]:
    """Return the names of the mappings that a value, its items or its entries may be."""
    if "$ref" in value:
        yield value["$ref"].rpartition("/")[2]
    inside = [*value.get("anyOf", ()), *value.get("oneOf", ()), *value.get("patternProperties", {}).values()]
    inside += [inner for key in ("items", "additionalProperties") if isinstance(inner := value.get(key), dict)]
    for inner in inside:
        yield from _models(inner)


def _type(value: Schema, models: Mapping[str, Schema]) -> str:
    """Describe the allowed values in a few words."""
    if "$ref" in value:
        return "mapping"
    if "enum" in value or "const" in value:
        return ", ".join(f"`{one}`" for one in value.get("enum", [value.get("const")]))
    options = [_type(one, models) for one in (*value.get("anyOf", ()), *value.get("oneOf", ()))]
    if options:
        return " or ".join(dict.fromkeys(option for option in options if option != "null"))
    if value["type"] == "array":
        return f"list of {_plural(_type(value['items'], models))}"
    if value["type"] == "object":
        inner = [*value.get("patternProperties", {}).values(), value.get("additionalProperties")]
        entry = next(_type(one, models) for one in inner if isinstance(one, dict))
        return f"mapping of names to {_plural(entry)}"
    word = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
    return word.get(value["type"], str(value["type"])) + _range(value)


def _plural(word: str) -> str:
    return {"text": "texts", "mapping": "mappings", "text or mapping": "texts or mappings"}.get(word, word)


def _range(value: Schema) -> str:
    least, above = value.get("minimum"), value.get("exclusiveMinimum")
    most = value.get("maximum")
    if most is None:
        return ""
    return f" from {least} to {most}" if least is not None else f" above {above}, at most {most}"


def _default(value: object) -> str:
    if value in (None, "", [], {}) or isinstance(value, dict):
        return "-"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sentence(text: str) -> str:
    return _one_line(text.partition("\n\n")[0])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
