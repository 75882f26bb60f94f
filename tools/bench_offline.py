"""Tokens per second of the executor alone: no HTTP, no scheduler, no detokenizer.

python tools/bench_offline.py MODEL [--quantization int8] [--batch 1 8 32]: prefills a prompt for each row, then decodes
all rows together. The difference from `tools/bench_serving.py` is the cost of everything around the model.
"""

import argparse
import statistics
import sys
import time

from tercet.protocol.messages.values import SamplingParams, pack_ints
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import resolve_model

PAGE_SIZE = 16


class Offline:
    """Worker whose slots all hold a prompt and decode from there."""

    def __init__(self, options: argparse.Namespace, batch: int) -> None:
        self.batch, self.prompt, self.length = batch, options.prompt, options.prompt
        self.pages = -(-(options.prompt + options.steps + 1) // PAGE_SIZE)
        self.worker = TpModelWorker(
            WorkerOptions(
                model=resolve_model(options.model),
                dtype=options.dtype,
                device=options.device,
                quantization=options.quantization,
                threads=options.threads,
                slots=batch,
                page_size=PAGE_SIZE,
                context_length=self.pages * PAGE_SIZE,
            )
        )

    def prefill(self, slot: int) -> float:
        """Return the seconds of one prompt that shares no prefix with others."""
        vocabulary = self.worker.capacity.vocab_size
        tokens = pack_ints((7919 * slot + 31 * place) % vocabulary for place in range(self.prompt))
        sampling = SamplingParams(max_new_tokens=self.pages * PAGE_SIZE, temperature=0.0)
        init = SlotInit(slot=slot, tokens=tokens, prompt_tokens=self.prompt, choice=0, sampling=sampling)
        first = slot * self.pages
        pages = PageUpdate(slot, 0, [list(range(first, first + self.pages))])
        row = Row(slot, 0, self.prompt, sample=True)
        return self._run(Plan(step=slot, introduce=[init], pages=[pages], rows=[row]))

    def decode(self) -> float:
        """Return the seconds of a decode step of all rows."""
        rows = [Row(slot, self.length, 1, sample=True) for slot in range(self.batch)]
        self.length += 1
        return self._run(Plan(step=self.batch + self.length, rows=rows))

    def _run(self, plan: Plan) -> float:
        start = time.perf_counter()
        self.worker.submit(plan).result()
        return time.perf_counter() - start


def main(arguments: list[str]) -> int:
    """Print a line for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a directory, a Hugging Face name, or embedded")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each row's prompt")
    parser.add_argument("--steps", type=int, default=64, help="tokens decoded for each row")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    for batch in options.batch:
        offline = Offline(options, batch)
        prefills = [offline.prefill(slot) for slot in range(batch)]
        steps = [offline.decode() for _ in range(options.steps)]
        median, best = statistics.median(steps), min(steps)
        print(
            f"batch {batch:3}: prefill {options.prompt / min(prefills):8.1f} tokens/s, "
            f"decode {batch / median:8.1f} tokens/s (best {batch / best:.1f}), step {1e3 * median:.2f} ms",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
