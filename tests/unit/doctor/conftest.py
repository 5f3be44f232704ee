from __future__ import annotations

import pytest
from selftest import stubs


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables with which a process finds the stand-ins for the driver's libraries."""
    return stubs.build(tmp_path_factory.mktemp("driver"), cuda=False)
