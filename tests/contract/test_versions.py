"""Parts of neighboring wire versions serve together in every mix, and another major is refused by name.

The newer parts are the same parts with a copy of `tercet.protocol` that has changes allowed in a next minor: new fields
in messages of every direction, and a new message type that its nodes send to every peer that accepts it.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tercet.protocol.messages.values
from packages.kernels.tests.pairwise import pairwise
from tercet.protocol.messages.values import WIRE_VERSION
from tests.part_process import ChildProcess, complete, healthy, listener, until

PROTOCOL = Path(tercet.protocol.messages.values.__file__).parents[1]
MAJOR, MINOR = WIRE_VERSION
OLD, NEW, ALIEN = f"{MAJOR}.{MINOR}", f"{MAJOR}.{MINOR + 1}", f"{MAJOR + 1}.0"

LAUNCHER = """
import json, runpy, sys
from tercet.protocol.node_core import NodeCore

part, counters = sys.argv.pop(1), sys.argv.pop(1)
close = NodeCore.close

def close_and_tell(self, reason):
    with open(counters, "w") as file:
        json.dump(self.counters, file)
    close(self, reason)

NodeCore.close = close_and_tell
runpy.run_module(f"tercet.{part}", run_name="__main__")
"""
"""Launcher of a part that writes its counters to a file at exit."""

ADDED_FIELDS = {
    "Hello": "region: str = 'here'",
    "Heartbeat": "temperature: float = 40.5",
    "Ready": "mood: tuple[str, ...] = ('good', 'calm')",
    "TokenizedGenerateReqInput": "deadline: float | None = 12.5",
    "TokenizerFiles": "compressed: bool = False",
    "BatchTokenIDOutput": "entropies: bytes = b'1234'",
    "BatchStrOutput": "language: str | None = 'en'",
    "DecodeSpec": "locale: str = 'en'",
}
ADDED_TYPE = '''

class Novelty(Message, frozen=True, kw_only=True):
    """What no part of the minor before knows."""

    text: str


Membership = Hello | Novelty |'''


def newer(directory: Path, version: tuple[int, int]) -> Path:
    """Write a copy of the protocol package with a later version, and return the folder to put on the path."""
    package = directory / "tercet" / "protocol"
    shutil.copytree(PROTOCOL, package, ignore=shutil.ignore_patterns("__pycache__"))
    _edit(package / "messages" / "values.py", {f"WIRE_VERSION = {WIRE_VERSION}": f"WIRE_VERSION = {version}"})
    messages = package / "messages" / "messages.py"
    _edit(messages, {"\nMembership = Hello |": ADDED_TYPE})
    for name, field in ADDED_FIELDS.items():
        head = rf'(class {name}\([^)]*\):\n    """.*?""")'
        text, count = re.subn(head, rf"\1\n\n    {field}", messages.read_text(), flags=re.DOTALL)
        assert count == 1, name
        messages.write_text(text)
    _edit(
        package / "node_core.py",
        {
            "import Goodbye, Heartbeat, Hello, Introduce, Message, Ready": (
                "import Goodbye, Heartbeat, Hello, Introduce, Message, Novelty, Ready"
            ),
            "                    self._note_activity(now)\n                case PeerReady": (
                '                    self._counters.count("novelties_sent", self.send(peer, Novelty(text="new")))\n'
                "                    self._note_activity(now)\n                case PeerReady"
            ),
            "            case Goodbye():\n": (
                '            case Novelty():\n                self._counters.count("novelties_received")\n'
                "                effects = []\n            case Goodbye():\n"
            ),
        },
    )
    _edit(
        package / "logging.py",
        {
            "def count(self, name: str)": "def count(self, name: str, by: int = 1)",
            "self._counts[name] += 1": "self._counts[name] += by",
        },
    )
    return directory


def _edit(path: Path, changes: dict[str, str]) -> None:
    text = path.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, f"{path.name} has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    path.write_text(text)


class Parts:
    """Parts of several versions, each version in a directory of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths: dict[str, Path | None] = {
            OLD: None,
            NEW: newer(root / "newer", (MAJOR, MINOR + 1)),
            ALIEN: newer(root / "alien", (MAJOR + 1, 0)),
        }
        self.running: dict[str, ChildProcess] = {}

    def start(self, role: str, version: str, *words: str, fds: tuple[int, ...] = ()) -> ChildProcess:
        name = f"{role}-{version}"
        command = [sys.executable, "-c", LAUNCHER, role, str(self._counters(name)), "--peer", name]
        command += ["--listen", f"ipc://{self.root}/run", *words]
        part = self.running[name] = ChildProcess(command, self.root / f"{name}.log", env=self.env(version), fds=fds)
        return part

    def env(self, version: str) -> dict[str, str]:
        """Return the environment that makes a process use that version of the protocol."""
        path = self.paths[version]
        return {"PYTHONPATH": str(path)} if path else {}

    def socket(self, role: str, version: str) -> str:
        """Return the spec of a part's inbox."""
        return f"ipc://{self.root}/run/{role}-{version}.*"

    def stop(self, role: str, version: str) -> dict[str, int]:
        """Stop a part and return its counters."""
        name = f"{role}-{version}"
        part = self.running.pop(name)
        assert part.stop() == 0, part.output
        counted: dict[str, int] = json.loads(self._counters(name).read_text())
        return counted

    def _counters(self, name: str) -> Path:
        return self.root / f"{name}.json"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """Yield a scheduler and a detokenizer of each minor."""
    parts = Parts(tmp_path_factory.mktemp("v"))
    for version in (OLD, NEW):
        parts.start("scheduler", version, "--executor", "fake")
        parts.start("detokenizer", version)
    yield parts
    for part in parts.running.values():
        part.kill()


