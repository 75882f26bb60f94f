"""Equal shares of the threads for all flows, by the cost of their items."""

from tercet.frontend.model.fair_queue import FairQueue, Flow

MANY, ONE = Flow("many"), Flow("one")


def taken(line: FairQueue[str], count: int) -> list[str]:
    return [item for _ in range(count) if (item := line.pop(lambda _: True)) is not None]


def test_a_flow_that_comes_late_is_next() -> None:
    line: FairQueue[str] = FairQueue()
    for number in range(1000):
        line.add(MANY, f"m{number}", 10)
    assert taken(line, 3) == ["m0", "m1", "m2"]
    line.add(ONE, "late", 10)
    assert "late" in taken(line, 2)
    assert len(line) == 996


def test_flows_take_turns_by_what_items_cost() -> None:
    line: FairQueue[str] = FairQueue()
    for _ in range(40):
        line.add(MANY, "long", 30)
        line.add(ONE, "short", 10)
    assert 9 <= taken(line, 40).count("long") <= 11


def test_a_flow_saves_up_nothing_while_it_is_away() -> None:
    line: FairQueue[str] = FairQueue()
    line.add(ONE, "one", 10)
    for _ in range(200):
        line.add(MANY, "many", 10)
    taken(line, 100)
    for _ in range(100):
        line.add(ONE, "one", 10)
    assert 9 <= taken(line, 20).count("one") <= 11


def test_a_flow_that_leaves_and_returns_is_not_first_each_time() -> None:
    """Served cost counts while others wait."""
    line: FairQueue[str] = FairQueue()
    for _ in range(100):
        line.add(ONE, "one", 10)
    order: list[str] = []
    for _ in range(44):
        if "many" not in {flow.owner for flow in line._waiting}:
            line.add(MANY, "many", 100)
        order += taken(line, 1)
    assert order.count("many") <= 5


def test_what_may_not_go_waits_and_holds_up_no_other_flow() -> None:
    line: FairQueue[str] = FairQueue()
    long = Flow("many", long=True)
    line.add(long, "long", 10)
    line.add(MANY, "short", 1)
    assert line.pop(lambda flow: not flow.long) == "short"
    assert line.pop(lambda flow: not flow.long) is None
    assert line.pop(lambda _: True) == "long"


def test_what_is_removed_is_not_taken() -> None:
    line: FairQueue[str] = FairQueue()
    for item in "abc":
        line.add(MANY, item, 1)
    line.remove(MANY, "b")
    line.remove(MANY, "never there")
    assert taken(line, 9) == ["a", "c"]
    assert len(line) == 0
