"""Check of the grammars of requests before any of them is dispatched."""

from collections.abc import Sequence

from msgspec import structs

from tercet.frontend.errors import UnsupportedParameterError
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.peers import PeerRegistry
from tercet.frontend.structured_output.checker import GrammarChecker
from tercet.frontend.structured_output.composition import checked
from tercet.protocol.messages.values import Grammar


async def with_checked_grammars(
    requests: Sequence[GenerateRequest], model: ServedModel, checker: GrammarChecker, fleet: PeerRegistry
) -> Sequence[GenerateRequest]:
    """Return the requests with the grammars that were accepted for them. Raises ApiError.

    Grammars are checked sequentially, because the queue for checks is short.
    """
    constrained = [each for each in requests if each.grammar is not None]
    weights = model.identity.weights
    if constrained and not (model.limits.grammars or fleet.eligible_schedulers(weights, grammars=True)):
        param = constrained[0].options.param_names.grammar
        raise UnsupportedParameterError("This model's answers cannot be constrained.", param=param)
    for grammar, param in (trial for each in requests for trial in each.trials):
        await checker.check(grammar, model, param)
    found: dict[Grammar | None, Grammar | None] = {None: None}
    for each in requests:
        if each.grammar is not None and each.grammar not in found:
            param = each.options.param_names.grammar
            found[each.grammar] = await checked(checker, each.grammar, each.composition, model, param)
    return [
        each if (accepted := found[each.grammar]) is each.grammar else structs.replace(each, grammar=accepted)
        for each in requests
    ]
