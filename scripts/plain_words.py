"""Find idioms that readers may not understand, in the tracked files. `make lint` runs this script.

python scripts/plain_words.py [FOLDER or FILE...]      exit code 1 if it finds an idiom

The list is a minimum, not the goal: a sentence without these words can still be hard to read. Add a word when a reader
had to ask what it means.
"""

from __future__ import annotations

import re
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

# The idiom, as a regular expression in lower case, and what to write instead.
RULES = (
    (r"told", "reported, shown, printed, named"),
    (r"(?<!there )(?:is|are) no(?! longer)", "is not a, has no, there is no; or say what it is"),
    (r"beside", "next to, together with, at the same time, in addition to"),
    (r"is another", "differs"),
    (r"there is none", "is missing, does not exist"),
    (r"somebody", "who: the user, the author, another process"),
    (r"alike", "the same, equally"),
    (r"anew", "again, newly"),
    (r"aside", "separately; for moving: to another place"),
    (r"mend(?:s|ed|ing)?", "fix, repair"),
    (r"cure[sd]?", "fix, fixed in, workaround"),
    (r"at fault|wanting", "invalid, missing, unsupported: how it failed"),
    (r"speaks? for", "supports, is evidence of"),
    (r"is said", "is reported, is printed; or who says it"),
    (r"wish(?:es|ed)?", "request, profile"),
    (r"(?-i:is none)|none of utf-8", "invalid, missing, not a; or say what it is"),
    (r"stands? in(?! for)", "is in, is listed in, occurs in"),
    (r"held against", "compared with"),
)
_ANY = re.compile("|".join(rf"(?P<rule{i}>\b(?:{idiom})\b)" for i, (idiom, _) in enumerate(RULES)), re.IGNORECASE)
# The same idioms, also within longer words, for a search in text in lower case. Python searches quickly for an
# expression that begins with a literal, but not for `_ANY`.
assert all(idiom.islower() for idiom, _ in RULES)
_QUICK = tuple(re.compile(idiom) for idiom, _ in RULES)
_SUFFIXES = frozenset({"", ".py", ".md", ".yaml", ".yml", ".toml", ".j2", ".svg", ".Dockerfile"})
# Files that are not checked: they contain quotations or lists of old names, or must not be read (wrong_kernels/unseen).
_QUOTED = (
    "scripts/plain_words.py",
    "tests/logs/",
    "tests/wrong_kernels/unseen/",
    "evidence/",
    "docs/decisions/0026-packages-in-order.md",
    "docs/decisions/names-of-0026.md",
)
# Lines that contain quotations, which are not checked: messages of uv, and patterns for texts that people write in
# logs.
_QUOTING = {
    "benchmarks/results/chaos.md": re.compile(r"\(Because there (?:is|are) no versions? of "),
    "envbuild/facts/data/signatures.yaml": re.compile(r" +- '.*'$"),
}


def idioms(text: str, quoting: re.Pattern[str] | None = None) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, idiom, what to write instead) for each idiom in a text. Lines that `quoting` matches are
    skipped."""
    text = text.replace("&#160;", " ")  # which separates words in the recordings of terminals
    small = text.lower()
    found = {match.start() for idiom in _QUICK for match in idiom.finditer(small)}
    ends = list(accumulate(map(len, small.splitlines(keepends=True)))) if found else []
    lines = text.splitlines() if found else []
    for index in sorted({bisect_right(ends, position) for position in found}):
        if quoting and quoting.search(lines[index]):
            continue
        for match in _ANY.finditer(lines[index]):
            yield index + 1, match[0], RULES[int((match.lastgroup or "")[len("rule") :])][1]


def tracked(places: Sequence[str]) -> list[Path]:
    """Return the tracked files to check; in all folders if `places` is empty."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *places], check=True, stdout=subprocess.PIPE, encoding="utf-8"
    )
    names = (name for name in listed.stdout.split("\0") if name and not name.startswith(_QUOTED))
    return [path for path in map(Path, names) if path.suffix in _SUFFIXES]


def main() -> int:
    count = 0
    for path in tracked(sys.argv[1:]):
        for number, idiom, instead in idioms(path.read_text(encoding="utf-8"), _QUOTING.get(str(path))):
            count += 1
            print(f"{path}:{number}: {idiom!r}: write {instead}")
    if count:
        print(f"{count} idioms: reword these lines. RULES in scripts/plain_words.py has all idioms.", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
