"""Every file that is rendered from a lock for other programs, each with an oracle that compares it with the lock.

A new renderer of a lock is a row of RENDERERS; every profile and lock of the campaign then goes through it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from unit import oracle
from unit.oracle import Instruction

from envbuild.image import container_definition_export
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.lock import requirements_export
from envbuild.lock.lock_file import Lock


@dataclass(frozen=True)
class Renderer:
    """`judge` asserts that a text says what its lock does; it is written from the format's rules, independently of the
    renderer."""

    name: str
    render: Callable[[Lock], str]
    judge: Callable[[str, Lock], None]


def _dockerfile(text: str, lock: Lock) -> None:
    """Every instruction is known in advance: how many, in which form, and each word that comes from the lock."""
    found = oracle.parse(text)
    if lock.extensions:
        return _staged(found, lock)
    head = [("FROM", "scratch"), ("ADD", "base.tar", "/")]
    if lock.image:
        head = [("FROM", lock.image), ("USER", "0"), ("ENTRYPOINT",)]
    assert [(item.keyword, *item.arguments) for item in found[: len(head)]] == head
    runs = [item for item in found[len(head) :] if item.keyword == "RUN"]
    rest = [(item.keyword, item.arguments) for item in found[len(head) :] if item.keyword != "RUN"]
    assert rest == [*_environment(lock), ("LABEL", (LOCK_LABEL, lock.id)), ("CMD", ("python",))]
    groups = [name for at, name in enumerate(_layers(lock)) if at == 0 or _layers(lock)[at - 1] != name]
    assert len(runs) == 1 + bool(lock.apt) + len(groups) + len(lock.archives) + bool(lock.nvcc)
    for run in runs:
        _run(run, lock)
    words = Counter(word for run in runs for word in run.arguments[4:] if run.arguments[2] in ("wheels", "override"))
    wheels = Counter(f"{w.wheel.name}=={w.wheel.version} --hash=sha256:{w.wheel.sha256}" for w in lock.wheels)
    assert not wheels - words, "a wheel is not installed by its hash"
    assert set(words - wheels) <= {f"{one.name}=={one.version}" for one in lock.overrides}
    debs = Counter(word for run in runs for word in run.arguments[4:] if run.arguments[2] == "debs")
    assert debs == Counter(deb.file for deb in lock.apt)


def _environment(lock: Lock) -> list[tuple[str, tuple[str, str]]]:
    return [("ENV", pair) for pair in sorted({"PYTHONDONTWRITEBYTECODE": "1", **lock.environment}.items())]


def _staged(found: list[Instruction], lock: Lock) -> None:
    """A Dockerfile with extensions has several stages. Only its form, its network use and the contents of the final
    image are compared, not every word."""
    names = [one.name for one in lock.extensions]
    base = lock.image or "scratch"
    stages = [(base, "AS", "common"), ("common", "AS", "builder")]
    for name in names:
        stages += [("builder", "AS", f"compiled-{name}"), ("scratch", "AS", f"wheel-{name}")]
    assert [item.arguments for item in found if item.keyword == "FROM"] == [*stages, ("common",)]
    copies = [(item.flags, item.arguments) for item in found if item.keyword == "COPY"]
    assert copies == [((f"--from=compiled-{name}",), ("/out", "/")) for name in names]
    assert [item.arguments for item in found if item.keyword == "ARG"] == [("MAX_JOBS",)] * len(names)
    assert [item.arguments for item in found if item.keyword == "ADD"] == ([] if lock.image else [("base.tar", "/")])
    plain = {
        "FROM",
        "COPY",
        "ARG",
        "ADD",
        "RUN",
        "ENV",
        "LABEL",
        "CMD",
        *(("USER", "ENTRYPOINT") if lock.image else ()),
    }
    assert {item.keyword for item in found} <= plain
    for run in (item for item in found if item.keyword == "RUN"):
        assert run.form == "json" and run.arguments[:2] == ("/bin/sh", "/mnt/bin/install")
        assert run.flags[0] == "--network=none" and len(run.flags) <= 4
    tail = [(item.keyword, item.arguments) for item in found if item.keyword in ("ENV", "LABEL", "CMD")]
    assert tail == [*_environment(lock), ("LABEL", (LOCK_LABEL, lock.id)), ("CMD", ("python",))]


def _layers(lock: Lock) -> list[str]:
    return [locked.layer for locked in lock.wheels]


def _run(run: Instruction, lock: Lock) -> None:
    """A step uses no shell and no network, and mounts only what the lock names: folders of the context, and contexts of
    wheels."""
    assert run.form == "json" and run.arguments[:2] == ("/bin/sh", "/mnt/bin/install")
    places = {"source=debs": "debs", **{f"from=wheels-{name}": "wheels" for name in _layers(lock)}}
    places |= {f"source=archives/{archive.name}": "archive" for archive in lock.archives}
    own = {f"--mount=type=bind,{place},target=/mnt/{target}" for place, target in places.items()}
    before = ("--network=none", "--mount=type=tmpfs,target=/mnt", "--mount=type=bind,source=bin,target=/mnt/bin")
    assert run.flags[:3] == before and len(run.flags) <= 4 and set(run.flags[3:]) <= own


# pip splits a line at blanks, joins it with the next at a backslash, and accepts an option at any position in a line.
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._+~:-]*)==([A-Za-z0-9.+!_-]+)((?: --hash=sha256:[0-9a-f]{64})?)")


def _lines(text: str, lock: Lock) -> None:
    """Each line is a comment or one pin of the lock."""
    wheels = {(w.wheel.name, w.wheel.version): w.wheel.sha256 for w in lock.wheels}
    assert "\\\n" not in text.replace(" \\\n    --hash", " --hash")
    for line in text.replace(" \\\n    --hash", " --hash").splitlines():
        match = _PINNED.fullmatch(line)
        assert line.startswith("#") or not line or match, f"neither a comment nor a pin: {line!r}"
        if match:
            assert wheels[match[1], match[2]] == (match[3][-64:] or wheels[match[1], match[2]])


RENDERERS = (
    Renderer("Dockerfile", lambda lock: container_definition_export.standalone_dockerfile(lock, "sample"), _dockerfile),
    Renderer("requirements", lambda lock: requirements_export.requirements(lock, "sample"), _lines),
    Renderer("constraints", lambda lock: requirements_export.constraints(lock, "sample"), _lines),
)


def judged(lock: Lock) -> None:
    """Raises AssertionError where any renderer says something that the lock does not."""
    for renderer in RENDERERS:
        renderer.judge(renderer.render(lock), lock)
