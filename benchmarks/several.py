"""`make` of three profiles that share torch, beside the largest of them alone, every layer made anew but the base.

Not by --no-cache, under which nothing is shared: each time the installer, which every step reads and no image holds, is
another by a comment, and so BuildKit knows none of the steps.

python benchmarks/several.py        writes benchmarks/results/several.md; needs an engine; removes its images
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import described, write

CHECKOUT = Path(__file__).parents[1]
PROFILES = {"large": ["numpy", "pandas", "scipy"], "middle": ["numpy", "pandas"], "small": ["numpy"]}


def source(folder: Path) -> Path:
    """A copy of the checkout whose installer no build has seen."""
    for part in ("envbuild", "dockerfiles", "profiles"):
        shutil.copytree(CHECKOUT / part, folder / part)
    with (folder / "dockerfiles" / "install").open("a", encoding="utf-8") as file:
        file.write(f"\n# {secrets.token_hex(8)}\n")
    return folder


def make(folder: Path, checkout: Path, *arguments: str) -> tuple[float, list[dict[str, Any]]]:
    """Seconds, and a document of each profile."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "envbuild", "make", "--json", *arguments]
    env = {**os.environ, "PYTHONPATH": str(checkout), "XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    document = json.loads(done.stdout)
    return time.perf_counter() - begin, document.get("profiles") or [document]


def remove(names: list[str]) -> None:
    for name in names:
        tags = subprocess.run(
            ["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", f"envbuild/{name}"],
            check=True, stdout=subprocess.PIPE, text=True,
        ).stdout.split()  # fmt: skip
        if tags:
            subprocess.run(["docker", "image", "rm", *tags], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Both after the locks are made and the wheels are here, so that no index and no network is measured."""
    run = secrets.token_hex(3)
    names = {kind: f"bench-{kind}-{run}" for kind in PROFILES}
    folder = Path(tempfile.mkdtemp(prefix="envbuild-bench-"))
    try:
        (folder / "profiles").mkdir()
        for kind, packages in PROFILES.items():
            text = json.dumps({"extends": "cpu", "packages": packages})
            (folder / "profiles" / f"{names[kind]}.yaml").write_text(text, encoding="utf-8")
        make(folder, CHECKOUT, *names.values())  # locks, wheels and the base come
        before, took = os.getloadavg()[0], {}
        for what, chosen in (("the largest alone", [names["large"]]), ("all three", list(names.values()))):
            remove(list(names.values()))
            shutil.rmtree(folder / "state")
            took[what] = make(folder, source(folder / what.replace(" ", "-")), *chosen)
        after = os.getloadavg()[0]
    finally:
        remove(list(names.values()))
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for what, (seconds, documents) in took.items():
        steps = [{step["name"]: step["seconds"] for step in document["steps"]} for document in documents]
        parts = (max(step.get(name, 0) for step in steps) for name in ("build", "audit", "self-test"))
        rows.append(f"| {what} | {seconds:.0f} | {' | '.join(f'{part:.0f}' for part in parts)} |")
    ratio = took["all three"][0] / took["the largest alone"][0]
    write(
        "several",
        [
            "# Three profiles that share torch, beside the largest alone",
            "",
            f"Machine: {described()}. Load average (1 min) {before:.1f} before, {after:.1f} after, partly its own.",
            "cpu with numpy; with pandas too; with scipy too. Level standard; every layer but the base is made anew,",
            "the wheels are at hand. Once each.",
            "",
            "| what | s | slowest build s | audit s | self-test s |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Ratio: {ratio:.2f}.",
        ],
    )


if __name__ == "__main__":
    main()
