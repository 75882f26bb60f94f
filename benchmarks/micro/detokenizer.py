"""Speed of the detokenizer, from the bytes of one step's tokens to the bytes of their text.

A step includes decoding the message that arrives and encoding those that leave, with a filled piece table, but not the
sockets. Filling an entry happens once per id and process, and has a figure of its own.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tercet.detokenizer.detokenizer_manager import DetokenizerManager
from tercet.detokenizer.tokenizer_store import TokenizerStore
from tercet.detokenizer.vocabulary import Vocabulary
from tercet.protocol.messages.messages import BatchTokenIDOutput, DecodeSpec, DetokenizerInbox, FirstRow
from tercet.protocol.messages.values import pack_ints

Row = tuple[str, float, str, float]
"""(figure, measured, unit, target)"""

VOCABULARY = 131_072
REQUESTS = 256
STEPS = 400
WORDS = """
the of and to in is that for it was on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some
so these would other into has more her two like him see time could no make than first been its who now people
my made over did down only way café naïve Grüße 你好 世界 こんにちは мир 😀 👩‍👩‍👧
"""


def tokenizer_json() -> str:
    """Return a byte-level BPE of 131,072 entries: trained on random sentences and filled up with random merges."""
    chance = random.Random(0)
    words = WORDS.split()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((" ".join(chance.choices(words, k=20)) for _ in range(2000)), trainer)
    contents = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = contents["model"]["vocab"]
    parts = [word for word in vocabulary if (letters := word.removeprefix("Ġ")).isascii() and letters.isalpha()]
    while len(vocabulary) < VOCABULARY:
        pair = chance.choices(parts, k=2)
        if (word := "".join(pair)) not in vocabulary and len(word) < 16:
            vocabulary[word] = len(vocabulary)
            contents["model"]["merges"].append(pair)
            parts.append(word)
    return json.dumps(contents)


class Bench:
    """Manager with REQUESTS open choices, and the bytes of STEPS steps that continue them."""

    def __init__(
        self, vocabulary: Vocabulary, ids: Sequence[int], frontends: int = 1, stop: list[str] | None = None
    ) -> None:
        chance = random.Random(1)
        tokenizers = TokenizerStore()
        tokenizers.add("scheduler-0", "", vocabulary)
        self._manager = DetokenizerManager(tokenizers)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(DetokenizerInbox)
        spec = msgspec.msgpack.encode(DecodeSpec(stop=stop or []))
        rids = [f"frontend-{n % frontends}-{chance.randbytes(12).hex()}" for n in range(REQUESTS)]
        openings = [
            FirstRow(row=n, frontend=f"frontend-{n % frontends}", decode_spec=spec, prompt_tokens=9, cached_tokens=0)
            for n in range(REQUESTS)
        ]
        self.step(self._batch(rids, 0, chance.choices(ids, k=REQUESTS), openings))
        self._steps = [self._batch(rids, step, chance.choices(ids, k=REQUESTS), []) for step in range(1, STEPS + 1)]

    def _batch(self, rids: list[str], position: int, ids: list[int], openings: list[FirstRow]) -> bytes:
        zeros = pack_ints([0] * REQUESTS)
        return self._encoder.encode(
            BatchTokenIDOutput(
                rids=rids,
                indices=zeros,
                attempts=zeros,
                positions=pack_ints([position] * REQUESTS),
                offsets=pack_ints(range(REQUESTS + 1)),
                token_ids=pack_ints(ids),
                openings=openings,
            )
        )

    def step(self, frame: bytes) -> int:
        """Decode one message, handle it, encode the result, and return the number of bytes."""
        message = self._decoder.decode(frame)
        assert isinstance(message, BatchTokenIDOutput)
        return sum(len(self._encoder.encode(output)) for _, output in self._manager.handle(message))

    def median(self) -> float:
        """Return the microseconds of the median step."""
        return statistics.median(_microseconds(partial(self.step, frame)) for frame in self._steps)


def _microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _fill(vocabulary: Vocabulary) -> None:
    table = vocabulary.table(skip_special_tokens=True)
    for token_id in range(VOCABULARY):
        table[token_id]


def rows() -> list[Row]:
    """Return all figures with their targets."""
    text = tokenizer_json()
    loads = [_microseconds(lambda: Vocabulary(text)) for _ in range(3)]
    vocabulary = Vocabulary(text)
    fill = _microseconds(partial(_fill, vocabulary)) / VOCABULARY
    every = range(VOCABULARY)
    broken = [token_id for token_id in every if isinstance(vocabulary.table(skip_special_tokens=True)[token_id], bytes)]
    step = Bench(vocabulary, every).median()
    routed = Bench(vocabulary, every, frontends=4).median()
    stopped = Bench(vocabulary, every, stop=["\n\nUser:", "###", "</answer>"]).median()
    unfinished = Bench(vocabulary, broken).median()
    return [
        ("detokenizer: step of 256 tokens, decode to encode", step, "us", 256.0),
        ("detokenizer: tokens a second in that step", REQUESTS / step * 1e6, "tokens/s", 1e6),
        ("detokenizer: the same step for 4 frontends", routed, "us", 400.0),
        ("detokenizer: the same step with 3 stop strings each", stopped, "us", 256.0),
        ("detokenizer: the same step of nothing but broken characters", unfinished, "us", 512.0),
        ("detokenizer: fill one entry of the table", fill, "us", 10.0),
        ("detokenizer: load a tokenizer of 131,072 entries", min(loads) / 1e3, "ms", 1000.0),
    ]


if __name__ == "__main__":
    for name, measured, unit, target in rows():
        print(f"{name:<60} {measured:>12,.1f} {unit:<9} target {target:,.0f}")
