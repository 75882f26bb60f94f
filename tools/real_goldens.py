"""Greedy tokens and a perplexity of llama.cpp and of transformers for a GGUF file: the goldens of tests/real.

python -m tools.real_goldens MODEL.gguf --out tests/real/smollm2.json

It needs llama-cpp-python 0.3.36, a development tool that no package of Tercet needs: `pip install --target FOLDER
llama-cpp-python==0.3.36` builds it (cmake, a C++ compiler), and PYTHONPATH names FOLDER. Its activations are 8-bit, as
in llama-server; keys and values are float32 here. transformers reads the same file, and computes in float32.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.real.goldens import TOKENS, digest
from tests.real.prompts import PROMPTS, Prompt

PAGE = Path(__file__).parents[1] / "tests" / "real" / "page.txt"
Logprobs = NDArray[np.float64]
Extend = Callable[[Sequence[int]], Logprobs]
"""Function that adds tokens to a sequence, and returns the log-probabilities of the next token."""


class LlamaCpp:
    """A GGUF file in llama.cpp."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        self._llama_cpp = llama_cpp
        float32 = llama_cpp.GGML_TYPE_F32
        options = {"n_ctx": 8192, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        self._llama = llama_cpp.Llama(str(path), type_k=float32, type_v=float32, **options)
        self._vocab = llama_cpp.llama_model_get_vocab(self._llama.model)
        template = self._llama.metadata.get("tokenizer.chat_template")
        bos = llama_cpp.llama_vocab_get_text(self._vocab, self._llama.token_bos()).decode()
        eos = llama_cpp.llama_vocab_get_text(self._vocab, self._llama.token_eos()).decode()
        self._format = template and Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt, with llama.cpp's tokenizer and the file's chat template if it has one."""
        if prompt.messages and self._format:
            text = self._format(messages=prompt.chat()).prompt
            return list(self._llama.tokenize(text.encode(), add_bos=False, special=True))
        begins = bool(self._llama_cpp.llama_vocab_get_add_bos(self._vocab))
        return list(self._llama.tokenize(prompt.plain.encode(), add_bos=begins, special=False))

    def ends(self, token: int) -> bool:
        return bool(self._llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def begin(self) -> Extend:
        """Begin a sequence."""
        self._llama.reset()

        def extend(tokens: Sequence[int]) -> Logprobs:
            self._llama.eval(tokens)
            logits = self._llama_cpp.llama_get_logits_ith(self._llama.ctx, -1)
            return log_softmax(np.ctypeslib.as_array(logits, shape=(self._llama.n_vocab(),)))

        return extend

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probabilities of all tokens but the first."""
        extend = self.begin()
        return [float(extend([token])[following]) for token, following in pairwise(tokens)]


class Transformers:
    """A GGUF file, dequantized by transformers in float32."""

    def __init__(self, path: Path) -> None:
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )

    def begin(self) -> Extend:
        """Begin a sequence."""
        past: Any = None

        def extend(tokens: Sequence[int]) -> Logprobs:
            nonlocal past
            with torch.inference_mode():
                found = self._model(torch.tensor([tokens]), past_key_values=past, use_cache=True, logits_to_keep=1)
            past = found.past_key_values
            return log_softmax(found.logits[0, -1].numpy())

        return extend

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probabilities of all tokens but the first."""
        with torch.inference_mode():
            logprobs = self._model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return [float(each) for each in logprobs.gather(1, torch.tensor([tokens[1:]]).T)]


def log_softmax(logits: NDArray[np.float32]) -> Logprobs:
    shifted = logits.astype(np.float64) - logits.max()
    logprobs: Logprobs = shifted - math.log(np.exp(shifted).sum())
    return logprobs


def greedy(extend: Extend, prompt: Sequence[int], ends: Callable[[int], bool]) -> dict[str, list[Any]]:
    """Return greedy tokens, up to an end token, and the log-probabilities of the two best tokens at each position."""
    answer: dict[str, list[Any]] = {"tokens": [], "first": [], "second": []}
    logprobs = extend(prompt)
    for number in count(1):
        second, first = (int(each) for each in np.argsort(logprobs)[-2:])
        answer["tokens"].append(first)
        answer["first"].append(round(float(logprobs[first]), 4))
        answer["second"].append(round(float(logprobs[second]), 4))
        if number == TOKENS or ends(first):
            break
        logprobs = extend([first])
    return answer


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def lines(path: Path, threads: int) -> Iterator[str]:
    """Yield a JSON object for each prompt, and one for the page."""
    llama, transformers = LlamaCpp(path, threads), Transformers(path)
    for prompt in PROMPTS:
        ids = llama.encode(prompt)
        yield json.dumps(
            {
                "name": prompt.name,
                "prompt": digest(ids),
                "llama.cpp": greedy(llama.begin(), ids, llama.ends),
                "transformers": greedy(transformers.begin(), ids, llama.ends),
            }
        )
    page = llama.encode(Prompt("page", text=PAGE.read_text(encoding="utf-8")))
    found = {
        "llama.cpp": perplexity(llama.score(page)),
        "transformers": perplexity(transformers.score(page)),
    }
    yield json.dumps({"name": "page", "prompt": digest(page), "perplexity": found})


def main(arguments: list[str]) -> int:
    """Write the goldens, one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    with options.out.open("w", encoding="utf-8") as out:
        for line in lines(options.model.resolve(), options.threads):
            out.write(line + "\n")
            out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
