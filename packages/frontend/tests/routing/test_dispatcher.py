"""Requests with a grammar only go to schedulers with grammar support, also when redispatched."""

from collections.abc import Callable

import msgspec

from tercet.frontend.manager.request import GenerateRequest, GenerationOptions
from tercet.frontend.model.prompts import TokenPrompt
from tercet.frontend.testing import FakeEngine, managed
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import Grammar, GrammarKind, ModelLimits

EngineOf = Callable[..., FakeEngine]

DIGITS = Grammar(GrammarKind.REGEX, "[0-9]+")
REQUEST = GenerateRequest(model="tiny", prompt=TokenPrompt([1, 2, 3]), options=GenerationOptions(max_tokens=4))


def sent(engine: FakeEngine) -> list[tuple[str, int, Grammar | None]]:
    """Return the target, attempt and grammar of each dispatch."""
    return [
        (peer, message.attempt, message.sampling.grammar)
        for peer, message in engine.sent
        if isinstance(message, TokenizedGenerateReqInput)
    ]


async def test_only_readers_get_grammars_at_first_and_again(engine_of: EngineOf, limits: ModelLimits) -> None:
    engine = engine_of(limits=msgspec.structs.replace(limits, grammars=""))
    async with managed(engine) as manager:
        engine.limits = limits
        engine.scheduler_up("reader")
        constrained = msgspec.structs.replace(REQUEST, grammar=DIGITS)
        generation = await manager.submit([constrained])
        assert sent(engine) == [("reader", 0, DIGITS)]
        engine.step()
        engine.down("reader")
        engine.step()
        manager.tick()
        assert sent(engine)[1:] == []
        assert manager.waiting == 1
        engine.scheduler_up("reader", "2")
        assert sent(engine)[1:] == [("reader", 1, DIGITS)]
        manager.release(generation)


async def test_without_a_grammar_every_scheduler_serves(engine_of: EngineOf, limits: ModelLimits) -> None:
    engine = engine_of(limits=msgspec.structs.replace(limits, grammars=""))
    async with managed(engine) as manager:
        manager.release(await manager.submit([REQUEST]))
        assert sent(engine) == [("scheduler-0", 0, None)]
        assert manager.grammars.pids == []
