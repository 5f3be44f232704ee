"""Has an image collect what it holds, in a container of it."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.errors import CheckFailed
from envbuild.image.engine import Engine, Image
from envbuild.proof import audit, holdings
from envbuild.proof.holdings import Holdings
from envbuild.proof.runners import local

_NOT_THERE = (126, 127)  # of the container's init, where it cannot start the program


def of_image(
    engine: Engine, image: Image, name: str, wheels: Mapping[str, Mapping[str, str]] | None = None
) -> Holdings:
    """`name` is what messages call it; `wheels` as in audit.job.

    Raises CheckFailed where it has no Python, or one that brings no result.
    """
    for python in ("python", "python3"):
        job = audit.job(image.handle, python, wheels)
        output = local.run(engine, job)
        if output.exit_code not in _NOT_THERE:
            return holdings.read(output, job.nonce, name)
    raise CheckFailed(f"{name} has no Python on its PATH: no torch here, nothing to look at")
