"""What rank 0 sends arrives as it was, what it did not send is refused, and who is gone is noticed."""

from pathlib import Path

import msgspec
import pytest

from tercet.protocol.errors import DecodeError
from tercet.protocol.messages.values import Grammar, GrammarKind, SamplingParams, pack_ints
from tercet.scheduler.core.plan import PageCopy, PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.rank_strategy import RankError
from tercet.scheduler.executor.ranks.rank_links import PlanReceiver, PlanSender, address_of
from tercet.scheduler.executor.ranks.rank_messages import Forced, Order, Prepare, RankStep, decode_order, encode_order

PLAN = Plan(
    step=7,
    introduce=[
        SlotInit(
            slot=2,
            tokens=pack_ints([1, 2, 3]),
            prompt_tokens=2,
            choice=1,
            sampling=SamplingParams(max_new_tokens=4, grammar=Grammar(GrammarKind.REGEX, "a+"), logit_bias={3: -1.5}),
            suppressed_ids=[4],
            top_logprobs=2,
            prompt_logprobs=True,
        )
    ],
    pages=[PageUpdate(2, 0, [[5, 6]])],
    copies=[PageCopy(0, 5, 9)],
    rows=[Row(2, 0, 3, sample=True)],
)
ORDERS: list[Order] = [RankStep(plan=PLAN, forced=[Forced(1, 30, pack_ints([8, 9]))]), RankStep(plan=PLAN), Prepare()]


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_arrives_as_it_was_given(order: Order) -> None:
    assert decode_order(encode_order(order)) == order


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"garbage",
        encode_order(ORDERS[0])[:-1],
        msgspec.msgpack.encode({"type": "reset"}),
        msgspec.msgpack.encode({"type": "step", "plan": {"step": "first", "rows": []}}),
        msgspec.msgpack.encode({"type": "step"}),
    ],
)
def test_what_is_no_order_is_refused(frame: bytes) -> None:
    with pytest.raises(DecodeError, match="not an order of rank 0"):
        decode_order(frame)


def give_many(given: PlanSender, order: Order, count: int) -> None:
    for _ in range(count):
        given.send(encode_order(order))


def test_orders_arrive_in_order_at_every_follower(directory: Path) -> None:
    addresses = [address_of(directory, rank) for rank in (1, 2)]
    given = PlanSender(addresses)
    taken = [PlanReceiver(address) for address in addresses]
    given.wait_for_all()
    for order in ORDERS:
        given.send(encode_order(order))
    for side in taken:
        assert [side.next() for _ in ORDERS] == ORDERS
        side.close()
    given.close()


def test_a_follower_that_is_gone_is_noticed(directory: Path) -> None:
    address = address_of(directory, 1)
    given, taken = PlanSender([address]), PlanReceiver(address)
    given.wait_for_all()
    taken.close()
    with pytest.raises(RankError, match=r"rank-1\.ipc takes no more orders"):
        give_many(given, Prepare(), 100_000)  # until the connection is seen to be lost, or the queue to be full
    given.close()


def test_a_follower_that_falls_behind_is_noticed(directory: Path) -> None:
    address = address_of(directory, 1)
    given, taken = PlanSender([address]), PlanReceiver(address)
    given.wait_for_all()
    large = RankStep(
        plan=PLAN, forced=[Forced(1, 0, bytes(1 << 20))]
    )  # nothing of this waits in the system's own buffers
    with pytest.raises(RankError):
        give_many(given, large, 120)
    assert taken.next() == large
    taken.close()
    given.close()
