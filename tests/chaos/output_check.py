"""Check that a text after a crash equals its reference, or differs only at a tie of two tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from tercet.kernels.ops.philox import gumbel_reference
from tests.chaos.load import TEMPERATURE, ImageChat, Job, Outcome

TIE = 1e-4
"""Score difference within which two tokens may change places: float32 sums depend on the batch."""

Ids = dict[int, list[int]]


@dataclass
class Verdict:
    """Number of texts compared, and of texts that differ from a tie on."""

    texts: int = 0
    ties: int = 0


class OutputCheck:
    """Comparison of outcomes with those of an unbroken run; the server scores differences."""

    def __init__(self, url: str, expected: Mapping[Job, Ids]) -> None:
        self._url = url
        self._expected = expected

    def compare(self, outcomes: Sequence[Outcome]) -> Verdict:
        """Return the counts. Raises AssertionError for a text that differs without a tie."""
        verdict = Verdict()
        for outcome in outcomes:
            for index, ids in outcome.ids.items():
                wanted = self._expected[outcome.job][index]
                verdict.texts += 1
                if ids != wanted:
                    self._assert_tie(outcome.job, index, wanted, ids)
                    verdict.ties += 1
        return verdict

    def _assert_tie(self, job: Job, index: int, wanted: list[int], got: list[int]) -> None:
        position = next(at for at, (one, other) in enumerate(zip(wanted, got, strict=True)) if one != other)
        with httpx2.Client(base_url=self._url, timeout=60) as client:
            candidates, before = (wanted[position], got[position]), wanted[:position]
            if isinstance(job, ImageChat):
                scores = _best_two(client, job, index, before)
            else:
                scores = [self.score(client, job, index, before, token) for token in candidates]
        assert abs(scores[0] - scores[1]) < TIE, (
            f"{job}, choice {index}, position {position}: token {candidates[1]} (score {scores[1]:.6f}) "
            f"instead of {candidates[0]} ({scores[0]:.6f})"
        )

    def score(self, client: httpx2.Client, job: Job, index: int, before: list[int], token: int) -> float:
        """Return the score that the sampler maximizes after `before`: log-probability, or tempered, with noise."""
        model = job.lora or client.get("/v1/models").json()["data"][0]["id"]
        prompt = _post(client, "/tokenize", {"prompt": job.prompt})["tokens"]
        body = {"model": model, "prompt": [*prompt, *before, token], "max_tokens": 0, "echo": True, "logprobs": 0}
        scored: float = _post(client, "/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"][-1]
        if job.greedy:
            return scored
        return scored / TEMPERATURE + gumbel_reference(job.number, index, len(before), token)


def _best_two(client: httpx2.Client, job: ImageChat, index: int, before: list[int]) -> list[float]:
    """Return the log-probabilities of the two most probable tokens after `before`."""
    more = {"stream": False, "max_tokens": len(before) + 1, "logprobs": True, "top_logprobs": 2}
    choice = _post(client, job.path, {**job.body(), **more})["choices"][index]
    assert choice["token_ids"][:-1] == before
    return [each["logprob"] for each in choice["logprobs"]["content"][-1]["top_logprobs"]]


def _post(client: httpx2.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer
