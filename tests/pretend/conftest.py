"""Like the other tests of the self-test, these compute with one thread in this process."""

from selftest.conftest import one_thread

__all__ = ["one_thread"]
