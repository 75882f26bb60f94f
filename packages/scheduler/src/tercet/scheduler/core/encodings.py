"""Running choices whose images or audio the executor encodes beside the rows of its steps.

Encoding an image takes many times as long as a step, so no row waits for it: a choice gets no row that reads an image
or an audio clip before a result says that this is encoded.
"""

from collections.abc import Collection
from itertools import zip_longest

from tercet.scheduler.core.images import ALL_TOKENS
from tercet.scheduler.core.plan import StepResult
from tercet.scheduler.core.request import Req


class Encodings:
    """The choices that wait, and the plans in flight that name them. Tenants take turns."""

    def __init__(self) -> None:
        self._waiting: dict[Req, None] = {}
        self._served: dict[str, int] = {}
        """Step in which something of a tenant was last encoded, for the tenants that wait."""
        self.named: dict[int, list[Req]] = {}
        """Choices that plans in flight name, by step."""

    def introduce(self, req: Req, step: int) -> None:
        """Note what a choice that has just got its slot cannot read yet."""
        if req.audio is not None or req.text:
            req.readable = 0
        elif req.images is not None:
            req.readable = req.images.readable(req.computed)
        req.last_step = step
        if req.readable < ALL_TOKENS:
            self._waiting[req] = None

    def plan(self, step: int, running: Collection[Req], *, busy: bool) -> dict[int, int]:
        """Return `Plan.encode` of a step. A step that is not `busy` has no other work, and would delay rows.

        While the result of rows is in flight it therefore encodes nothing.
        """
        if not self._waiting or not (busy or self._may_fill(running)):
            return {}
        self._waiting = {req: None for req in self._waiting if req in running and req.readable < ALL_TOKENS}
        by_tenant: dict[str, list[Req]] = {}
        for req in self._waiting:
            if req.finish is None:
                by_tenant.setdefault(req.tenant, []).append(req)
        self._served = {tenant: self._served.get(tenant, -1) for tenant in by_tenant}
        turns = [by_tenant[tenant] for tenant in sorted(by_tenant, key=self._served.__getitem__)]
        reqs = [req for turn in zip_longest(*turns) for req in turn if req is not None]
        for req in reqs:
            req.in_flight += 1
        if reqs:
            self.named[step] = reqs
        return {req.slot: req.computed for req in reqs}

    def commit(self, result: StepResult) -> list[Req]:
        """Apply what was encoded. Return the choices that have ended, and that no other plan in flight names."""
        reqs = self.named.pop(result.step, [])
        for req in reqs:
            req.in_flight -= 1
            readable = result.encoded.get(req.slot, 0)
            if readable > req.readable:
                req.readable = readable if readable < req.prompt_tokens else ALL_TOKENS
                self._served[req.tenant] = result.step
        return [req for req in reqs if req.finish is not None and not req.in_flight]

    def _may_fill(self, running: Collection[Req]) -> bool:
        """Return whether no choice that waits for nothing has rows in flight."""
        return all(req in self._waiting or not req.in_flight for req in running)
