"""Thread-safe memoisation."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class thread_safe_cache(Generic[T]):
    """Like functools.cache, but for threads: if several threads call with the same arguments, one computes the result
    and the others wait for it. Errors are not cached; the next call computes again."""

    def __init__(self, work: Callable[..., T]) -> None:
        functools.update_wrapper(self, work)
        self._work = work
        self._found: dict[Hashable, Future[T]] = {}
        self._lock = threading.Lock()
        self.cache_clear = self._found.clear

    def __call__(self, *key: Hashable) -> T:
        with self._lock:
            first = key not in self._found
            answer = self._found.setdefault(key, Future())
        if first:
            try:
                answer.set_result(self._work(*key))
            except BaseException as error:
                with self._lock:
                    self._found.pop(key, None)
                answer.set_exception(error)
        return answer.result()
