"""A program that reads damaged tokenizers as a detokenizer does, in a process of bounded memory.

`python -m packages.detokenizer.tests.file_fuzz SAMPLE FIRST COUNT SECONDS`: for the seeds from FIRST on `Vocabulary`
either reads a damaged copy of the tokenizer.json SAMPLE or raises TokenizerError of one line.
"""

import sys
from pathlib import Path

from tercet.detokenizer.errors import TokenizerError
from tercet.detokenizer.vocabulary import Vocabulary
from tercet.protocol.damage import damaged_json, run_cases


def read(content: bytes) -> str:
    """Read a tokenizer and use it; return the reason of a refusal."""
    try:
        vocabulary = Vocabulary(content.decode("utf-8", "replace"))
    except TokenizerError as error:
        return str(error)
    ids = list(range(40))
    if vocabulary.joining is not None:
        for skip in (True, False):
            assert all(isinstance(vocabulary.table(skip)[each], str | bytes | None) for each in ids)
    assert isinstance(vocabulary.decode(ids), str)
    return ""


def main(sample: Path, first: int, count: int, seconds: float) -> int:
    """Try seeds. Return the exit status."""
    content = sample.read_bytes()
    assert read(content) == ""
    return run_cases(lambda random: read(damaged_json(content, random)), first=first, count=count, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
