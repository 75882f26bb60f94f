"""Outputs that follow grammars, from a model of random weights: valid or cut off by length, however they are made."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from packages.scheduler.tests.failing_backend import FailingBackend
from tercet.kernels.native.library import missing_library
from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    Grammar,
    GrammarKind,
    LogprobParams,
    Resume,
    pack_ints,
)
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.executor.sampling.slot_grammars import FAILED
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.grammar.backends import BACKENDS
from tercet.scheduler.models.registry import load_config
from tercet.scheduler.testing import Driver, request

Serve = Callable[..., "Server"]
Check = Callable[[str], bool]

PAGE_SIZE = 8
PROMPT = [17, 42, 99, 7, 260]
STOP = FinishReason(FinishType.STOP)
LENGTH = FinishReason(FinishType.LENGTH)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"enum": ["crimson", "violet"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LIST = {
    "type": "array",
    "items": {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": {"deep": [1, 2]}}]},
    "minItems": 1,
    "maxItems": 4,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}},
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SUM = """
start: term ("+" term){1,3}
term: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]{0,2}/
"""


def is_person(text: str) -> bool:
    value = json.loads(text)
    name, age, colour = value.pop("name"), value.pop("age"), value.pop("colour")
    return not value and len(name) <= 6 and type(age) is int and 0 <= age <= 150 and colour in {"crimson", "violet"}


def is_list(text: str) -> bool:
    value = json.loads(text)
    return 1 <= len(value) <= 4 and all(item in (True, False, None, {"deep": [1, 2]}) for item in value)


def is_tree(text: str) -> bool:
    node = json.loads(text)
    while node is not None:
        if type(node.pop("value")) is not int:
            return False
        node, rest = node.pop("left", None), node
        if rest:
            return False
    return True


def is_sum(text: str) -> bool:
    def closed(text: str) -> str:
        return re.sub(r"\((\d+(\+\d+)+)\)", "7", text)

    while (shorter := closed(text)) != text:
        text = shorter
    return re.fullmatch(r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}", text) is not None


def schema(value: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern)


DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
CASES: dict[str, tuple[Grammar, Check]] = {
    "person": (schema(PERSON), is_person),
    "list": (schema(LIST), is_list),
    "tree": (schema(TREE), is_tree),
    "date": (regex(DATE), lambda text: re.fullmatch(DATE, text) is not None),
    "phrase": (regex("the quick brown fox( jumps)*!"), lambda text: bool(re.fullmatch(r"the quick .* ?fox.*!", text))),
    "sum": (Grammar(GrammarKind.LARK, SUM), is_sum),
}
cases = pytest.mark.parametrize("case", CASES)
FAILING = regex("[a-z0-9]{12,40}")
PERSON_GRAMMAR = CASES["person"][0]


class Server(Driver):
    """The core over a worker of random weights. Its page size, and so its batches, are a test's own choice."""

    def __init__(
        self,
        directory: Path,
        *,
        backend: str = "torch_native",
        pages: int = 400,
        overlap: int = 0,
        fast_forward: bool = True,
        **config: Any,
    ) -> None:
        shape = load_config(directory)
        page = 2 * PAGE_SIZE * shape.kv_heads * shape.head_dim * 4 * shape.layers  # float32 keys and values
        options = WorkerOptions(
            model=directory,
            device="cpu",
            page_size=PAGE_SIZE,
            slots=8,
            kv_cache_bytes=pages * page,
            attention_backend=backend,
            overlap=overlap > 0,
            fast_forward=fast_forward,
        )
        worker = TpModelWorker(options)
        super().__init__(worker.capacity, CoreConfig(**config), overlap=overlap, executor=worker)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def ask(self, rid: str, grammar: Grammar | None, prompt: list[int] = PROMPT, **more: Any) -> None:
        options = {"max_new_tokens": 90, "temperature": 0.0, "seed": 11, **more}
        self.send(request(rid, prompt, grammar=grammar, **options))

    def text(self, rid: str, choice: int = 0) -> str:
        text: str = self.tokenizer.decode(self.output[rid, choice], skip_special_tokens=False)
        return text

    def assert_valid(self, rid: str, case: str, choice: int = 0) -> None:
        """An instance that ended by itself, or something else that did not."""
        finish = self.finishes[rid, choice]
        assert finish in (STOP, LENGTH) or finish == FinishReason(FinishType.STOP, 0), finish
        if finish == LENGTH:
            return
        text = self.text(rid, choice).removesuffix("<|end|>")
        assert CASES[case][1](text), f"{text!r} is no {case}"


