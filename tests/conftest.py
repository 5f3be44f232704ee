"""How tests run beside each other."""

from __future__ import annotations

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """One worker has a file at a time, so what its tests share is made once; those of one engine share that too.

    `--dist loadgroup` would say the same with marks: pytest-xdist 3.8 cannot with pytest 9.2, whose node ids it means
    to extend.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "engine" if nodeid.startswith("tests/e2e/") else nodeid.partition("::")[0]

    return Scheduling(config, log)