def test_the_newer_parts_really_are_newer(parts: Parts) -> None:
    names = "from tercet.protocol.messages import messages as m, values as v"
    probe = f"{names}; print(v.WIRE_VERSION, 'Novelty' in vars(m))"
    for version, expected in ((NEW, f"({MAJOR}, {MINOR + 1}) True"), (OLD, f"({MAJOR}, {MINOR}) False")):
        path = parts.paths[version]
        env = {"PYTHONPATH": str(path)} if path else {}
        part = ChildProcess([sys.executable, "-c", probe], parts.root / "probe.log", env=env)
        assert part.process.wait(60) == 0, part.output
        assert part.output.strip() == expected


@pytest.mark.parametrize(("frontend", "scheduler", "detokenizer"), pairwise(*[(OLD, NEW)] * 3))
def test_every_mix_of_minors_serves(parts: Parts, frontend: str, scheduler: str, detokenizer: str) -> None:
    specs = ["--scheduler", parts.socket("scheduler", scheduler)]
    specs += ["--detokenizer", parts.socket("detokenizer", detokenizer)]
    sock, url = listener()
    with sock:
        process = parts.start("frontend", frontend, *specs, "--fd", str(sock.fileno()), fds=(sock.fileno(),))
        until(lambda: healthy(url), lambda: process.output)
        answer = complete(url)
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["choices"][0]["text"]
        assert answer["choices"][0]["finish_reason"] == "length"
    counters = parts.stop("frontend", frontend)
    assert counters.get("dropped_undecodable", 0) == 0, "an older part was sent what it cannot read"
    if frontend == NEW:
        peers = {scheduler, detokenizer}
        assert (counters.get("novelties_sent", 0) > 0) == (NEW in peers)
        assert (counters.get("novelties_received", 0) > 0) == (NEW in peers)
        assert (counters.get("refused_unannounced", 0) > 0) == (OLD in peers), "and nobody else was"


def test_another_major_is_refused_with_both_versions_named_on_both_sides(parts: Parts) -> None:
    sock, url = listener()
    with sock:
        specs = ["--scheduler", parts.socket("scheduler", OLD), "--detokenizer", parts.socket("detokenizer", OLD)]
        alien = parts.start("frontend", ALIEN, *specs, "--fd", str(sock.fileno()), fds=(sock.fileno(),))
        alien.wait_for(f"scheduler-{OLD} speaks wire version {OLD}, this part speaks {ALIEN}")
        alien.wait_for(f"detokenizer-{OLD} speaks wire version {OLD}, this part speaks {ALIEN}")
        for role in ("scheduler", "detokenizer"):
            told = f"frontend-{ALIEN} speaks wire version {ALIEN}, this part speaks {OLD}"
            parts.running[f"{role}-{OLD}"].wait_for(told)
        assert not healthy(url)
    assert parts.stop("frontend", ALIEN).get("dropped_undecodable", 0) == 0


def test_no_part_was_ever_sent_what_it_had_not_announced(parts: Parts) -> None:
    """Must be the last test of this file: the parts that served every mix leave, and report their counters."""
    counted = {
        (role, version): parts.stop(role, version) for role in ("scheduler", "detokenizer") for version in (OLD, NEW)
    }
    for (role, version), counters in counted.items():
        assert counters.get("dropped_undecodable", 0) == 0, (role, version, counters)
        assert counters["received"] > 20
        if version == NEW:
            assert counters["novelties_sent"] > 0
            assert counters["novelties_received"] > 0
            assert counters["refused_unannounced"] > 0
