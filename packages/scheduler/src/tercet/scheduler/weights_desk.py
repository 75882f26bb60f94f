"""`WeightsDesk`: looks at weights before the old ones are given up for them, so that no step waits for it."""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

_LONGEST_FAULT = 1000


class WeightsDesk:
    """The `WeightsReader` port. Nothing is remembered: what lies at a path may be something else by the next time."""

    def __init__(self, check: Callable[[str], None]) -> None:
        """`check` raises ValueError for a directory whose weights cannot be loaded."""
        self._check = check
        self._looks: dict[str, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="look at weights")

    @property
    def busy(self) -> bool:
        """Whether `take_read` has something to tell, now or later."""
        return bool(self._looks)

    def want(self, path: str) -> None:
        """Look at what lies there, unless that goes on already."""
        if path not in self._looks:
            self._looks[path] = self._thread.submit(self._check, path)

    def take_read(self) -> Collection[tuple[str, str]]:
        """Each path that has been looked at, and why its weights cannot be loaded; empty where they can."""
        over = {path: look for path, look in self._looks.items() if look.done()}
        for path in over:
            del self._looks[path]
        return [(path, _fault(look)) for path, look in over.items()]

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


def _fault(look: Future[None]) -> str:
    error = look.exception()
    if error is None:
        return ""
    if not isinstance(error, ValueError | OSError):
        raise error
    return " ".join(str(error).split())[:_LONGEST_FAULT] or type(error).__name__
