"""The page of sampled cases matches the operations."""

import pytest

pytest.importorskip("torch")

from selftest import documented


@pytest.mark.slow
def test_the_page_is_what_the_operations_say() -> None:
    assert documented.PAGE.read_text(encoding="utf-8") == documented.page(), "cd tests && python -m selftest.documented"


def test_every_operation_is_tried_at_standard_and_has_its_own_name() -> None:
    found = [operation for _, operation in documented.operations()]
    assert len({operation.name for operation in found}) == len(found) > 10
    assert all(operation.counts.get("standard") for operation in found)
