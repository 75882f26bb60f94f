"""Suites of JSON schemas with instances, against the grammars that frontends write for `response_format`.

`python -m tools.suites.json_schema FOLDER` reads a checkout of JSON-Schema-Test-Suite (`tests/draft2020-12`) or of
JSONSchemaBench (`maskbench/data`), and prints how many schemas are taken, which keyword refuses the others, and how
many instances of the schemas that are taken are rejected though valid, or accepted though invalid. `--every N` takes
each Nth file.
"""

import argparse
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tercet.frontend.errors import BadRequestError
from tercet.frontend.json_number import json_text, parse_json
from tercet.frontend.structured_output.json_schema import check_schema, schema_text
from tercet.protocol.grammar_limits import PARSER_LIMITS

SECONDS = 2.0
"""Processor time for a schema, as in a frontend."""
_MOST_BYTES = 100_000
_KEYWORD = re.compile(r"(?:schema keyword|The|Invalid) '(\$?\w+)'|(bounds)|(nested deeper|more than \d+ values)")
_COSTLY = "more than two seconds"


class Case(NamedTuple):
    """Schema with its instances, each with its validity."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


class Verdict(NamedTuple):
    """Reason of a refusal, or the names of instances that were judged wrongly."""

    refusal: str
    rejected: int = 0
    accepted: int = 0
    judged: int = 0


def cases_in(folder: Path, every: int) -> Iterator[Case]:
    """Yield the cases of every Nth file of a folder, in the form of either suite."""
    for file in sorted(folder.glob("*.json"))[::every]:
        data = parse_json(file.read_bytes())
        for place, each in enumerate(data if isinstance(data, list) else [data]):
            tests = [(test["data"], test["valid"]) for test in each.get("tests", ()) if "data" in test]
            yield Case(f"{file.name}[{place}] {each.get('description', '')}", each["schema"], tests)


def judge(case: Case, tokenizer: LLTokenizer) -> Verdict:
    """Compile a schema and try its instances."""
    try:
        check_schema(case.schema, "schema", strict=False)
        text = schema_text(case.schema, "schema")
    except BadRequestError as error:
        found = _KEYWORD.search(error.message)
        return Verdict(next(filter(None, found.groups()), "") if found else error.message[:60])
    limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(text), log_level=0, limits=limits)
    if matcher.is_error():
        return Verdict(f"compiler: {re.split(r'[:;(]', matcher.get_error())[0][:50]}")
    order = _order(case.schema)
    rejected = accepted = judged = 0
    for instance, valid in case.instances:
        data = list(json_text(_ordered(instance, order), ensure_ascii=False).encode())
        if len(data) > _MOST_BYTES:
            continue
        copy = matcher.deep_copy()
        passes = copy.try_consume_tokens(data) == len(data) and copy.is_accepting()
        judged += 1
        rejected += valid and not passes
        accepted += passes and not valid
    return Verdict("", rejected, accepted, judged)


def _order(schema: Any) -> dict[str, int]:
    """Return the names of properties in the order of the schema, in which an answer writes them."""
    names: dict[str, int] = {}
    waiting = [schema]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, dict):
            for name in value.get("properties", {}) if isinstance(value.get("properties"), dict) else ():
                names.setdefault(name, len(names))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return names


def _ordered(value: Any, order: dict[str, int]) -> Any:
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: order.get(name, len(order)))
        return {name: _ordered(value[name], order) for name in names}
    return [_ordered(each, order) for each in value] if isinstance(value, list) else value


def _work(cases: list[Case], pipe: Connection) -> None:
    tokenizer = LLTokenizer("byte")
    for case in cases:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        verdict = judge(case, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(verdict)


def verdicts(cases: list[Case]) -> Iterator[Verdict]:
    """Yield the verdict of each case. A process that ends too early counts against the case it was at."""
    at = 0
    while at < len(cases):
        ours, theirs = Pipe(duplex=False)
        process = Process(target=_work, args=(cases[at:], theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            while at < len(cases):
                yield ours.recv()
                at += 1
        except EOFError:
            yield Verdict(f"compiler: {_COSTLY}")
            at += 1
        process.join()


def main(arguments: list[str]) -> None:
    """Print the table of a suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1, help="take each Nth file only")
    parser.add_argument("--show", action="store_true", help="name the cases that are judged wrongly")
    options = parser.parse_args(arguments)
    cases = list(cases_in(options.folder, options.every))
    reasons: Counter[str] = Counter()
    rejected = accepted = judged = 0
    for case, verdict in zip(cases, verdicts(cases), strict=True):
        reasons[verdict.refusal] += 1
        rejected, accepted, judged = rejected + verdict.rejected, accepted + verdict.accepted, judged + verdict.judged
        if options.show and (verdict.rejected or verdict.accepted):
            wrong = f"rejected {verdict.rejected}, accepted {verdict.accepted}"
            sys.stderr.write(f"{wrong}: {case.name} {json.dumps(case.schema, default=str)[:300]}\n")
    taken = reasons.pop("", 0)
    rows = [("schemas", len(cases)), ("taken", taken), *((f"refused: {name}", n) for name, n in reasons.most_common())]
    rows += [("instances judged", judged), ("valid, rejected", rejected), ("invalid, accepted", accepted)]
    print("| | |\n|---|---:|")
    for name, count in rows:
        print(f"| {name} | {count} |")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main(sys.argv[1:])
