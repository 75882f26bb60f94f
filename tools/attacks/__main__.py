"""Attacks on a server, and the service of another key during each: python -m tools.attacks [--base OLD_SOURCE_TREE].

Starts a server on this machine with two API keys, of this source tree and of the other one, if given. Each attack runs
in a process of its own, at low priority, with one key; the other key streams meanwhile. Prints a Markdown table.
`--only WORD` runs the attacks with the word in their names.
"""

import argparse
import asyncio
import importlib
import importlib.util
import os
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tercet.frontend.cli.bench.client import BenchError, Target, complete
from tools.attacks.attack import Attack
from tools.attacks.victim import Service, watch

if TYPE_CHECKING:
    from tests.server_process import Server

MODULES = ("controls", "bodies", "answers", "stores", "grammars", "prompts", "media")
_HERE = Path(__file__).parents[2]
_ATTACKER, _VICTIM = "key-of-the-attacker", "key-of-the-victim"
_IDLE_SECONDS = 3.0
_RECOVERY_SECONDS = 90.0
_NICENESS = 10
_DEATH = re.compile(r"tercet: warning: \S+ (died|hangs)")


@dataclass(frozen=True)
class Finding:
    """Service of one key before and during an attack with another, and the number of parts that died."""

    idle: Service
    attacked: Service
    deaths: int
    recovery: float
    """Seconds until a short request was answered after the attack."""


def attacks(only: str = "") -> list[Attack]:
    """Return the attacks of all modules."""
    names = [f"tools.attacks.{name}" for name in MODULES]
    modules = [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]
    return [attack for module in modules for attack in module.ATTACKS if only in attack.name]


def start(tree: Path, model: str, options: list[str]) -> "Server":
    """Start a server of a source tree."""
    from tests.server_process import Server  # an attacker's process does not need its client libraries

    sources = [str(path) for path in sorted(tree.glob("packages/*/src"))]
    env = {"PYTHONPATH": os.pathsep.join([*sources, str(tree)]), "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    keys = ("--api-key", _ATTACKER, "--api-key", _VICTIM)
    scripts = tomllib.loads((tree / "packages/frontend/pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["tercet"].partition(":")  # the installed command is of one tree only
    program = ("-c", f"import sys; from {module} import {function}; sys.exit({function}())", "serve")
    arguments = (model, "--kv-cache-bytes", "64MiB", *keys, *options)
    return Server(*arguments, env=env, program=program, key=_VICTIM).wait()


async def examine(server: "Server", attack: Attack, seconds: float) -> Finding:
    """Measure the service of the other key before and during an attack."""
    target = Target(url=server.url, model=server.model(), api_key=_VICTIM)
    idle = await _watched(target, asyncio.sleep(_IDLE_SECONDS))
    deaths = _deaths(server)
    process = await _begin(server.url, attack)
    attacked = await _watched(target, _end(process, seconds))
    began = time.monotonic()
    while time.monotonic() - began < _RECOVERY_SECONDS:
        try:
            async with asyncio.timeout(5):
                await complete(target, "hi", 1)
            break
        except (BenchError, TimeoutError):
            await asyncio.sleep(0.2)
    return Finding(idle, attacked, _deaths(server) - deaths, time.monotonic() - began)


async def _watched(target: Target, work: Awaitable[None]) -> Service:
    stop = asyncio.Event()
    watching = asyncio.ensure_future(watch(target, stop))
    await work
    stop.set()
    return await watching


async def _begin(url: str, attack: Attack) -> asyncio.subprocess.Process:
    """Start an attack in a process of its own, and return once it has begun."""
    command = (sys.executable, "-m", "tools.attacks", "--run", attack.name, "--url", url)
    process = await asyncio.create_subprocess_exec(*command, cwd=_HERE, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    return process


async def _end(process: asyncio.subprocess.Process, seconds: float) -> None:
    """Let an attack run for `seconds`."""
    try:
        await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _run(attack: Attack, url: str) -> None:
    await attack.run(url, _ATTACKER)


def _deaths(server: "Server") -> int:
    return sum(bool(_DEATH.search(line)) for line in server.lines)


def table(before: dict[str, Finding], after: dict[str, Finding]) -> str:
    """Return the findings as Markdown: gaps and times of `hi` in milliseconds, before and during the attack."""
    rows = ["| attack | p99 before | p99 after | ratio | longest before | longest after | hi before | after | deaths |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for name, found in after.items():
        old = before.get(name)
        ratio = found.attacked.gap(0.99) / found.idle.gap(0.99)
        cells = [_gaps(old, 0.99), _gaps(found, 0.99), f"{ratio:.1f}", _gaps(old, 1), _gaps(found, 1)]
        cells += [_short(old), _short(found), f"{'' if old is None else f'{old.deaths}, '}{found.deaths}"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _gaps(found: Finding | None, share: float) -> str:
    return f"{_ms(found.idle.gap(share))} → {_ms(found.attacked.gap(share))}" if found else ""


def _short(found: Finding | None) -> str:
    return f"{_ms(found.idle.median_short)} → {_ms(found.attacked.median_short)}" if found else ""


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def survey(tree: Path, chosen: list[Attack], options: argparse.Namespace) -> dict[str, Finding]:
    """Start a server of a tree, run every attack against it, and stop it."""
    findings = {}
    server = start(tree, options.model, options.option)
    try:
        for attack in chosen:
            found = findings[attack.name] = asyncio.run(examine(server, attack, options.seconds))
            idle, attacked = found.idle, found.attacked
            sys.stderr.write(
                f"{attack.name}: p50 {_ms(idle.gap(0.5))} -> {_ms(attacked.gap(0.5))}, p99 {_ms(idle.gap(0.99))} -> "
                f"{_ms(attacked.gap(0.99))}, longest {_ms(idle.gap(1))} -> {_ms(attacked.gap(1))}, hi "
                f"{_ms(idle.median_short)} -> {_ms(attacked.median_short)} ms; {attacked.failed} failed, "
                f"{found.deaths} deaths, answers again after {found.recovery:.1f} s\n"
            )
            sys.stderr.flush()
    finally:
        server.stop()
    return findings


def main(arguments: list[str]) -> int:
    """Attack, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, help="a source tree to compare with")
    parser.add_argument("--only", default="")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each attack")
    parser.add_argument("--option", action="append", default=[], help="a further option of tercet serve")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        os.nice(_NICENESS)
        sys.stdout.write("begins\n")
        sys.stdout.flush()
        [attack] = [each for each in attacks() if each.name == options.run]
        asyncio.run(_run(attack, options.url))
        return 0
    chosen = attacks(options.only)
    with tempfile.TemporaryDirectory() as state:  # attacks find the database there, too
        os.environ["XDG_STATE_HOME"] = state
        before = survey(options.base.resolve(), chosen, options) if options.base else {}
        print(table(before, survey(_HERE, chosen, options)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
