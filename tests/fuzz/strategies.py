"""Nearly valid inputs: shipped files that envbuild reads, with a few changes. Also arbitrary bytes.

Every choice is drawn from hypothesis, so that an input can be made again and shrunk, and another engine can make the
choices.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]
Draw = st.DrawFn

MANY = st.sampled_from((1, 1, 1, 1, 2, 2, 3, 6))
"""The number of changes of one input. Most inputs have one, because only a nearly valid input passes the first checks
of a reader."""

# Texts that have misled some reader: control characters, text direction, quoting, paths, numbers, patterns.
TEXTS = (
    "",
    " ",
    "\0",
    "\n",
    "\r\n",
    "\t",
    "\x1b[2J",
    "\x7f",
    "\x85",
    "\N{LINE SEPARATOR}",
    "\N{RIGHT-TO-LEFT OVERRIDE}",
    "\N{ROCKET}",
    "e\N{COMBINING ACUTE ACCENT}",
    "\N{KELVIN SIGN}",
    "\N{ARABIC-INDIC DIGIT THREE}",
    "\N{FULLWIDTH COLON}",
    "\\",
    '"',
    "'",
    '"\nRUN evil',
    "\\\nRUN evil",
    '", "evil',
    "$(id)",
    "`id`",
    "${HOME}",
    "$HOME",
    "; rm -rf /",
    "--flag",
    "-",
    "#",
    "# syntax=evil",
    "<<EOF\nRUN evil\nEOF",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "%s%n",
    "*",
    "[x]",
    "[",
    "..",
    "../../x",
    "/dev/zero",
    "/",
    "~",
    "~nobody-there/x",
    "\0/x.yaml",
    "file:///etc/passwd",
    "http://[",
    "https://x:y/",
    "x" * 300,
    "x" * 5000,
    "1" * 25,
    "9" * 5000,
    "-1",
    "1e999",
    "nan",
    "inf",
    "0x10",
    "1_000",
    "2.13.0+cpu",
    "2.3.1+cu121",
    "1.0.dev0",
    "1!2.0",
    "v1",
    "1.0+a" + ".b" * 50,
    "2001-99-99",
    "true",
    "null",
    "(" * 280,
    "a;" + "(" * 250,
    "sha256:" + "0" * 64,
    "0" * 64,
    "x@sha256:" + "a" * 64,
    "<!-- envbuild:end -->",
)
NUMBERS = (0, -1, 1, 2, 2**31, 2**53 + 1, 2**63, 2**64, 10**18, -(10**18), 10**400, 0.5, -0.0, 1e-320, 1e308)
ODD_NUMBERS = (float("nan"), float("inf"), float("-inf"))


def nested(depth: int, kind: type[Any] = list) -> Any:
    """Return [[[...]]] or {"a": {"a": ...}}."""
    value: Any = kind()
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


SHAPES: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [None],
    [[]],
    {"": None},
    {"[x]": 1},
    {"a": {"b": "c"}},
    nested(70),
    nested(70, dict),
    ["x"] * 300,
    {f"k{index}": index for index in range(300)},
)

VALUES = st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from((*NUMBERS, *ODD_NUMBERS)),
    st.sampled_from(range(len(SHAPES))).map(lambda index: copy.deepcopy(SHAPES[index])),
    st.text(max_size=10),
    st.integers(),
    st.floats(),
)
_PLACE = st.integers(0, 1 << 16)


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all nodes inside a tree."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from paths(item, (*path, key))


def at(tree: Any, path: Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree


@st.composite
def trees(draw: Draw, seeds: Sequence[Any]) -> Any:
    """Draw a copy of one of the seeds, changed in some places: different values, keys renamed, removed, added,
    moved."""
    root = [copy.deepcopy(seeds[draw(st.integers(0, len(seeds) - 1))])]
    for _ in range(draw(MANY)):
        known = list(paths(root))
        path = known[draw(_PLACE) % len(known)]
        holder, key = at(root, path[:-1]), path[-1]
        change = draw(st.integers(0, 9))
        if change <= 3:
            holder[key] = draw(VALUES)
        elif change == 4 and isinstance(holder[key], str):
            place = draw(_PLACE) % (len(holder[key]) + 1)
            holder[key] = holder[key][:place] + draw(st.sampled_from(TEXTS)) + holder[key][place:]
        elif change == 5 and len(path) > 1:
            del holder[key]
        elif change == 6 and isinstance(holder, dict):
            holder[draw(st.sampled_from(TEXTS) | st.text(max_size=5))] = holder.pop(key)
        elif change == 7 and isinstance(holder, list):
            holder[:] = [*holder, *copy.deepcopy(holder)][:400]
        elif change == 8:
            holder[key] = copy.deepcopy(at(root, known[draw(_PLACE) % len(known)]))
        elif isinstance(holder[key], dict):
            holder[key][draw(st.sampled_from(TEXTS))] = draw(VALUES)
    return root[0]


@st.composite
def spoiled(draw: Draw, whole: st.SearchStrategy[bytes], pieces: Sequence[bytes]) -> bytes:
    """Draw bytes with pieces inserted, removed, doubled or overwritten."""
    raw = draw(whole)
    for _ in range(draw(MANY)):
        place = draw(_PLACE) % (len(raw) + 1)
        length = draw(st.integers(0, 40))
        change = draw(st.integers(0, 5))
        if change == 0:
            raw = raw[:place] + draw(st.binary(max_size=8)) + raw[place + length :]
        elif change == 1:
            raw = raw[:place] + raw[place + length :]
        elif change == 2:
            raw = raw[:place] + raw[place : place + length] * 2 + raw[place + length :]
        elif change == 3:
            raw = raw[:place] if draw(st.booleans()) else raw[place:]
        else:
            raw = raw[:place] + draw(st.sampled_from(pieces)) + raw[place + (length if change == 4 else 0) :]
    return raw


ENCODED = tuple(text.encode() for text in TEXTS)
BYTES = (
    *ENCODED,
    b"\xff",
    b"\xfe\xff",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xc0\x80",
    b"\xf0\x9f",
    b"\0" * 64,
    b"\xff" * 8,
)

# YAML beyond plain mappings: anchors, merges, tags, several documents, odd scalars, complex keys.
YAML = (
    b"&a [*a, *a]",
    b"*a",
    b"<<: *a\n",
    b"<<: {torch: 1}\n",
    b"? [a]\n: b\n",
    b"? {a: b}\n: c\n",
    b"!!python/object:os.x {}",
    b"!!binary aGk=",
    b"!!set {a}",
    b"!!int x",
    b"!!float x",
    b"!!bool x",
    b"!!null x",
    b"!!map x",
    b"!!seq x",
    b"!!str [a]",
    b"!!timestamp {a: b}",
    b"!",
    b"!x",
    b"!<tag:yaml.org,2002:int> 0b",
    b"%YAML 9.9\n---\n",
    b"\n---\n",
    b"\n...\n",
    b"0b",
    b"0o9",
    b"-",
    b"1:99:99",
    b"._",
    b".nan",
    b".inf",
    b"1e999",
    b"0x",
    b"2001-99-99",
    b"=",
    b'"\\x00"',
    b'"\\ud800"',
    b'"\\U00110000"',
    b"|9+\n",
    b">\n",
    b"[" * 40,
    b"{a: " * 40,
    b"- " * 40,
    b"\n - ",
    b": ",
    b"? ",
    b"\t",
    b"\xef\xbb\xbf",
    b"\xc2\x85",
    b"\xe2\x80\xa8",
    b"\n  ",
    b"a: &b b\nc: *b\n",
)
# JSON that readers treat differently: duplicate keys, invalid numbers, surrogates, depth.
JSON = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-",
    b"1" * 400,
    b"1" * 5000,
    b'"a": 1, "a": 2,',
    b'"\\ud800"',
    b"null",
    b'"\\u0000"',
    b"[" * 70,
    b"[" * 100_000,
    b'{"a":' * 70,
    b'{"a":' * 50_000,
    b"\xef\xbb\xbf",
    b"//",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b"{}",
    b"[]",
    b"true",
    b'""',
    b"0.1",
    b"\xff",
)


def as_json(tree: Any) -> bytes:
    """Encode the tree as JSON; NaN and infinity are kept, and surrogates are escaped."""
    return json.dumps(tree).encode()


def as_yaml(tree: Any) -> bytes:
    """Encode as JSON, which is also YAML except for surrogates; values that JSON lacks are written as YAML."""
    text = json.dumps(tree, indent=1).replace("\\/", "/")
    for word, yaml in (("NaN", ".nan"), ("-Infinity", "-.inf"), ("Infinity", ".inf")):
        text = text.replace(f": {word}", f": {yaml}")
    return text.encode()


def json_files(seeds: Sequence[Any]) -> st.SearchStrategy[bytes]:
    made = trees(seeds).map(as_json)
    return st.one_of(made, spoiled(st.sampled_from([as_json(seed) for seed in seeds]), (*JSON, *BYTES)))


def yaml_files(seeds: Sequence[Any], texts: Sequence[bytes] = ()) -> st.SearchStrategy[bytes]:
    """`texts`: files as they were written, including block style and comments."""
    made = trees(seeds).map(as_yaml)
    plain = [*texts, *(as_yaml(seed) for seed in seeds)]
    return st.one_of(made, spoiled(st.sampled_from(plain), (*YAML, *BYTES)), spoiled(made, YAML))


def files(seeds: Sequence[bytes], pieces: Sequence[bytes] = BYTES, raw: int = 200) -> st.SearchStrategy[bytes]:
    """Draw changed seeds, and now and then arbitrary bytes."""
    return st.one_of(
        spoiled(st.sampled_from(seeds), pieces), spoiled(st.sampled_from(seeds), pieces), st.binary(max_size=raw)
    )
