"""Suites of peers, run against a server.

`python -m tools.suites NAME` fetches a suite, starts a server with the embedded model, runs the suite, and prints
a table: passed, failed for a reason that `tools/suites/expected/NAME.toml` has, failed otherwise. With `--url` it runs
against a running server. It fails if a failure has no reason.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tests.server_process import Server
from tools.suites.suite import Outcome, Suite, Target, expectations, judge, report

NAMES = (
    *("openai_python", "openai_node", "anthropic_python", "langchain"),
    *("sglang", "vllm", "open_responses", "ai_sdk"),
)
_SHOWN = 1500


def suite_of(name: str) -> Suite:
    """Return the suite of a module of this package."""
    suite = import_module(f"tools.suites.{name}").SUITE
    assert isinstance(suite, Suite)
    return suite


@contextlib.contextmanager
def target(suite: Suite, options: argparse.Namespace) -> Iterator[Target]:
    """Yield the running server, or start one that has all names that the suite uses."""
    if options.url:
        yield Target(options.url, options.model, options.key)
        return
    names = [flag for name in (options.model, *suite.names) for flag in ("--served-model-name", name)]
    limits = ("--kv-cache-bytes", "64MiB", "--admin-key", options.key)
    server = Server("embedded", *limits, *names, key=options.key).wait()
    try:
        yield Target(server.url, options.model, options.key)
    finally:
        server.stop()


@contextlib.contextmanager
def folder(suite: Suite, options: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder that the suite lies in, fetched if it was not given."""
    if options.source:
        yield options.source.resolve()
        return
    with tempfile.TemporaryDirectory(prefix=f"{suite.name}-") as made:
        sys.stderr.write(f"{suite.name}: fetching\n")
        suite.fetch(Path(made))
        yield Path(made)


def show(failures: list[Outcome]) -> None:
    for each in failures:
        sys.stderr.write(f"\nFAILED {each.test}\n{each.message[-_SHOWN:]}\n")


def main(arguments: list[str]) -> int:
    """Run a suite and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:30000")
    parser.add_argument("--model", default="embedded", help="the name of its model")
    parser.add_argument("--key", default="key-of-the-suites", help="an admin key of the server")
    parser.add_argument("--source", type=Path, help="a folder with the suite, as `--fetch` leaves it")
    parser.add_argument("--fetch", type=Path, help="only fetch the suite into this folder")
    parser.add_argument("--show-expected", action="store_true", help="show failures that have a reason as well")
    options = parser.parse_args(arguments)
    suite = suite_of(options.name)
    if options.fetch:
        options.fetch.mkdir(parents=True)
        suite.fetch(options.fetch.resolve())
        return 0
    with folder(suite, options) as source, target(suite, options) as server:
        outcomes = suite.run(source, server)
    verdict = judge(outcomes, expectations(suite.name))
    if options.show_expected:
        show([outcome for found in verdict.expected.values() for outcome in found])
    show(verdict.unexpected)
    for unused in verdict.unused:
        sys.stderr.write(f"no failure has this reason any more: {unused.reason} ({', '.join(unused.tests)})\n")
    print(report(suite, verdict))
    return 1 if verdict.unexpected or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
