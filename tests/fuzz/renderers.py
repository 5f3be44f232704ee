"""Every file that is rendered from a lock for other programs, each with an oracle that compares it with the lock.

A new renderer of a lock is a row of RENDERERS; every profile and lock of the campaign then goes through it.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from unit import oracle
from unit.oracle import Instruction

from envbuild.image import container_definition_export, extension_dockerfile
from envbuild.image.container_definition_export import UV_VERSION
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.lock import requirements_export
from envbuild.lock.lock_file import PACKAGES, Lock


@dataclass(frozen=True)
class Renderer:
    """`judge` asserts that a text says the same as its lock; `judge` is written from the rules of the format,
    independently of the renderer."""

    name: str
    render: Callable[[Lock], str]
    judge: Callable[[str, Lock], None]


DEBIAN = (
    'case "$DEBIAN_VERSIONS" in locked) packages=$(cat /opt/packages.txt) ;; '
    "newest) packages=$(sed 's/=.*//' /opt/packages.txt) ;; none) exit 0 ;; "
    '*) echo "DEBIAN_VERSIONS must be locked, newest or none" >&2; exit 2 ;; esac && apt-get update && '
    "DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends --allow-downgrades $packages && "
    "rm -rf /var/lib/apt/lists/*"
)
WHEELS = (
    "{python} -m venv /tmp/tools && /tmp/tools/bin/pip install --quiet --no-cache-dir uv=={uv} && "
    "/tmp/tools/bin/pip download --quiet --no-cache-dir --no-deps --require-hashes --dest /var/cache/envbuild "
    '-r /opt/requirements.txt && env -i PATH="$PATH" HOME=/tmp/tools UV_NO_INSTALLER_METADATA=1 '
    "/tmp/tools/bin/uv pip install --quiet --no-config --offline --no-cache --no-index --no-deps --require-hashes "
    "--find-links /var/cache/envbuild --python /opt/venv/bin/python -r /opt/requirements.txt && "
    "rm -rf /tmp/tools /opt/venv/.lock"
)
MOUNTS = ("--mount=type=secret,id=pip,target=/etc/pip.conf", "--mount=type=cache,target=/var/cache/envbuild")


def _dockerfile(text: str, lock: Lock) -> None:
    """Every instruction is known in advance, and so is each line of the lists."""
    found = oracle.parse(text)
    python = f"python{lock.python}"
    base = lock.image or f"debian:{lock.suite}-slim"
    head = [("ARG", f"BASE={base}"), ("FROM", "${BASE}"), ("USER", "0"), ("ENTRYPOINT",)]
    if not lock.image:
        head += [("COPY", "<<'PACKAGES'", "/opt/packages.txt"), ("ARG", "DEBIAN_VERSIONS=locked"), ("RUN", DEBIAN)]
    head += [
        ("COPY", "<<'REQUIREMENTS'", "/opt/requirements.txt"),
        ("RUN", f"{python} -m venv --without-pip /opt/venv"),
    ]
    head += [("ARG", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")]
    head += [("RUN", WHEELS.format(python=python, uv=UV_VERSION))]
    assert [_plain(item) for item in found[: len(head)]] == head
    assert [item.flags for item in found if item.flags] == [MOUNTS]
    rest = found[len(head) :]
    changes = 2 if lock.overrides else 0
    assert [item.keyword for item in rest[:changes]] == ["RUN"] * changes
    for item in rest[:changes]:
        _override(shlex.split(" ".join(item.arguments)), lock)
    tail = [*_environment(lock), ("LABEL", (LOCK_LABEL, lock.id)), ("CMD", ("python",))]
    assert [(item.keyword, item.arguments) for item in rest[changes:]] == tail
    pins = sorted((w.wheel.name, w.wheel.version, w.wheel.sha256) for w in lock.wheels)
    expected = [f"{name}=={version} --hash=sha256:{sha256}" for name, version, sha256 in pins]
    assert sorted(_list(text, "REQUIREMENTS", "/opt/requirements.txt")) == sorted(expected)
    if not lock.image:
        versions = {deb.name: deb.version for deb in (*lock.base, *lock.apt)}
        versions |= {f"{python}-venv": versions[python]} if python in versions else {}
        assert sorted(_list(text, "PACKAGES", "/opt/packages.txt")) == sorted(f"{n}={v}" for n, v in versions.items())


def _plain(item: Instruction) -> tuple[str, ...]:
    return (item.keyword, " ".join(item.arguments)) if item.keyword == "RUN" else (item.keyword, *item.arguments)


def _list(text: str, mark: str, path: str) -> list[str]:
    """The lines of a here-document."""
    begin = f"\nCOPY <<'{mark}' {path}\n"
    assert text.count(begin) == 1
    return text.partition(begin)[2].partition(f"\n{mark}\n")[0].split("\n")


def _override(words: list[str], lock: Lock) -> None:
    """The command that changes metadata, or the command that looks for conflicts."""
    if words[0] == "sed":
        site = f"/opt/venv/lib/python{lock.python}/site-packages/*.dist-info/METADATA"
        assert (words[1], words[-1], words[2:-1:2]) == ("-i", site, ["-e"] * len(lock.overrides))
        assert all(f"=={one.version} /I" in word for one, word in zip(lock.overrides, words[3:-1:2], strict=True))
        return
    assert words[:7] == ["if", "/opt/venv/bin/python", "-m", "pip", "check", "|", "grep"]
    assert (words[7], words[-4:], words[8:-4:2]) == ("-i", ["then", "exit", "1;", "fi"], ["-e"] * len(lock.overrides))


def _environment(lock: Lock) -> list[tuple[str, tuple[str, str]]]:
    return [("ENV", pair) for pair in sorted({"PYTHONDONTWRITEBYTECODE": "1", **lock.environment}.items())]


def _extensions(text: str, lock: Lock) -> None:
    """Several stages: their form, their network use, and the files of the lock that the stages install."""
    found = oracle.parse(text)
    names = [one.name for one in lock.extensions]
    stages = [(lock.image or "scratch", "AS", "builder")]
    for name in names:
        stages += [("builder", "AS", f"compiled-{name}"), ("scratch", "AS", f"wheel-{name}")]
    assert [item.arguments for item in found if item.keyword == "FROM"] == stages
    copies = [(item.flags, item.arguments) for item in found if item.keyword == "COPY"]
    assert copies == [((f"--from=compiled-{name}",), ("/out", "/")) for name in names]
    assert [item.arguments for item in found if item.keyword == "ARG"] == [("MAX_JOBS",)] * len(names)
    assert [item.arguments for item in found if item.keyword == "ADD"] == ([] if lock.image else [("base.tar", "/")])
    users = ("USER", "ENTRYPOINT") if lock.image else ()
    assert {item.keyword for item in found} <= {"FROM", "COPY", "ARG", "ADD", "RUN", *users}
    runs = [item for item in found if item.keyword == "RUN"]
    for run in runs:
        _run(run, lock)
    installed = [run.arguments for run in runs if run.arguments[2] in ("wheels", "override")]
    words = Counter(word for arguments in installed for word in arguments[4:])
    builder = lock.builder.wheels if lock.builder else ()
    wheels = Counter(
        f"{w.wheel.name}=={w.wheel.version} --hash=sha256:{w.wheel.sha256}"
        for w in (*(one for one in lock.wheels if one.layer != PACKAGES), *builder)
    )
    assert not wheels - words, "a wheel is not installed by its hash"
    assert set(words - wheels) <= {f"{one.name}=={one.version}" for one in lock.overrides}
    debs = Counter(word for run in runs for word in run.arguments[4:] if run.arguments[2] == "debs")
    assert debs == Counter(deb.file for deb in (*lock.apt, *(lock.builder.debs if lock.builder else ())))


def _run(run: Instruction, lock: Lock) -> None:
    """A step uses no shell and no network, and mounts only what the lock names: folders of the context, and contexts of
    wheels."""
    assert run.form == "json" and run.arguments[:2] == ("/bin/sh", "/mnt/bin/install")
    builder = lock.builder
    wheels = (*lock.wheels, *(builder.wheels if builder else ()))
    archives = (*lock.archives, *(builder.archives if builder else ()))
    places = {"source=debs": "debs", "source=builder/debs": "debs"}
    places |= {f"from=wheels-{one.layer}": "wheels" for one in wheels}
    places |= {f"source=archives/{archive.name}": "archive" for archive in archives}
    places |= {f"source=sources/{one.name}": "source" for one in lock.extensions}
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
    Renderer("Dockerfile for extensions", extension_dockerfile.render, _extensions),
)


def judged(lock: Lock) -> None:
    """Raises AssertionError where any renderer says something that the lock does not."""
    for renderer in RENDERERS:
        renderer.judge(renderer.render(lock), lock)
