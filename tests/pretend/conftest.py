"""As for the self-test's other tests: in this process one thread computes."""

from selftest.conftest import one_thread

__all__ = ["one_thread"]
