"""Steps with draft tokens: equality with steps of one token, and cost.

Both run on one worker, with the same texts in different slots. In float32 the sums of a step of several rows differ
from those of one row only by their order, so that every token is the same, and log-probabilities differ by less than
`LEAST`; they differ more if a row reads the keys and values of a wrong token before it. In 16 bits rounding eventually
leads to other tokens, so the figure is the number of equal tokens until then.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from tercet.protocol.messages.values import SamplingParams, unpack_floats
from tercet.scheduler.core.plan import Plan, SlotInit
from tercet.scheduler.testing.quantized_checkpoints import write_checkpoint
from tools.gpu_stages.given_tokens import LEAST, count_replays, far_from, record_graphs, verdict, wrong_of
from tools.gpu_stages.processes import gathered
from tools.gpu_stages.scale import Results, Scale, model_directory
from tools.gpu_stages.worker import Offline, prompt_of

_TEXTS = 2
_CHAIN = 4
"""Rows of a choice in a step."""
_TOKENS = 1 + 4 * _CHAIN
"""Tokens of each choice: one after its prompt, the rest in whole chains."""
_WARM = 3
"""Steps after which their sampling is recorded, too."""

_GREEDY, _DRAWN = (SamplingParams(max_new_tokens=_TOKENS, temperature=each, seed=7) for each in (0.0, 1.0))
_SORTS = {"greedy": (_GREEDY, -1), "drawn": (_DRAWN, -1), "told": (_DRAWN, 0)}
"""Sampling parameters, and the number of alternatives reported: graphs do not sample steps that report them."""


def compare(scale: Scale) -> Iterator[Results]:
    """Yield the number of equal tokens, the distance of their log-probabilities, and the allowed distance."""
    dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in (torch.float32, scale.dtype))
    for found in gathered(partial(_compare, scale), dtypes, min(1, scale.processes)):
        yield {"compared": found, "wrong": wrong_of(found)}


def _compare(scale: Scale, dtype: str) -> Iterator[Results]:
    with tempfile.TemporaryDirectory() as directory:
        config = scale.compared.config(scale.compared_tokens + 2 * _TOKENS)
        full = write_checkpoint("channel", Path(directory, "model"), config, scale.grain)
        yield _compared(full, replace(scale, dtype=getattr(torch, dtype)))


@dataclass
class _Said:
    """Tokens of each text, with their log-probabilities if requested."""

    tokens: list[list[int]] = field(default_factory=lambda: [[] for _ in range(_TEXTS)])
    logprobs: list[list[float]] = field(default_factory=lambda: [[] for _ in range(_TEXTS)])


class _Speaker:
    """Worker that continues texts."""

    def __init__(self, offline: Offline, prompt: int) -> None:
        self._offline = offline
        self._prompt = prompt
        self._vocab = offline.worker.capacity.vocab_size
        self.decodes = 0
        """Steps other than those of prompts."""

    def say(self, sort: str, first: int, assumed: Sequence[Sequence[int]] | None = None) -> _Said:
        """Continue the slots from `first` on: a token per step, or chains of draft tokens."""
        said = _Said()
        for text in range(_TEXTS):
            self._run(self._offline.init_plan(self._init(sort, text, first + text)), first, said)
        while (known := len(said.tokens[0])) < _TOKENS:
            chains = [each[known : known + _CHAIN - 1] for each in assumed or [[]] * _TEXTS]
            self._run(self._offline.chained_plan(dict(enumerate(chains, first)), right=len(chains[0])), first, said)
            self.decodes += 1
        return said

    def _init(self, sort: str, text: int, slot: int) -> SlotInit:
        sampling, top = _SORTS[sort]
        return SlotInit(
            slot=slot,
            tokens=prompt_of(text, self._prompt, self._vocab),
            prompt_tokens=self._prompt,
            choice=0,
            sampling=sampling,
            top_logprobs=top,
        )

    def _run(self, plan: Plan, first: int, said: _Said) -> None:
        result = self._offline.worker.submit(plan).result()
        for index, row in enumerate(plan.rows):
            said.tokens[row.slot - first].append(result.token_ids[index])
            if index in result.logprobs:
                said.logprobs[row.slot - first] += unpack_floats(result.logprobs[index].chosen)


def _compared(directory: Path, scale: Scale) -> Results:
    prompt, slots, rows = scale.compared_tokens // 4, 2 * _TEXTS, _CHAIN * _TEXTS
    offline = Offline(
        directory, scale, slots=slots, prompt=prompt, decodes=_TOKENS, load_format="safetensors", draft_rows=rows
    )
    speaker = _Speaker(offline, prompt)
    speaker.say("greedy", 0, [[0] * _TOKENS] * _TEXTS)  # requests graphs of such steps
    record_graphs(offline.worker, slots, chained=rows)
    graphs, speaker.decodes = count_replays(offline.worker), 0
    one_by_one = {sort: speaker.say(sort, 0) for sort in _SORTS}
    chained = {sort: speaker.say(sort, _TEXTS, one_by_one[sort].tokens) for sort in _SORTS}
    truth = one_by_one["told"]
    astray = speaker.say("told", _TEXTS, [_wrong(tokens, scale.compared.vocab) for tokens in truth.tokens])
    if graphs is not None and graphs.plain < speaker.decodes:
        raise RuntimeError(f"of {speaker.decodes} decodes only {graphs.plain} were replayed from graphs")
    offline.worker.close()
    alike = min(
        _alike(*pair) for sort in _SORTS for pair in zip(chained[sort].tokens, one_by_one[sort].tokens, strict=True)
    )
    found: Results = {"tokens": _TOKENS, "alike": alike}
    if scale.dtype != torch.float32:
        return {**found, "right": alike > 1}
    far = far_from(torch.tensor(chained["told"].logprobs), torch.tensor(truth.logprobs))
    moved = far_from(_after_others(astray), _after_others(truth))
    found |= verdict(far, LEAST, "what sums in another order make")
    return {**found, "moved": moved, "right": found["right"] and alike == _TOKENS and moved > LEAST}


def _wrong(tokens: Sequence[int], vocab: int) -> list[int]:
    """Return the tokens with the first draft of each chain changed."""
    return [(token + 1) % vocab if at % _CHAIN == 1 else token for at, token in enumerate(tokens)]


def _after_others(said: _Said) -> torch.Tensor:
    """Return the log-probabilities of tokens after a draft that may be wrong and after one that is right."""
    return torch.tensor([each[at] for each in said.logprobs for at in range(_TOKENS) if at and at % _CHAIN in (3, 0)])


def _alike(mine: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of tokens before the first difference."""
    return next((at for at, pair in enumerate(zip(mine, others, strict=True)) if pair[0] != pair[1]), len(mine))


