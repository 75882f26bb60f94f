"""Answers that are slow to write: log-probabilities of long prompts and of many choices."""

import itertools
from collections.abc import Awaitable

from tools.attacks.attack import Attack
from tools.attacks.http import again, at_once, model_of, post

_WORDS = "the quick brown fox jumps over the lazy dog "


async def prompt_scores(url: str, key: str) -> None:
    body = {"model": await model_of(url, key), "prompt": _WORDS * 100, "max_tokens": 1, "prompt_logprobs": 20}
    await at_once(again(lambda: post(url, key, "/v1/completions", body)) for _ in range(8))


async def prompts(url: str, key: str) -> None:
    """Send prompts as long as those of `prompt_scores`; each begins with another number, so none is cached."""
    model, numbers = await model_of(url, key), itertools.count()

    def ask() -> Awaitable[object]:
        return post(
            url, key, "/v1/completions", {"model": model, "prompt": f"{next(numbers)} {_WORDS * 100}", "max_tokens": 1}
        )

    await at_once(again(ask) for _ in range(8))


async def batch_scores(url: str, key: str) -> None:
    body = {"model": await model_of(url, key), "prompt": [_WORDS * 80] * 64, "max_tokens": 1, "prompt_logprobs": 20}
    await at_once(again(lambda: post(url, key, "/v1/completions", body)) for _ in range(2))


async def choices(url: str, key: str) -> None:
    sampling = {"n": 48, "max_new_tokens": 200, "ignore_eos": True, "temperature": 1}
    body = {"text": "Once upon", "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 20}
    await at_once(again(lambda: post(url, key, "/generate", body)) for _ in range(2))


async def plain_choices(url: str, key: str) -> None:
    sampling = {"n": 48, "max_new_tokens": 200, "ignore_eos": True, "temperature": 1}
    await at_once(
        again(lambda: post(url, key, "/generate", {"text": "Once upon", "sampling_params": sampling})) for _ in range(2)
    )


async def streamed_choices(url: str, key: str) -> None:
    sampling = {"n": 48, "max_new_tokens": 200, "ignore_eos": True, "temperature": 1}
    body = {"text": "Once upon", "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 20}
    await at_once(again(lambda: post(url, key, "/generate", {**body, "stream": True})) for _ in range(2))


ATTACKS = (
    Attack("long prompts, 8 at a time (for comparison)", prompts),
    Attack("prompt log-probabilities of long prompts, 8 at a time", prompt_scores),
    Attack("prompt log-probabilities of 64 prompts, 2 at a time", batch_scores),
    Attack("/generate with n = 48, 2 at a time (for comparison)", plain_choices),
    Attack("/generate with n = 48 and log-probabilities, 2 at a time", choices),
    Attack("the same as a stream", streamed_choices),
)
