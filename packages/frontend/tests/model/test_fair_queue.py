"""Equal shares of the threads for all flows, by the cost of their items."""

from tercet.frontend.model.fair_queue import FairQueue, Flow

MANY, ONE = Flow("many"), Flow("one")


def pop_many(queue: FairQueue[str], count: int) -> list[str]:
    return [item for _ in range(count) if (item := queue.pop(lambda _: True)) is not None]


def test_a_flow_that_comes_late_is_next() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(1000):
        queue.add(MANY, f"m{number}", 10)
    assert pop_many(queue, 3) == ["m0", "m1", "m2"]
    queue.add(ONE, "late", 10)
    assert "late" in pop_many(queue, 2)
    assert len(queue) == 996


def test_flows_take_turns_by_what_items_cost() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(40):
        queue.add(MANY, "long", 30)
        queue.add(ONE, "short", 10)
    assert 9 <= pop_many(queue, 40).count("long") <= 11


def test_a_flow_saves_up_nothing_while_it_is_away() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add(ONE, "one", 10)
    for _ in range(200):
        queue.add(MANY, "many", 10)
    pop_many(queue, 100)
    for _ in range(100):
        queue.add(ONE, "one", 10)
    assert 9 <= pop_many(queue, 20).count("one") <= 11


def test_a_flow_that_leaves_and_returns_is_not_first_each_time() -> None:
    """Served cost counts while others wait."""
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.add(ONE, "one", 10)
    order: list[str] = []
    for _ in range(44):
        if "many" not in {flow.owner for flow in queue._waiting}:
            queue.add(MANY, "many", 100)
        order += pop_many(queue, 1)
    assert order.count("many") <= 5


def test_what_may_not_go_waits_and_holds_up_no_other_flow() -> None:
    queue: FairQueue[str] = FairQueue()
    long = Flow("many", long=True)
    queue.add(long, "long", 10)
    queue.add(MANY, "short", 1)
    assert queue.pop(lambda flow: not flow.long) == "short"
    assert queue.pop(lambda flow: not flow.long) is None
    assert queue.pop(lambda _: True) == "long"


def test_what_is_removed_is_not_taken() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in "abc":
        queue.add(MANY, item, 1)
    queue.remove(MANY, "b")
    queue.remove(MANY, "never there")
    assert pop_many(queue, 9) == ["a", "c"]
    assert len(queue) == 0
