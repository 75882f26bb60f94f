"""Scripts of tests that are the same for models that see and for models that hear."""

import random
from collections.abc import Mapping

from tercet.protocol.messages.values import Resume, pack_ints
from tests.integration.image_families import FIRST_MARK, Parts, Reference, Run


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, FIRST_MARK), k=count)


def check_answers(run: Run, reference: Reference, asked: Mapping[str, Parts]) -> None:
    """Check the answers to requests that run side by side, and end the run."""
    answers = run.answers(asked)
    run.worker.close()
    assert answers == {name: reference.answer(run, parts) for name, parts in asked.items()}
    assert min(len({*answer}) for answer in answers.values()) > 3, "an answer of one token would prove little"


def check_prefix_hits(run: Run, reference: Reference, name: str, other: str, *, depend: bool = False) -> None:
    """Check hits before, inside and after an image or a sound. Images may `depend` on their number."""
    encoded: list[int] = []
    run.worker._runner._media._images._tower.register_forward_hook(lambda *_: encoded.append(1))  # type: ignore[union-attr]
    before, after = words(14, 10), words(6, 11)
    chats: list[Parts] = [
        [before, name, after],
        [before, name, after],
        [before, name, words(5, 12)],
        [before, other, after],
        [before, other, after, name, words(3, 13)],
    ]
    hits = []
    for number, parts in enumerate(chats):
        counted = run.driver.core.counters.cached_tokens
        assert run.answers({f"r{number}": parts})[f"r{number}"] == reference.answer(run, parts)
        hits.append(run.driver.core.counters.cached_tokens - counted)
    first, cut = len(run.prompt(chats[0]).ids), len(run.prompt([before]).ids)
    assert hits[0] == 0
    assert first - 4 <= hits[1] < first
    assert first - 10 <= hits[2] < first
    assert cut - 4 <= hits[3] < first - 10
    if depend:
        assert cut - 4 <= hits[4] < first - 10, "a second image changes the first one"
        assert len(encoded) == 4
    else:
        assert hits[4] >= len(run.prompt(chats[3]).ids) - 4
        assert len(encoded) == 2, "each is encoded once"
    encoded.clear()
    counted = run.driver.core.counters.cached_tokens
    assert run.answers({"other": chats[0]}, salt="another tenant")["other"] == reference.answer(run, chats[0])
    assert run.driver.core.counters.cached_tokens == counted
    assert len(encoded) == 1, "what another tenant has sent saves no time"
    assert reference.answer(run, chats[0]) != reference.answer(run, chats[3]), "another one has another answer"


def check_interrupted(run: Run, reference: Reference, asked: Mapping[str, Parts], resumed: Parts) -> None:
    """Check the answers of two choices for each request, and of a resumed one, which are all retracted, and end the
    run.
    """
    for rid, parts in asked.items():
        run.send(rid, parts, n=2)
    begun = run.driver.output["resumed", 0] = reference.answer(run, resumed)[:5]
    run.send("resumed", resumed, attempt=1, resume=[Resume(0, pack_ints(begun))])
    for _ in range(9):
        run.driver.step()
    planner = run.driver.core.planner
    for req in [req for req in planner.running if not req.in_flight]:
        planner.retract(req)
    run.driver.core.memory.flush()
    run.driver.run()
    run.worker.close()
    expected = {(rid, index): reference.answer(run, parts) for rid, parts in asked.items() for index in (0, 1)}
    assert run.driver.output == expected | {("resumed", 0): reference.answer(run, resumed)}
    assert run.driver.core.counters.retractions
