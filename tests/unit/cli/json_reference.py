"""docs/json.md: the documents of `--json`, from their types.

python -m unit.cli.json_reference        in tests/; writes the page
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envbuild.cli import document_schemas

PAGE = Path(__file__).parents[3] / "docs" / "json.md"
_HEAD = """# Output for programs

Made by `python -m unit.cli.json_reference` in `tests/`; a test compares it with the types of the documents.

Every command has `--json`: one JSON document on stdout, also if the command fails. `envbuild export schema --document
make` writes the JSON Schema of the document of `make`; this page lists the keys.

- If the command succeeds, every key is present. What is not known is null, and a list may be empty.
- A command that failed has `error`, and those of its other keys that were known. The exit codes are in
  [Commands](commands.md).
- `make`, `build`, `test`, `status`, `show` and `export` with several profiles give `{"profiles": [...]}`: a document
  for each, which has `error` if that profile failed.
- A measured number that is not finite is the text nan, inf or -inf.
- Texts in `detail`, `reason`, `reasons[].detail`, `message`, `notes` and `hint` are for people and may change. Do not
  parse them: what they say has keys of its own.

## Keys that mean the same everywhere

| key | value |
|---|---|
| `profile` | the name of a profile |
| `lock` | the id of a lock, `sha256:...`, or null |
| `lock_state` | current, outdated (the profile changed after it was locked; `changed` lists the parts), missing |
| `image` | the id of an image, `sha256:...`, or null; see [Architecture](architecture.md) |
| `digest` | `sha256:...` of a manifest or of a file |
| `reference`, `repository`, `tag`, `tags` | names of images in an engine or a registry |
| `state` | one of the values below |
| `evidence` | for each GPU model: `model` (or cpu), `state`, `statement` (file), `reason`, `level`, `unconfined` |
| `evidence[].state` | verified, stale, failed, missing |
| `advisories` | known faults: `id`, `state`, `reason`, `remedy` |
| `advisories[].state` | refused, accepted, warned, noted; in `explain` affected, possible, ruled-out |
| `reasons` | why something is not verified: `id`, `detail` |
| `next_command` | the command to type next |
| `selftest` | counts of probes (`passed`, `failed`, `skipped`), `seconds`, `failures`; in `export` its id |
| `error` | `code` (the exit code), `kind`, `message`, `hint`, `faults` (`message`, `file`, `line`, `field`) |

## States of an image

| state | meaning |
|---|---|
| verified | the evidence fulfils all that the profile requires |
| unverified | built, without that evidence |
| stale | the lock or the evidence is of an earlier profile or self-test |
| failed | the self-test failed; in `make` also: no image was built |
| missing | not locked, or not built |
| tampered | the tag `verified` was moved by hand |
| invalid | the profile or its lock cannot be read |
| built | `build` does not look at evidence |

`show` asks no engine: it computes the state from the evidence on disk. Other commands have states of their own, which
are listed below.
"""


def page() -> str:
    sections = [_HEAD.rstrip(), "## Documents"]
    for name in document_schemas.DOCUMENTS:
        sections.append("\n".join(_section(name)))
    return "\n\n".join(sections) + "\n"


def _section(name: str) -> Iterator[str]:
    yield f"### {name}"
    definitions = document_schemas.document_schema(name)["$defs"]
    for kind in document_schemas.DOCUMENTS[name]:
        found: Mapping[str, Any] = definitions[kind.__name__]
        yield ""
        yield textwrap.fill(" ".join(str(found.get("description", "")).split()), 120, break_on_hyphens=False)
        yield ""
        for key, value in found["properties"].items():
            yield textwrap.fill(
                f"- `{key}`: {_words(value, definitions)}", 120, subsequent_indent="  ", break_on_hyphens=False
            )


def _words(value: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        keys = definitions[name].get("properties", {})
        return f"object ({', '.join(f'`{key}`' for key in keys)})"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_words(one, definitions) for one in value["anyOf"]))
    if "enum" in value:
        return ", ".join(map(str, value["enum"]))
    if value.get("type") == "array":
        return f"list of {_words(value.get('items', {}), definitions)}"
    if value.get("type") == "object":
        return "mapping"
    if value.get("pattern", "").startswith("^sha256:"):
        return "`sha256:...`"
    kind = value.get("type", "any value")
    return "number" if isinstance(kind, list) else {"string": "text", "boolean": "true or false"}.get(kind, str(kind))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
