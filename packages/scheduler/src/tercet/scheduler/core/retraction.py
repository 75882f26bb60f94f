"""Order of retraction: the choice that gives up its slot and pages when pages run out."""

from collections import Counter
from collections.abc import Iterable

from tercet.scheduler.core.request import Req


def next_to_retract(choices: Iterable[Req]) -> Req | None:
    """Return one of some running choices, which no plan in flight names; None if all are in one.

    The lowest priority goes first, then the tenant with the most pages, then the choice that costs least to recompute.
    """
    choices = list(choices)
    pages = Counter[str]()
    for req in choices:
        pages[req.tenant] += len(req.pages[0])
    idle = (req for req in choices if req.in_flight == 0 and req.finish is None)
    return min(idle, key=lambda req: (req.priority, -pages[req.tenant], len(req.tokens), -req.arrival), default=None)
