"""Cost of the radix tree, and of the core's part of a step at batch 256."""

import random
import time
from array import array
from statistics import median

from tercet.scheduler.core.cache.prefix_cache import RadixCache
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.testing import FakeExecutor, request, small_capacity

Row = tuple[str, float, str, float | None]
"""(figure, median, unit, target or None)"""


def match_cached(page_size: int, rounds: int = 2000) -> float:
    """Return the median microseconds to match a 1,024-token prefix that is cached."""
    cache = RadixCache(page_size)
    key = array("i", range(1024)).tobytes()
    cache.insert("", key, [list(range(1024 // page_size))])
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        found = cache.match("", key)
        times.append(time.perf_counter() - start)
        if found.count * page_size != 1024:
            raise AssertionError("the whole prefix should be found")
    return median(times) * 1e6


def evict_leaves(page_size: int, rounds: int = 20) -> float:
    """Return the median microseconds to evict 2,048 tokens from a tree of 2,000 leaves of 64 tokens each."""
    chance = random.Random(0)
    times = []
    for _ in range(rounds):
        cache = RadixCache(page_size)
        for number in range(2000):
            tokens = array("i", [number] * page_size + [chance.randrange(1000) for _ in range(64 - page_size)])
            cache.insert("", tokens.tobytes(), [list(range(64 // page_size))])
        start = time.perf_counter()
        freed = cache.evict(2048 // page_size)
        times.append(time.perf_counter() - start)
        if len(freed[0]) * page_size != 2048:
            raise AssertionError("2,048 tokens should be evicted")
    return median(times) * 1e6


def decode_step(batch: int, steps: int = 200) -> float:
    """Return the median microseconds of `schedule` and `commit` together in a decode step of `batch` choices."""
    capacity = small_capacity(pages=batch * 40, page_size=16, slots=batch, context_length=4096, vocab_size=50_000)
    core = Scheduler(CoreConfig(token_budget=batch * 32), capacity)
    executor = FakeExecutor(capacity, verify=False)
    prompts = ([number + 1, *range(1, 16)] for number in range(batch))
    core.handle(
        *(
            Arrival("frontend-0", request(f"frontend-0-{number:022d}", prompt, max_new_tokens=600, ignore_eos=True))
            for number, prompt in enumerate(prompts)
        )
    )
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        plan = core.schedule()
        planned = time.perf_counter() - start
        if plan is None:
            raise AssertionError("there should be work")
        result = executor.submit(plan).result()
        start = time.perf_counter()
        core.commit(result)
        if len(plan.rows) == batch:
            times.append(planned + time.perf_counter() - start)
    return median(times) * 1e6


def rows() -> list[Row]:
    """Return all figures."""
    return [
        ("radix match, 1,024 tokens, pages of 16", match_cached(16), "us", 10.0),
        ("radix match, 1,024 tokens, pages of 1", match_cached(1), "us", 10.0),
        ("radix evict 2,048 tokens of 2,000 leaves, pages of 16", evict_leaves(16), "us", 200.0),
        ("radix evict 2,048 tokens of 2,000 leaves, pages of 1", evict_leaves(1), "us", 200.0),
        ("core: schedule and commit, 256 decodes", decode_step(256), "us", 1000.0),
    ]


if __name__ == "__main__":
    for name, measured, unit, target in rows():
        print(f"{name:60} {measured:10.1f} {unit:8} target {target}")
