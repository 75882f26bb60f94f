"""Tokenization of encoder inputs, including special tokens."""

import itertools
import re
from collections.abc import Iterator, Sequence
from functools import partial

from tercet.frontend.errors import BadRequestError, ContextLengthExceededError
from tercet.frontend.model.embedding_request import (
    EmbeddingRequest,
    EncodedInput,
    PairInput,
    TextInput,
    TokenInput,
    size_of,
)
from tercet.frontend.model.input_layout import Piece
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.model.tokenizer_pool import LONG
from tercet.frontend.model.tokenizer_pool import Piece as PoolPiece
from tercet.protocol.messages.values import pack_ints

_INPUTS_PER_JOB = 64
"""Inputs tokenized in one job: the threads are shared with all other prompts."""


async def encode_all(request: EmbeddingRequest, model: ServedModel) -> list[EncodedInput]:
    """Encode every input of a request in the threads of the tokenizer pool. Raises ApiError."""
    encode = InputEncoder(request, model).encode
    pieces = [PoolPiece(partial(encode, indices), size) for indices, size in _jobs_of(request)]
    parts = await model.tokenizer_pool.run_all(pieces)
    return list(itertools.chain.from_iterable(parts))


def _jobs_of(request: EmbeddingRequest) -> Iterator[tuple[list[int], int]]:
    """Yield the indices of inputs that are tokenized in one job, and their total number of characters."""
    indices: list[int] = []
    size = 0
    for index, given in enumerate(request.inputs):
        more = size_of(given)
        if indices and (len(indices) == _INPUTS_PER_JOB or size + more >= LONG):
            yield indices, size
            indices, size = [], 0
        indices.append(index)
        size += more
    yield indices, size


class InputEncoder:
    """Encoder of one request's inputs. A text shared by several pairs, the query, is tokenized once.

    Encoding is CPU-bound: not for the event loop.
    """

    def __init__(self, request: EmbeddingRequest, model: ServedModel) -> None:
        self._request = request
        self._model = model
        self._tokenizer = model.tokenizer
        self._limit = self._cut_at()
        self._prompt = self._find_prompt()
        self._first_ids: dict[str, list[int]] = {}

    def encode(self, indices: Sequence[int]) -> list[EncodedInput]:
        """Encode the inputs at these indices. Raises BadRequestError with the name of the input at fault."""
        return [self._encode(index) for index in indices]

    def _encode(self, index: int) -> EncodedInput:
        param = self._request.params[index]
        match self._request.inputs[index]:
            case TextInput(text, most):
                layout = self._tokenizer.layout
                ids = self._cut(self._ids(self._prompt, text, param, most), most, layout.added)
                piece = layout.fill(ids[: self._room(layout.added, param)])
            case PairInput(first, second, first_param, most):
                layout = self._tokenizer.pair_layout
                firsts = self._first_ids.get(first)
                if firsts is None:
                    firsts = self._first_ids[first] = self._ids("", first, first_param)
                seconds = self._cut(self._ids("", second, param, most), most, layout.added + len(firsts))
                piece = layout.fill(*_truncate_longest_first(firsts, seconds, self._room(layout.added, param)))
                if layout.added + len(firsts) > self._model.context:  # no second text would fit
                    param = first_param
            case TokenInput(ids):
                for token_id in ids:
                    if not 0 <= token_id < self._model.limits.vocab_size:
                        raise BadRequestError(f"{token_id} is not a token id of this model.", param=param)
                piece = Piece(ids[: self._limit], [])
        if len(piece.ids) > self._model.context:
            raise ContextLengthExceededError(
                f"This model's maximum context length is {self._model.context} tokens. However, your input has "
                f"{len(piece.ids)}. 'truncate_prompt_tokens' cuts what is too long.",
                param=param,
            )
        if not piece.ids:
            raise BadRequestError("The input has no tokens.", param=param)
        return EncodedInput(pack_ints(piece.ids), pack_ints(piece.types) if any(piece.types) else b"")

    def _cut(self, ids: list[int], most: int | None, others: int) -> list[int]:
        """Cut a text that may be cut to fit beside `others` tokens; at least one token always remains."""
        return ids if most is None else ids[: min(most, max(self._model.context - others, 1))]

    def _ids(self, prompt: str, text: str, param: str, most: int | None = None) -> list[int]:
        """Tokenize a text without adding special tokens; special tokens in its spelling are plain text."""
        if self._model.files.sentences.lowercase:
            text = text.lower()
        cut = self._limit is not None or most is not None
        if not cut and self._tokenizer.fewest_tokens(text) > self._model.context:
            raise ContextLengthExceededError(
                f"This model's maximum context length is {self._model.context} tokens. However, your input has "
                f"{len(text)} characters. 'truncate_prompt_tokens' cuts what is too long.",
                param=param,
            )
        escaped = self._tokenizer.escape_special(text, param=param)
        return self._tokenizer.encode(prompt + escaped, add_special_tokens=False)

    def _room(self, added: int, param: str) -> int | None:
        """Return the tokens left for text besides special tokens; None if nothing is cut."""
        if self._limit is None:
            return None
        if self._limit <= added:
            raise BadRequestError(f"The model adds {added} tokens to {param}.", param="truncate_prompt_tokens")
        return self._limit - added

    def _cut_at(self) -> int | None:
        truncate, context = self._request.truncate, self._model.context
        if truncate is None:
            return None
        if truncate > context:
            raise BadRequestError(f"This model reads {context} tokens at the most.", param="truncate_prompt_tokens")
        return context if truncate < 0 else truncate

    def _find_prompt(self) -> str:
        sentences, name = self._model.files.sentences, self._request.prompt_name
        if name is None:
            return self._lowered(sentences.default_prompt)
        if name not in sentences.prompts:
            known = ", ".join(map(repr, sentences.prompts)) or "none"
            raise BadRequestError(f"The model has no prompt {name!r}; it has {known}.", param="prompt_name")
        return self._lowered(sentences.prompts[name])

    def _lowered(self, prompt: str) -> str:
        """Lower a prompt's case outside special tokens, if the model lowercase its texts."""
        if not self._model.files.sentences.lowercase:
            return prompt
        special = sorted(self._tokenizer.control.values(), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, special))})", prompt) if special else [prompt]
        return "".join(part if index % 2 else part.lower() for index, part in enumerate(parts))


def _truncate_longest_first(first: list[int], second: list[int], room: int | None) -> tuple[list[int], list[int]]:
    """Cut both to a total of `room` tokens, the longer one first, like tokenizers' `longest_first`."""
    if room is None or len(first) + len(second) <= room:
        return first, second
    shorter = min(len(first), len(second))
    if shorter + max(shorter, room - shorter) > room:
        shorter = room // 2
    if len(first) <= len(second):
        return first[:shorter], second[: room - shorter]
    return first[: room - shorter], second[:shorter]
