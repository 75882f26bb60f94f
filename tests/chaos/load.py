"""Load on a server whose parts die, and the outcome of each request."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx2
import orjson

PROMPTS = (
    "What is a tercet?",
    "Once upon a time there was",
    "The scheduler plans a step, and then",
    "A list of colours: red, green,",
    "Explain how pages are shared between requests.",
    "def main():\n    ",
)
TEMPERATURE = 0.8
SHORT, FULL = 24, 800
"""Requests of a test in its short and its full form."""
STAGGER = 0.1
"""Seconds between the starts of two clients: one frontend accepts connections that come at once."""


@dataclass(frozen=True)
class Job:
    """Request. Its number determines all its fields, so that every run has the same answer."""

    number: int
    tokens: int = 200
    lora: str = ""
    """Name of the adapter."""

    @property
    def path(self) -> str:
        return "/generate"

    @property
    def length(self) -> int:
        """Return the number of tokens of each answer."""
        return self.tokens + self.number % 7

    @property
    def prompt(self) -> str:
        return f"{self.number // 4}. {PROMPTS[self.number % len(PROMPTS)]}"

    @property
    def greedy(self) -> bool:
        return self.number % 2 == 0

    @property
    def n(self) -> int:
        return 2 if self.number % 5 == 3 else 1

    @property
    def streamed(self) -> bool:
        return self.number % 4 != 3

    def body(self) -> dict[str, Any]:
        """Return the body for /generate, which returns token ids."""
        return {
            "text": self.prompt,
            "sampling_params": {
                "max_new_tokens": self.length,
                "temperature": 0.0 if self.greedy else TEMPERATURE,
                "sampling_seed": self.number,
                "n": self.n,
                "top_p": 1.0,
                "ignore_eos": True,
            },
            "stream": self.streamed,
            "lora_path": self.lora or None,
        }


@dataclass(frozen=True)
class ImageChat(Job):
    """Greedy chat with one to three images, some of which others have, too."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions"

    @property
    def greedy(self) -> bool:
        return True

    def body(self) -> dict[str, Any]:
        images = [_image(self.number // 6 + place) for place in range(1 + self.number // 3 % 3)]
        return {
            "model": "seeing",
            "messages": [{"role": "user", "content": [{"type": "text", "text": self.prompt}, *images]}],
            "max_tokens": self.length,
            "temperature": 0.0,
            "n": self.n,
            "ignore_eos": True,
            "stream": self.streamed,
            "return_token_ids": True,
        }


@cache
def _image(number: int) -> dict[str, Any]:
    """Return one of the odd images as a part of a chat."""
    from packages.frontend.tests.media.image_files import data_url, odd_images

    files = list(odd_images().values())
    return {"type": "image_url", "image_url": {"url": data_url(files[number % len(files)])}}


def shuffled(count: int, seed: int, *, images: bool = False, tokens: int = 0) -> list[Job]:
    """Return `count` jobs, always the same, in an order that depends on the seed. Jobs of a short form are short.

    With `images`, a third of the jobs has some. `tokens` is the length of answers, if it is given.
    """
    tokens = tokens or (200 if count == FULL else 100)
    jobs = [(ImageChat if images and number % 3 == 0 else Job)(number, tokens) for number in range(count)]
    return random.Random(seed).sample(jobs, count)


@dataclass
class Outcome:
    """Result of one request as its client saw it."""

    job: Job
    began: float
    ended: float = 0.0
    error: str = ""
    frontend: str = ""
    """Name of the frontend, once it is known."""
    ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    """Arrival time of each event of a stream."""

    @property
    def finished(self) -> bool:
        return bool(self.ended) and not self.error

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids.values()))

    def under_way(self, moment: float) -> bool:
        """Return whether the stream was running at that time."""
        return bool(self.arrivals) and self.arrivals[0] < moment < self.arrivals[-1]

    def stall(self, moment: float) -> float:
        """Return the longest gap between two events that ended after `moment` and began at most a second before."""
        pairs = zip([self.began, *self.arrivals], self.arrivals, strict=False)
        return max((end - max(begin, moment) for begin, end in pairs if end > moment > begin - 1.0), default=0.0)

    def take(self, answer: dict[str, Any]) -> None:
        """Record an answer or an event. Raises AssertionError if an earlier part of it has changed."""
        if "choices" in answer:
            self._append(answer["choices"])
            return
        index, text, ids = answer["index"], answer["text"], answer["output_ids"]
        assert text.startswith(self.texts.get(index, "")), (self.texts[index], text)
        assert ids[: len(self.ids.get(index, []))] == self.ids.get(index, []), (self.ids[index], ids)
        self.texts[index], self.ids[index] = text, ids
        self.frontend = "-".join(answer["meta_info"]["id"].split("-")[:2])

    def _append(self, choices: Sequence[dict[str, Any]]) -> None:
        """Record the next parts of a chat's choices."""
        for choice in choices:
            index, part = choice["index"], choice.get("delta") or choice.get("message") or {}
            self.texts[index] = self.texts.get(index, "") + (part.get("content") or "")
            self.ids[index] = [*self.ids.get(index, []), *choice.get("token_ids", ())]

    def end(self) -> None:
        self.ended = time.monotonic()
        wanted = self.job.length
        lengths = {index: len(ids) for index, ids in self.ids.items()}
        if not self.error:
            assert lengths == dict.fromkeys(range(self.job.n), wanted), f"{lengths} tokens instead of {wanted}"


