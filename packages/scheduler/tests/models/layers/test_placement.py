"""Places of experts on ranks."""

import pytest

from tercet.scheduler.models.layers.expert_parallel.placement import Placement


def test_experts_are_divided_evenly() -> None:
    assert Placement.even(5, 2).held == ((0, 1), (2, 3, 4))
    assert Placement.even(5, 2).experts == [0, 1, -1, 2, 3, 4]
    assert Placement.even(8, 4).held == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_ranks_get_about_equal_loads() -> None:
    placement = Placement.balanced([9, 8, 1, 1, 1, 2], 2)
    assert placement.held == ((0, 2, 3), (1, 4, 5)), "both have 11"
    assert Placement.balanced([0, 0, 0, 0], 2).held == ((0, 2), (1, 3))


def test_hot_experts_have_two_places_each_for_the_ranks_near_it() -> None:
    placement = Placement.balanced([10, 1, 1, 30, 1, 1], 2, 2)
    assert placement.held == ((0, 1, 3, 4), (0, 2, 3, 5))
    places = [placement.places_from(rank).tolist() for rank in range(2)]
    assert places == [[0, 1, 5, 2, 3, 7], [4, 1, 5, 6, 3, 7]]
    assert placement.by_expert([*range(8)]) == [0 + 4, 1, 5, 2 + 6, 3, 7]


def test_ranks_without_a_copy_are_divided_among_copies() -> None:
    placement = Placement(((0, 1), (0, 2), (3,), (4,)))
    assert [placement.places_from(rank)[0].item() for rank in range(4)] == [0, 2, 0, 2]


@pytest.mark.parametrize("redundant", [7, 9])
def test_more_copies_than_ranks_hold_are_refused(redundant: int) -> None:
    with pytest.raises(ValueError, match=f"{redundant} redundant experts"):
        Placement.balanced([1, 1, 1], 2, redundant)


def test_fewer_experts_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="3 experts cannot be placed on 4 ranks"):
        Placement.even(3, 4)