@pytest.fixture(params=["torch_native", "cpu"])
def serve(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> Iterator[Serve]:
    """Starts a server, on plain torch and on native kernels. In the end all must be empty."""
    if request.param == "cpu" and missing_library():
        pytest.skip(missing_library())
    servers: list[Server] = []

    def start(**options: Any) -> Server:
        servers.append(Server(checkpoints("llama"), backend=request.param, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.executor.close()
        server.assert_empty()


@cases
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_choice_is_valid(case: str, temperature: float, serve: Serve) -> None:
    server = serve()
    for seed in range(3):
        server.ask(f"r{seed}", CASES[case][0], n=3, temperature=temperature, seed=seed)
    server.run()
    for seed in range(3):
        for choice in range(3):
            server.assert_valid(f"r{seed}", case, choice)
    ended = sum(finish.type == FinishType.STOP for finish in server.finishes.values())
    assert ended >= (2 if temperature else 0)
    assert server.core.counters.forks >= 3


def plain(server: Server, count: int = 3) -> None:
    """Company without a grammar."""
    for number in range(count):
        server.ask(f"plain{number}", None, [number + 3, *PROMPT], ignore_eos=True, temperature=float(number % 2))


def outputs(server: Server) -> dict[tuple[str, int], list[int]]:
    return dict(server.output)


@pytest.fixture(scope="module")
def known() -> dict[str, dict[tuple[str, int], list[int]]]:
    """Return what requests give alone, by backend."""
    return {}


@pytest.fixture
def alone(
    serve: Serve, request: pytest.FixtureRequest, known: dict[str, dict[tuple[str, int], list[int]]]
) -> dict[tuple[str, int], list[int]]:
    """Return what all requests give with whole prompts at a time and a step for every token."""
    backend = request.node.callspec.params["serve"]
    if backend not in known:
        server = serve(fast_forward=False, token_budget=512)
        ask_everything(server)
        server.run()
        assert server.core.counters.forced_tokens == 0
        known[backend] = outputs(server)
    return known[backend]


def ask_everything(server: Server) -> None:
    for number, (grammar, _) in enumerate(CASES.values()):
        prompt = [*PROMPT, *range(20, 20 + 9 * number)]
        server.ask(f"r{number}", grammar, prompt, n=1 + number % 2, temperature=0.7, frequency_penalty=20.0)
    plain(server)


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("pages", [400, 24])
def test_output_is_independent_of_batching_chunks_overlap_and_retraction(
    overlap: int, pages: int, serve: Serve, alone: dict[tuple[str, int], list[int]]
) -> None:
    server = serve(overlap=overlap, pages=pages, token_budget=11, reserve=0.0, reserve_floor=0.0)
    ask_everything(server)
    server.run()
    counters = server.core.counters
    assert outputs(server) == alone
    assert (counters.retractions > 0) == (pages < 100)
    assert counters.forced_tokens > 30
    assert counters.chunks > 10
    for number, case in enumerate(CASES):
        for choice in range(1 + number % 2):
            server.assert_valid(f"r{number}", case, choice)


@pytest.mark.parametrize("case", ["person", "phrase", "sum"])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_resumed_at_any_position_it_goes_on_as_if_unbroken(case: str, fast_forward: bool, serve: Serve) -> None:
    grammar = CASES[case][0]
    unbroken = serve()
    unbroken.ask("a", grammar, temperature=0.9, max_new_tokens=40)
    unbroken.run()
    whole, finish = unbroken.output["a", 0], unbroken.finishes["a", 0]
    server = serve(fast_forward=fast_forward)
    for position in range(len(whole)):
        known = pack_ints(whole[:position])
        server.output[f"r{position}", 0] = whole[:position]
        more: dict[str, Any] = {"attempt": 1, "resume": [Resume(0, known)]}
        server.ask(f"r{position}", grammar, temperature=0.9, max_new_tokens=40, **more)
    server.run()
    for position in range(len(whole)):
        assert server.output[f"r{position}", 0] == whole, position
        assert server.finishes[f"r{position}", 0] == finish


def test_a_lost_end_is_found_again(serve: Serve) -> None:
    """The last token arrived and the final answer did not."""
    server = serve()
    whole = server.tokenizer.encode("2024-01-31").ids
    options: dict[str, dict[str, Any]] = {"a": {}, "b": {"ignore_eos": True, "min_new_tokens": 60}}
    for rid, more in options.items():
        server.output[rid, 0] = whole
        server.ask(rid, CASES["date"][0], attempt=1, resume=[Resume(0, pack_ints(whole))], **more)
    server.run()
    assert server.finishes == {("a", 0): STOP, ("b", 0): STOP}
    assert server.output == {("a", 0): whole, ("b", 0): whole}


def test_what_a_grammar_cannot_do_ends_one_request_with_an_error(serve: Serve, caplog: Any) -> None:
    alone = serve()
    plain(alone)
    alone.run()
    server = serve()
    secret = "(secret"
    server.ask("broken", regex(secret))
    server.ask("unclosed", Grammar(GrammarKind.JSON_SCHEMA, "{"))
    server.ask("unknown", Grammar(GrammarKind.LARK, "start: missing"))
    output = server.tokenizer.encode("The fox").ids
    server.output["strange", 0] = output
    server.ask("strange", CASES["date"][0], attempt=1, resume=[Resume(0, pack_ints(output))])
    server.ask("fine", CASES["date"][0])
    plain(server)
    with caplog.at_level("INFO"):
        server.run()
    failed = FinishReason(FinishType.ERROR, message=FAILED, code="invalid_grammar")
    assert [server.finishes[rid, 0] for rid in ("broken", "unclosed", "unknown", "strange")] == [failed] * 4
    assert server.output["strange", 0] == output
    server.assert_valid("fine", "date")
    assert all(server.output[key] == given for key, given in alone.output.items())
    assert caplog.text.count("grammar failed") == 4
    assert secret not in caplog.text


@pytest.mark.parametrize("where", ["compile", "copy", "fill", "advance", "forced", "error"])
def test_a_backend_that_raises_ends_one_request(where: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first step or later, while others with and without grammars go on as if it were not there."""
    made = BACKENDS["llguidance"]
    monkeypatch.setitem(BACKENDS, "llguidance", lambda *given: FailingBackend(made(*given), where, FAILING.text))
    alone = serve()
    plain(alone)
    alone.run()
    server = serve()
    server.ask("bomb", FAILING)
    server.ask("fine", CASES["date"][0])
    plain(server)
    server.run()
    assert server.finishes["bomb", 0] == FinishReason(FinishType.ERROR, message=FAILED, code="invalid_grammar")
    assert server.finishes["fine", 0] == STOP
    server.assert_valid("fine", "date")
    assert all(server.output[key] == given for key, given in alone.output.items())


def test_end_tokens_come_only_where_the_grammar_accepts(serve: Serve) -> None:
    server = serve()
    likely: dict[str, Any] = {"logit_bias": {0: 1000.0}}  # the end token
    server.ask("may", regex("a{3,50}"), **likely)
    server.ask("must not", regex("a{3,50}"), ignore_eos=True, max_new_tokens=12, **likely)
    server.ask("not yet", regex("a{3,50}"), min_new_tokens=5, **likely)
    server.ask("cannot wait", regex("a{3}"), min_new_tokens=50, **likely)
    server.run()
    assert server.text("may") == "aaa<|end|>"
    assert server.finishes["may", 0] == FinishReason(FinishType.STOP, 0)
    assert set(server.text("must not")) == {"a"}
    assert server.finishes["must not", 0] == LENGTH
    assert server.output["not yet", 0][-1] == 0
    assert len(server.output["not yet", 0]) >= 5
    assert server.text("cannot wait") == "aaa"
    assert server.finishes["cannot wait", 0] == STOP


def test_stop_ids_end_an_output_that_its_grammar_would_go_on_with(serve: Serve) -> None:
    server = serve()
    comma = server.tokenizer.encode(",").ids[0]
    server.ask("stops", regex("xyz,!?[a-z]{20}"), stop_token_ids=[comma])
    server.ask("must not stop", regex("xyz,{6}q"), stop_token_ids=[comma], min_new_tokens=30)
    server.run()
    assert server.text("stops") == "xyz,"
    assert server.finishes["stops", 0] == FinishReason(FinishType.STOP, comma)
    assert server.text("must not stop") == "xyz,,,,,,q"


def test_log_probabilities_are_of_the_raw_logits_and_come_one_a_token(serve: Serve) -> None:
    server = serve()
    for rid, wanted in (("told", LogprobParams(top=2)), ("untold", None)):
        server.ask(rid, PERSON_GRAMMAR, logprobs=wanted, temperature=0.8)
    server.run()
    assert server.output["told", 0] == server.output["untold", 0]
    told = server.logprobs["told", 0]
    assert [*told] == list(range(len(server.output["told", 0])))
    assert min(told.values()) < -2  # nobody would have said so
    assert server.core.counters.forced_tokens > 0


def test_a_model_without_a_tokenizer_reads_no_grammars(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoints("llama")
    with_tokenizer = WorkerOptions(model=directory, device="cpu", slots=1, attention_backend="torch_native")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(directory / name)
    for options, expected in (
        (with_tokenizer, f"llguidance {version('llguidance')}"),
        (replace(with_tokenizer, grammar_backend="none"), ""),
        (replace(with_tokenizer, model=tmp_path), ""),
    ):
        worker = TpModelWorker(options)
        assert worker.capacity.grammars == expected
        worker.close()