def time_steps(scale: Scale) -> Iterator[Results]:
    """Yield milliseconds of a step by the rows of each choice, with and without waiting for the last result.

    Steps with draft tokens wait; a server with overlap runs steps of one row ahead.
    """
    yield from gathered(partial(_time, scale), ["timed"], min(1, scale.processes))


def _time(scale: Scale, _: str) -> Iterator[Results]:
    slots, most, steps = max(scale.draft_batches), scale.draft_rows, scale.decodes + _WARM
    with model_directory(scale.large, scale.context + steps + most + 64) as directory:
        offline = Offline(directory, scale, slots=slots, prompt=scale.context, decodes=steps + most, draft_rows=most)
        for slot in range(slots):
            offline.prefill(slot, scale.context)
        offline.run(partial(offline.chained_plan, {0: [0]}), 1)
        record_graphs(offline.worker, slots, chained=most)
        graphs = count_replays(offline.worker)
        for batch in scale.draft_batches:
            found: dict[str, dict[str, float]] = {}
            for rows in sorted({*(rows for rows in scale.draft_counts if rows * batch <= most), most // batch}):
                before = 0 if graphs is None else graphs.plain
                found[f"{rows} row{'s' * (rows > 1)}"] = _timed(offline, scale, batch, rows)
                if graphs is not None and graphs.plain - before < 2 * steps:
                    raise RuntimeError(f"steps of {rows} rows for each of {batch} were not replayed from graphs")
                yield {f"batch {batch}": found}
        offline.worker.close()


def _timed(offline: Offline, scale: Scale, batch: int, rows: int) -> dict[str, float]:
    """Return the figures of slots that hold `scale.context` tokens and advance by one token for any draft."""
    found = {}
    for name, ahead in (("ms", False), ("ahead_ms", True)):
        offline.rewind(scale.context)
        plan = partial(offline.chained_plan, {slot: [0] * (rows - 1) for slot in range(batch)})
        offline.run(plan, _WARM, ahead=ahead)
        while offline.worker.prepare():
            pass
        seconds, _ = offline.run(plan, scale.decodes, ahead=ahead)
        found[name] = statistics.median(seconds) * 1e3
    return found
