"""Choices that follow grammars are guessed, too, and say what they would have said."""

from typing import Any

import pytest

from packages.scheduler.tests.generation.test_structured import CASES, Serve, cases, serve

__all__ = ["serve"]


@cases
@pytest.mark.parametrize("fast_forward", [True, False])
def test_guesses_change_nothing(case: str, fast_forward: bool, serve: Serve) -> None:
    """Right ones, wrong ones, and such as the grammar does not allow; of what is forced and what ends it, too."""
    plain, guessing = (serve(fast_forward=fast_forward, draft_rows=rows) for rows in (0, 8))
    sampled: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.1}
    for seed in range(4):
        plain.ask(f"r{seed}", CASES[case][0], seed=seed, **sampled)
        plain.run()
        truth = plain.output[f"r{seed}", 0]
        told = [(token + 1) % 300 if seed % 2 and place % 5 == 3 else token for place, token in enumerate(truth)]
        guessing.ask(f"r{seed}", CASES[case][0], seed=seed, prediction=told, **sampled)
        guessing.run()
        assert guessing.output == plain.output
        assert guessing.finishes == plain.finishes
    counters = guessing.core.counters
    if case != "phrase" or not fast_forward:  # of which nearly all is forced
        assert 0 < counters.accepted_tokens < counters.drafted_tokens
        assert counters.steps < plain.core.counters.steps
