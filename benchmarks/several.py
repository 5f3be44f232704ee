"""Compares `make` of three profiles that share torch with `make` of the largest of them.

Before each measurement the images and the build records are removed, so that the layers are loaded into the engine
again. The wheels, the digests of the layers and the compressed base stay cached. --no-cache is not used, because it
would also prevent the three builds from sharing layers. If other images in the engine have some of these layers, which
would then not be loaded, nothing is measured.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import described, write
from options import program

CHECKOUT = Path(__file__).parents[1]
PROFILES = {"large": ["numpy", "pandas", "scipy"], "middle": ["numpy", "pandas"], "small": ["numpy"]}


@dataclass(frozen=True)
class Took:
    """A measurement. `seconds`: wall-clock time; `worked`: busy time of all processors together, in seconds;
    `documents`: one for each profile."""

    seconds: float
    worked: float
    documents: list[dict[str, Any]]


def environment(folder: Path, checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout), "XDG_STATE_HOME": str(folder / "state")}


def busy() -> float:
    """Return the seconds that this machine's processors have worked for any process: user, nice and system in
    proc(5)."""
    found = Path("/proc/stat").read_text(encoding="ascii").split()[1:4]
    return sum(map(int, found)) / os.sysconf("SC_CLK_TCK")


def make(folder: Path, checkout: Path, names: list[str], verb: str = "make") -> Took:
    """Run one command for all profiles; for `build`, which takes one profile, run several commands at once."""
    begin, worked = time.perf_counter(), busy()
    command = [sys.executable, "-m", "envbuild", verb, "--json"]
    env = environment(folder, checkout)
    commands = [[*command, *names]] if verb == "make" else [[*command, name] for name in names]
    # Only this process receives Ctrl-C from a terminal: a second signal would interrupt the children's clean-up.
    started = [
        subprocess.Popen(
            one, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for one in commands
    ]
    try:
        outputs = [json.loads(process.communicate()[0]) for process in started]
    except BaseException:  # the children must remove their containers and files before this process removes its own
        for process in started:
            process.terminate()
        for process in started:
            process.communicate()
        raise
    if any(process.returncode for process in started):
        raise SystemExit(json.dumps(outputs, indent=1))
    documents = [row for document in outputs for row in document.get("profiles") or [document]]
    return Took(time.perf_counter() - begin, busy() - worked, documents)


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def remove(names: list[str]) -> None:
    for name in names:
        tags = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", f"envbuild/{name}").split()
        if tags:
            docker("image", "rm", *tags)


def refuse_shared_layers(names: list[str]) -> None:
    """Raise SystemExit if the engine has other images that share a layer with the images of `names`."""
    handles = sorted(set(docker("image", "ls", "--all", "--quiet", "--no-trunc").split()))
    images = json.loads(docker("image", "inspect", *handles))
    prefixes = tuple(f"envbuild/{name}:" for name in names)
    own = [image for image in images if any(tag.startswith(prefixes) for tag in image["RepoTags"] or ())]
    layers = {layer for image in own for layer in image["RootFS"]["Layers"]}
    others = [image for image in images if image not in own and layers.intersection(image["RootFS"]["Layers"] or ())]
    if others:
        listed = ", ".join((image["RepoTags"] or [image["Id"]])[0] for image in others)
        raise SystemExit(f"other images have some of the layers: {listed}; remove them, or use a different engine")


def measure(folder: Path, names: dict[str, str], verb: str) -> dict[str, Took]:
    """Measure the largest profile alone, then all three together. Before each, remove the images and the build
    records."""
    took = {}
    for what, chosen in (("largest", [names["large"]]), ("all three", list(names.values()))):
        remove(list(names.values()))
        shutil.rmtree(folder / "state", ignore_errors=True)
        took[what] = make(folder, CHECKOUT, chosen, verb)
    return took


def write_profiles(folder: Path, names: dict[str, str], level: str) -> None:
    for kind, packages in PROFILES.items():
        text = json.dumps({"extends": "cpu", "packages": packages, "selftest": {"level": level}})
        (folder / "profiles" / f"{names[kind]}.yaml").write_text(text, encoding="utf-8")


def row(what: str, took: dict[str, Took]) -> str:
    """Return the table row for the largest profile and for all three: wall-clock and processor seconds, and their
    ratios."""
    one, three = took["largest"], took["all three"]
    least = three.worked / (os.cpu_count() or 1)
    cells = [what, f"{one.seconds:.0f}", f"{one.worked:.0f}", f"{three.seconds:.0f}", f"{three.worked:.0f}"]
    return f"| {' | '.join(cells)} | {three.seconds / one.seconds:.2f} | {least / one.seconds:.2f} |"


def steps(what: str, took: Took) -> str:
    """Return the longest time of each step."""
    found = [{step["name"]: step["seconds"] for step in document["steps"]} for document in took.documents]
    names = ("build", "load", "audit", "self-test")
    return f"| {what} | {' | '.join(f'{max(one.get(name, 0) for one in found):.0f}' for name in names)} |"


def main() -> None:
    """Measure after the locks are written and the wheels downloaded, so that no index and no network is measured."""
    run = secrets.token_hex(3)
    names = {kind: f"bench-{kind}-{run}" for kind in PROFILES}
    folder = Path(tempfile.mkdtemp(prefix="envbuild-bench-"))
    kinds = {
        "level standard": ("standard", "make"),
        "level quick": ("quick", "make"),
        "builds alone": ("quick", "build"),
    }
    before, took = os.getloadavg()[0], {}
    try:
        (folder / "profiles").mkdir()
        write_profiles(folder, names, "quick")
        make(folder, CHECKOUT, list(names.values()), "build")  # writes locks, and downloads wheels and the base
        refuse_shared_layers(list(names.values()))
        for what, (level, verb) in kinds.items():
            write_profiles(folder, names, level)
            took[what] = measure(folder, names, verb)
        after = os.getloadavg()[0]
    finally:
        remove(list(names.values()))
        shutil.rmtree(folder, ignore_errors=True)
    write(
        "several",
        [
            "# Three profiles that share torch, compared with the largest alone",
            "",
            f"Machine: {described()}. Load average (1 min) {before:.1f} before, {after:.1f} after, partly its own.",
            "Made by `python benchmarks/several.py`: cpu with numpy; with numpy and pandas; with numpy, pandas and",
            "scipy. The images are removed before each measurement; wheels and the digests of layers are cached. Each",
            "was measured once. Work: busy time of all of the machine's processors together, for any process. Least",
            "possible: the work of all three divided by the number of processors, over the time of the largest.",
            "",
            "| | largest: s | its work | all three: s | their work | ratio | least possible |",
            "|---|---|---|---|---|---|---|",
            *(row(what, found) for what, found in took.items()),
            "",
            "Slowest of each step, s:",
            "",
            "| | build | load | audit | self-test |",
            "|---|---|---|---|---|",
            *(steps(f"{what}, {which}", one) for what, found in took.items() for which, one in found.items()),
        ],
    )


if __name__ == "__main__":
    program(main)
