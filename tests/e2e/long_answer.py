"""Long answer of a random model, which can be interrupted by a fault."""

from collections.abc import Callable

from openai import OpenAI


def long_answer(
    client: OpenAI, model: str, tokens: int, at: int = 0, interrupt: Callable[[], None] = lambda: None
) -> str:
    """Return the text, always the same; call `interrupt` once after `at` characters."""
    text, dealt = "", False
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "The quick brown fox"}],
        max_tokens=tokens,
        temperature=1.0,
        seed=7,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        assert chunk.model == model
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        if len(text) >= at and not dealt:
            dealt = True
            interrupt()
    assert dealt
    return text