class Load:
    """Runner of jobs against a server, `clients` at a time. `outcomes` grows as requests begin.

    Every request has a connection of its own, unless `kept`.
    """

    def __init__(self, url: str, clients: int = 8, *, kept: bool = False) -> None:
        self._url = url
        self._clients = clients
        self._limits = httpx2.Limits(max_keepalive_connections=None if kept else 0)
        self.outcomes: list[Outcome] = []
        self.tokens = 0
        """Tokens of all streams."""
        self._over = self._enough = False
        self._moved = asyncio.Condition()

    async def run(self, jobs: Sequence[Job], during: Callable[[], Awaitable[object]] | None = None) -> list[Outcome]:
        """Run every job once; `during` runs concurrently and must end, too."""
        return await self._run(jobs, during)

    async def run_while(self, jobs: Sequence[Job], during: Callable[[], Awaitable[object]]) -> list[Outcome]:
        """Repeat the jobs for as long as `during` runs."""
        again = itertools.cycle(jobs)

        async def until_done() -> None:
            await during()
            self._enough = True

        return await self._run(again, until_done)

    async def _run(self, jobs: Iterable[Job], during: Callable[[], Awaitable[object]] | None) -> list[Outcome]:
        waiting = iter(jobs)
        async with httpx2.AsyncClient(base_url=self._url, limits=self._limits, timeout=180) as client:

            async def work(number: int) -> None:
                await asyncio.sleep(number * STAGGER)
                while not self._enough and (job := next(waiting, None)) is not None:
                    await self._one(client, job)

            async with asyncio.TaskGroup() as group:
                if during is not None:
                    group.create_task(self._beside(during))
                async with asyncio.TaskGroup() as clients:
                    for number in range(self._clients):
                        clients.create_task(work(number))
                async with self._moved:
                    self._over = True
                    self._moved.notify_all()
        return self.outcomes

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, which is checked at every event."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._over or condition())
        assert not self._over, "the load was over before it came to that"

    async def _beside(self, during: Callable[[], Awaitable[object]]) -> None:
        await during()

    async def _one(self, client: httpx2.AsyncClient, job: Job) -> None:
        outcome = Outcome(job, time.monotonic())
        self.outcomes.append(outcome)
        try:
            if job.streamed:
                async with client.stream("POST", job.path, json=job.body()) as response:
                    await self._read(response, outcome)
            else:
                response = await client.post(job.path, json=job.body())
                self._whole(response, outcome)
        except httpx2.HTTPError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.end()

    async def _read(self, response: httpx2.Response, outcome: Outcome) -> None:
        done = False
        async for line in _lines(response):
            if not line.startswith("data: "):
                outcome.error = outcome.error or (f"{response.status_code}: {line}" if line else "")
            elif line == "data: [DONE]":
                done = True
            else:
                answer = orjson.loads(line.removeprefix("data: "))
                if "error" in answer:
                    outcome.error = answer["error"]["message"]
                    continue
                known = outcome.tokens
                outcome.take(answer)
                await self._arrived(outcome, outcome.tokens - known)
        if not done and not outcome.error:
            outcome.error = "the stream ended without [DONE]"

    async def _arrived(self, outcome: Outcome, tokens: int) -> None:
        """Record that an event of a stream arrived with new tokens."""
        outcome.arrivals.append(time.monotonic())
        async with self._moved:
            self.tokens += tokens
            self._moved.notify_all()

    def _whole(self, response: httpx2.Response, outcome: Outcome) -> None:
        answer = response.json()
        if response.status_code != 200:
            outcome.error = f"{response.status_code}: {answer}"
            return
        for choice in answer if isinstance(answer, list) else [answer]:
            outcome.take(choice)


async def _lines(response: httpx2.Response) -> AsyncIterator[str]:
    """Yield the lines of a stream of events. `aiter_lines` also ends one at U+2028, which a text may have."""
    rest = ""
    async for text in response.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line.removesuffix("\r")
    if rest:
        yield rest


def quantile(values: Sequence[float], part: float) -> float:
    """Return the quantile of the values; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0
