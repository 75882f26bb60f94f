"""Lines of a log that clients cause. Time is what the test says."""

from tercet.frontend.log_limit import LogLimit


def test_the_first_line_of_a_minute_tells_how_many_were_left_out_before() -> None:
    now = 100.0
    limit = LogLimit(2, lambda: now)
    assert [limit.admit() for _ in range(5)] == [0, 0, None, None, None]
    now += 59
    assert limit.admit() is None
    now += 1
    assert [limit.admit() for _ in range(3)] == [4, 0, None]
    now += 3600
    assert limit.admit() == 1
    now += 60
    assert limit.admit() == 0, "nothing was left out meanwhile"
