"""Data from outside cannot become code: no unpickling, no eval, and lint rules that find both.

The worst advisories of inference servers (CVE-2024-50050 and its family, CVE-2025-32444, CVE-2026-7301, CVE-2025-10164,
CVE-2026-26220, CVE-2025-62164, CVE-2026-22807) are all executed data.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))

FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "load_dynlib_from_url"}
FORBIDDEN_KEYWORDS = {"trust_remote_code", "allow_pickle"}
"""Keywords that are allowed only as a literal False."""

BAD = {
    "import pickle\n": "TID251",
    "import _pickle\n": "TID251",
    "import marshal\n": "TID251",
    "import dill\n": "TID251",
    "import cloudpickle\n": "TID251",
    "import shelve\n": "TID251",
    "import joblib\n": "TID251",
    "from pickle import loads\n": "TID251",
    "import torch\n\nstate = torch.load('x')\n": "TID251",
    "from torch import load\n": "TID251",
    "import torch\n\nmodel = torch.hub.load('a', 'b')\n": "TID251",
    "value = eval(input())\n": "S307",
    "exec(input())\n": "S102",
    "import yaml\n\nvalue = yaml.load(input())\n": "S506",
    "import subprocess\n\nsubprocess.run(input(), shell=True)\n": "S602",
}


def rules_broken(source: str, path: str) -> set[str]:
    """Return the ruff rules that a file with this source at this path breaks."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--stdin-filename", path, "-"]
    found = subprocess.run(command, input=source, capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.returncode in {0, 1}, found.stderr
    return set(re.findall(r": ([A-Z]+\d+) ", found.stdout))


@pytest.mark.parametrize("source", BAD)
@pytest.mark.parametrize("part", ["protocol", "scheduler"])
def test_the_rules_fire(source: str, part: str) -> None:
    assert BAD[source] in rules_broken(source, f"packages/{part}/src/tercet/{part}/bad.py")


def test_the_rules_do_not_fire_on_what_is_good() -> None:
    good = '"""Reads a message."""\n\nimport msgspec\n\nvalue = msgspec.msgpack.decode(b"")\n'
    assert not rules_broken(good, "packages/protocol/src/tercet/protocol/good.py")


@pytest.mark.parametrize("banned", ["import pickle\n", "import torch\n\nstate = torch.load('x')\n"])
def test_tests_are_held_to_it_as_well(banned: str) -> None:
    assert "TID251" in rules_broken(banned, "packages/protocol/tests/test_bad.py")


def test_no_source_is_exempt() -> None:
    exempt = re.compile(r"noqa(?!:)|noqa:.*\b(S102|S30\d|S506|S602|TID251)\b")
    lines = ((path, number, line) for path in SOURCES for number, line in enumerate(path.read_text().split("\n"), 1))
    found = [f"{path}:{number}" for path, number, line in lines if exempt.search(line)]
    assert not found
    assert len(SOURCES) > 100, "they were looked at"


def offences(tree: ast.AST) -> Iterator[str]:
    """Yield calls for which ruff has no rule."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        # Modules are put into evaluation mode by a method of that name without arguments.
        evaluates = name == "eval" and (isinstance(node.func, ast.Name) or node.args)
        if evaluates or name in FORBIDDEN_METHODS | {"exec", "__import__"}:
            yield f"{node.lineno}: {name}"
        for keyword in node.keywords:
            plain_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in FORBIDDEN_KEYWORDS and not plain_false:
                yield f"{node.lineno}: {keyword.arg}"


@pytest.mark.parametrize(
    "source",
    ["s.recv_pyobj()", "numpy.load(p, allow_pickle=True)", "A.from_pretrained(p, trust_remote_code=x)", "eval('1')"],
)
def test_offences_are_found(source: str) -> None:
    assert list(offences(ast.parse(source)))


def test_no_source_receives_objects_or_trusts_remote_code() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{offence}" for path in SOURCES for offence in offences(ast.parse(path.read_text()))
    ]
    assert not found
