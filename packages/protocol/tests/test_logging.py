"""Counters are exact across threads, warnings are rare."""

import threading

import pytest

from tercet.protocol.logging import LinkCounters


def test_counts_from_many_threads_add_up() -> None:
    counters = LinkCounters()

    def count() -> None:
        for _ in range(2000):
            counters.count("dropped")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters.add({"sent": 3})
    assert counters.total([{"sent": 4}, {"sent": 1, "refused": 2}]) == {"dropped": 8000, "sent": 8, "refused": 2}


def test_complaints_are_at_most_one_a_second(caplog: pytest.LogCaptureFixture) -> None:
    counters = LinkCounters()
    for tenth in range(25):
        counters.drop("dropped", f"number {tenth}", tenth / 10)
    assert [record.message for record in caplog.records] == [
        "dropped number 0",
        "dropped number 10 (and 9 more)",
        "dropped number 20 (and 9 more)",
    ]
    assert counters.total([]) == {"dropped": 25}
