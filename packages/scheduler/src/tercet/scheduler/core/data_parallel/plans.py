"""Plans of several attention ranks as one plan, and its result as theirs.

Each rank has `slots` slots: slot s of the plan is slot `s % slots` of rank `s // slots`. Rows are in the order of
ranks. Pages, snapshots and places of adapters have the numbers that they have on their rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from tercet.scheduler.core.plan import Plan, Row, StepResult

_replace = msgspec.structs.replace
_Value = TypeVar("_Value")


def merged_plan(plans: Sequence[Plan | None], slots: int) -> Plan:
    """Return one plan of the plans of all ranks, of which some have none. All have the same step, weights and memory.

    Raise ValueError if there is no plan, or if they differ.
    """
    given = [plan for plan in plans if plan is not None]
    first, *others = given
    if any((each.step, each.weights, each.released) != (first.step, first.weights, first.released) for each in others):
        raise ValueError(f"ranks do not change together in step {first.step}")
    whole = Plan(step=first.step, weights=first.weights, released=first.released, rows=[])
    snapshots, drafts = list(whole.snapshots), dict(whole.draft_tokens)
    for rank, plan in enumerate(plans):
        if plan is None:
            continue
        rows, base = len(whole.rows), rank * slots
        whole.adapters.extend(_replace(load, rank=rank) for load in plan.adapters)
        whole.introduce.extend(_replace(init, slot=base + init.slot) for init in plan.introduce)
        whole.pages.extend(_replace(update, slot=base + update.slot) for update in plan.pages)
        whole.copies.extend(_replace(copy, rank=rank) for copy in plan.copies)
        whole.restores.extend(_replace(restore, slot=base + restore.slot) for restore in plan.restores)
        whole.rows.extend(Row(base + row.slot, row.start, row.count, row.sample) for row in plan.rows)
        snapshots += [_replace(each, row=rows + each.row) for each in plan.snapshots]
        drafts |= {rows + row: token for row, token in plan.draft_tokens.items()}
    return _replace(whole, snapshots=snapshots, draft_tokens=drafts)


def plan_of(plan: Plan, rank: int, slots: int) -> Plan:
    """Return the part of a plan that a rank computes, with the slots of the whole plan."""
    own = range(rank * slots, (rank + 1) * slots)
    rows = [index for index, row in enumerate(plan.rows) if row.slot in own]
    first, last = (rows[0], rows[-1] + 1) if rows else (0, 0)
    return _replace(
        plan,
        adapters=[load for load in plan.adapters if load.rank == rank],
        introduce=[init for init in plan.introduce if init.slot in own],
        pages=[update for update in plan.pages if update.slot in own],
        copies=[copy for copy in plan.copies if copy.rank == rank],
        restores=[restore for restore in plan.restores if restore.slot in own],
        snapshots=[_replace(each, row=each.row - first) for each in plan.snapshots if first <= each.row < last],
        rows=plan.rows[first:last],
        draft_tokens=_of_rows(plan.draft_tokens, first, last),
    )


def results_of(result: StepResult, plans: Iterable[Plan | None]) -> list[StepResult | None]:
    """Return the result of the plan of each rank; None for ranks without a plan."""
    results: list[StepResult | None] = []
    first = 0
    for plan in plans:
        if plan is None:
            results.append(None)
            continue
        last = first + len(plan.rows)
        results.append(
            StepResult(
                step=result.step,
                token_ids=result.token_ids[first:last],
                logprobs=_of_rows(result.logprobs, first, last),
                prompt_logprobs=_of_rows(result.prompt_logprobs, first, last),
                forced=_of_rows(result.forced, first, last),
                complete=[row - first for row in result.complete if first <= row < last],
                errors=_of_rows(result.errors, first, last),
                fault=result.fault,
                deferred=[row - first for row in result.deferred if first <= row < last],
            )
        )
        first = last
    return results


def _of_rows(values: Mapping[int, _Value], first: int, last: int) -> dict[int, _Value]:
    """Return the values of rows [first, last), by the number of the row among them."""
    return {row - first: value for row, value in values.items() if first <= row < last}
