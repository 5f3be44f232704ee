"""The site of the end-to-end tests that signs and pushes images, and the child images built on them."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from .registries import Registry
from .support import Project, Result, burdened, docker

NO_ENGINE = {"DOCKER_HOST": "unix:///nowhere"}


@dataclass(frozen=True)
class Team:
    """A key pair and a registry; commands run in `project`."""

    project: Project
    registry: Registry
    passphrase: str
    public: Path
    index: str
    """The password in its index, proxy, netrc and authorities."""

    @property
    def signing(self) -> dict[str, str]:
        key = str(self.public.with_suffix(".key"))
        return {"ENVBUILD_SIGNING_KEY": key, "ENVBUILD_KEY_PASSPHRASE": self.passphrase}

    @property
    def login(self) -> dict[str, str]:
        return {"DOCKER_CONFIG": str(self.registry.login)}

    def push(self, name: str, place: str, *arguments: str) -> Result:
        """Push without an engine, which only zstd needs."""
        burden = burdened(self.public.parent, self.index)
        burden |= {} if "--zstd" in arguments else NO_ENGINE
        return self.project.run("push", name, place, *arguments, "--json", **burden, **self.login, **self.signing)

    def verify(self, ref: str, *arguments: str, login: Path | None = None) -> Result:
        """Verify without an engine."""
        config = str(login or self.registry.login)
        wanted = ("verify", ref, "--key", str(self.public), *arguments, "--json")
        return self.project.run(*wanted, DOCKER_CONFIG=config, **NO_ENGINE)

    def rebuild(self, ref: str) -> Result:
        """Verify with --rebuild, without an engine."""
        wanted = ("verify", ref, "--key", str(self.public), "--rebuild", "--json")
        return self.project.start(*wanted, **self.login, **NO_ENGINE).finish(1800)

    def reasons(self, ref: str, *arguments: str) -> list[str]:
        return reasons(self.verify(ref, *arguments))

    def build_child(self, base: str, name: str, folder: Path, steps: str, **contexts: Path) -> None:
        """Build and push an image on `base`; `contexts` are folders that its steps can mount."""
        (folder / "Dockerfile").write_text(f"FROM {base}\n{steps}\n", encoding="utf-8")
        more = [f"--build-context={key}={path}" for key, path in contexts.items()]
        docker("buildx", "build", "--quiet", "--load", "--provenance=false", *more, "--tag", name, folder)
        docker("push", "--quiet", name, env=self.login)


def reasons(done: Result) -> list[str]:
    """Return the ids of the reasons why an image is refused; none if it is verified."""
    found = [reason["id"] for reason in done.document["reasons"]]
    assert done.code == (5 if found else 0), f"{done.stdout}\n{done.stderr}"
    return found


def installing(name: str, version: str = "") -> str:
    """Return the build step that installs a distribution from the context `wheels`, without any index."""
    wanted = f"{name}=={version}" if version else name
    return (
        "RUN --network=none --mount=from=wheels,target=/wheels "
        f"pip install --no-index --no-deps --find-links /wheels {wanted}"
    )


def wheel(folder: Path, name: str, version: str) -> Path:
    file = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: e2e\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return file
