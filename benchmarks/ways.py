"""The compared ways to build the same image: with three other tools, used as an expert would use them, and with
envbuild."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from arena import Arena
from stock import BENCH, CUBLAS, SECOND, Stock, profile, run, run_program, steps

PEERS = Path(__file__).parent / "peers"


class Way(Protocol):
    """A way to build an image. `slow`: a cold build takes so long that it runs only once. `keeps`: downloaded wheels
    are kept for the next build. `pushes`: the image is pushed to a registry from the engine."""

    name: str
    slow: bool

    @property
    def keeps(self) -> bool: ...

    @property
    def pushes(self) -> bool: ...

    def forget(self) -> None:
        """Restore the state before the first build, except for the engine."""

    def build(self, pin: str) -> float:
        """Build and tag the image with this cuBLAS. Return the seconds of work that must not be counted."""

    def bring(self, pin: str) -> None:
        """Put the cuBLAS wheel where a download of this tool would put it."""

    def tag(self, pin: str) -> str: ...


@dataclass
class Dockerfile:
    """A Dockerfile of another tool. `index`: the build argument for the package index; `text`: returns the Dockerfile
    for a pin; `fetch`: the file in PEERS with the Dockerfile that only downloads a wheel, or None. Of the tools that
    are not slow, the push is measured too."""

    name: str
    index: str
    text: Callable[[str], str]
    arena: Arena
    stock: Stock
    fetch: str | None = None
    slow: bool = False

    @property
    def keeps(self) -> bool:
        return self.fetch is not None

    @property
    def pushes(self) -> bool:
        return not self.slow

    def forget(self) -> None:
        """Everything that this tool keeps is in the engine, so nothing is restored here."""

    def tag(self, pin: str) -> str:
        return f"bench-{self.name}:{pin}"

    def build(self, pin: str) -> float:
        self._build(self.text(pin), pin, "--tag", self.tag(pin), "--load")
        return 0.0

    def build_to_registry(self, pin: str, reference: str) -> None:
        """Build an image and push it as BuildKit compresses it, without loading it; only with containerd's store."""
        self._build(self.text(pin), pin, "--tag", reference, "--push")

    def bring(self, pin: str) -> None:
        assert self.fetch
        text = (PEERS / self.fetch).read_text(encoding="utf-8")
        self._build(text, pin, "--build-arg", f"WHEEL={CUBLAS}=={pin}", "--output=type=cacheonly")

    def _build(self, text: str, pin: str, *options: str) -> None:
        context = self.stock.folder / "contexts" / self.name
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir(parents=True)
        (context / "requirements.txt").write_text(self.stock.requirements(pin), encoding="utf-8")
        (context / "Dockerfile").write_text(text, encoding="utf-8")
        arguments = {"BASE": self.stock.base, "UV": self.stock.uv, self.index: self.stock.mirror.address}
        given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        self.arena.docker("buildx", "build", "--network=host", "--provenance=false", *given, *options, context)


class Ours:
    """`envbuild build`, measured from its start to the image id, without the seconds of the audit; and the commands of
    envbuild that need no engine."""

    keeps = True
    pushes = False  # envbuild pushes without an engine: `push`

    def __init__(self, arena: Arena, stock: Stock) -> None:
        self.name, self.slow = "envbuild", False
        self.arena, self.stock = arena, stock
        self.steps: dict[str, float] = {}

    def forget(self) -> None:
        self.stock.forget()

    def tag(self, pin: str) -> str:
        return self.stock.tag(BENCH, profile(pin))

    def second(self) -> str:
        return self.stock.tag(SECOND, SECOND)

    def build(self, pin: str) -> float:
        self.stock.change(pin)
        return self.build_profile(BENCH)

    def build_second(self) -> float:
        return self.build_profile(SECOND)

    def build_profile(self, name: str) -> float:
        self.steps = steps(run(self.stock, "build", name, "--locked", "--json", engine=self.arena))
        return self.steps.get("audit", 0.0)

    def push(self, pin: str, repository: str, *, zstd: bool = False) -> None:
        """Write the layers that `repository` lacks directly to the registry."""
        self.stock.change(pin)
        self.push_profile(BENCH, repository, zstd=zstd)

    def push_profile(self, name: str, repository: str, *, zstd: bool = False) -> None:
        self._layers("push-zstd" if zstd else "push", name, repository)

    def write_again(self) -> None:
        """Write all layers again and compare their digests, as `verify --rebuild` does."""
        self._layers("write", BENCH)

    def archive(self, pin: str, file: Path, *others: str) -> None:
        """Write the archive that an engine gets to load this image. `others`: the pins of images that it has."""
        self._layers("archive", profile(pin), str(file), *map(profile, others))

    def write_changed(self, pin: str, other: str) -> None:
        """Write the layers that another image lacks, and discard the bytes."""
        self._layers("changed", profile(pin), profile(other))

    def export(self, folder: Path) -> None:
        """Write the image as an OCI layout."""
        run(self.stock, "export", "oci", BENCH, str(folder))

    def _layers(self, *arguments: str) -> None:
        self.steps = {}
        run_program(self.stock, Path(__file__).parent / "image_layers.py", *arguments)

    def bring(self, pin: str) -> None:
        self.stock.bring(pin)


def ways(arena: Arena, stock: Stock) -> list[Way]:
    """Return all ways, envbuild's last."""
    torch, numpy = (
        next(f"{i.wheel.name}=={i.wheel.version}" for i in stock.wheels if i.wheel.name == name)
        for name in ("torch", "numpy")
    )

    def hpccm(pin: str) -> str:
        command = [sys.executable, str(PEERS / "hpccm_recipe.py"), stock.base, torch, numpy, f"{CUBLAS}=={pin}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def written(file: str) -> Callable[[str], str]:
        return lambda pin: (PEERS / file).read_text(encoding="utf-8")

    return [
        Dockerfile("hpccm", "PIP_INDEX_URL", hpccm, arena, stock, slow=True),
        Dockerfile("pip", "PIP_INDEX_URL", written("pip.Dockerfile"), arena, stock, "pip.fetch.Dockerfile", slow=True),
        Dockerfile("uv", "UV_DEFAULT_INDEX", written("uv.Dockerfile"), arena, stock, "uv.fetch.Dockerfile"),
        Ours(arena, stock),
    ]  # fmt: skip
