"""What several threads ask for is found once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def once(work: Callable[..., T]) -> Callable[..., T]:
    """functools.cache among threads: who asks for what another is finding waits for that one's answer. What failed is
    tried again by whoever asks next."""
    found: dict[Hashable, Future[T]] = {}
    lock = threading.Lock()

    @functools.wraps(work)
    def ask(*key: Hashable) -> T:
        with lock:
            first = key not in found
            answer = found.setdefault(key, Future())
        if first:
            try:
                answer.set_result(work(*key))
            except BaseException as error:
                with lock:
                    del found[key]
                answer.set_exception(error)
        return answer.result()

    ask.cache_clear = found.clear  # type: ignore[attr-defined]
    return ask
