"""Fuzzer that reads damaged model files in a process of bounded memory.

`python -m packages.frontend.tests.file_fuzz SAMPLE FIRST COUNT SECONDS`: for each seed from FIRST on, `ModelFiles`
reads the files of SAMPLE, one of them damaged, or raises ValueError of one line. Files that were read work, or refuse a
request.
"""

import sys
from pathlib import Path
from random import Random

from tercet.frontend.errors import ApiError
from tercet.frontend.model.prompts import ChatPrompt
from tercet.frontend.model.served_model import ModelFiles
from tercet.protocol.damage import damaged, damaged_json, run_cases

_MESSAGES = [{"role": "user", "content": "Grüße <|im_end|> 🙂"}]


def read(files: dict[str, bytes]) -> str:
    """Read files and use them. Return the reason of a refusal."""
    try:
        model = ModelFiles(files)
    except ValueError as error:
        return str(error)
    try:
        tokenizer = model.tokenizer
        ids = tokenizer.encode(tokenizer.escape_special("Two words, 3 signs!"), add_special_tokens=True)
        tokenizer.decode([each for each in ids if tokenizer.has(each)], skip_special_tokens=True)
        for each in ids[:5]:
            _ = model.token_bytes[each]
        if model.template is not None:
            model.template.render(ChatPrompt(messages=_MESSAGES), tokenizer.escape_special)
        model.sentences.activate([0.5, 2.0])
    except ApiError:
        pass
    return ""


def main(sample: Path, first: int, count: int, seconds: float) -> int:
    """Try seeds. Return the exit status."""
    files = {path.name: path.read_bytes() for path in sorted(sample.iterdir())}
    assert read(files) == ""

    def case(random: Random) -> str:
        name = random.choice([*files, "tokenizer.json"])
        how = damaged_json if name.endswith(".json") else damaged
        return read({**files, name: how(files[name], random)})

    return run_cases(case, first=first, count=count, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
