"""The fuzz of files finds what it is there to find, and does the same for the same seeds."""

import subprocess
import sys
from random import Random

import pytest

from tercet.protocol.damage import damaged, damaged_json, damaged_safetensors

CASES = {
    "raise KeyError('field')": "KeyError: 'field'",
    "return 'two\\nlines'": "AssertionError: no line: ",
    "return str(len(bytearray(1 << 34)))": "MemoryError",
    "return 'refused'": "",
}


@pytest.mark.parametrize("body", CASES)
def test_a_case_that_is_not_refused_in_one_line_ends_the_run(body: str) -> None:
    program = (
        f"import sys\nfrom tercet.protocol.damage import run_cases\ndef case(random):\n    {body}\n"
        "sys.exit(run_cases(case, first=7, count=3, seconds=10))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert CASES[body] in ended.stderr
    assert ended.returncode == (1 if CASES[body] else 0)
    assert ended.stderr.splitlines()[-1] == ("seed 7" if CASES[body] else "seed 9")
    assert ended.stdout == ("" if CASES[body] else "3 cases, 3 refused\n")


def test_a_seed_always_does_the_same_damage() -> None:
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    stored = len(header).to_bytes(8, "little") + header + bytes(4)
    for damage, content in ((damaged, b"abc" * 9), (damaged_json, header), (damaged_safetensors, stored)):
        results = [damage(content, Random(seed)) for seed in range(200)]
        assert results == [damage(content, Random(seed)) for seed in range(200)]
        assert len(set(results)) > 20
        assert sum(result != content for result in results) > 150
