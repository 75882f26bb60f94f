"""Tiny scheduler and tiny detokenizer that repeat the prompt's ids, one token per step.

With an adapter the ids come in reverse. Every path that begins with a slash is an adapter.

echo.py STEP [--torn], where STEP is the seconds between tokens; --torn truncates the tokenizer. --peer sets the role.
"""

import argparse
import hashlib
import signal
import threading
import time
from collections.abc import Callable

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tercet.protocol.messages.messages import (
    AbortReq,
    BatchStrOutput,
    BatchTokenIDOutput,
    ControlReply,
    DetokenizerInbox,
    FirstRow,
    FirstTextRow,
    Heartbeat,
    LoadLoRAAdapterReq,
    Message,
    Ready,
    SchedulerInbox,
    TokenizedGenerateReqInput,
    TokenizerFiles,
    TokenizerFilesReq,
)
from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    Load,
    ModelIdentity,
    ModelLimits,
    Phase,
    Resume,
    Role,
    pack_ints,
    unpack_ints,
)
from tercet.protocol.node import NodeConfig, ThreadNode
from tercet.protocol.system.process import exit_with_parent, on_signals

WORDS = ["one", "two", "three", "four", "five", "[UNK]"]


def tokenizer_json() -> bytes:
    tokenizer = Tokenizer(WordLevel({word: token_id for token_id, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer.to_str().encode()


class EchoScheduler:
    """Scheduler that runs every choice of every request, one token per step."""

    def __init__(self, node: ThreadNode, frontends: Callable[[str], str]) -> None:
        self._node = node
        self._frontend_of = frontends
        self.running: dict[tuple[str, int], tuple[TokenizedGenerateReqInput, str, int, bool]] = {}

    def handle(self, source: str, message: object) -> None:
        if isinstance(message, TokenizedGenerateReqInput):
            for resume in message.resume or [Resume(index) for index in range(message.sampling.n)]:
                position = len(resume.output_ids) // 4
                self.running[message.rid, resume.index] = (message, source, position, True)
        elif isinstance(message, LoadLoRAAdapterReq):
            found = message.adapter.path.startswith("/")
            reply = ControlReply(
                id=message.id, ok=found, message="" if found else "nothing there", sha256="1" if found else ""
            )
            self._node.send(source, reply)
        elif isinstance(message, AbortReq):
            for rid, index in list(self.running):
                if rid == message.rid and (not message.indices or index in message.indices):
                    del self.running[rid, index]

    def step(self) -> None:
        for (rid, index), (request, frontend, position, first) in list(self.running.items()):
            prompt = unpack_ints(request.input_ids)[:: -1 if request.lora else 1]
            last = position + 1 >= request.sampling.max_new_tokens
            opening = FirstRow(
                row=0, frontend=frontend, decode_spec=request.decode_spec, prompt_tokens=len(prompt), cached_tokens=0
            )
            output = BatchTokenIDOutput(
                rids=[rid],
                indices=pack_ints([index]),
                attempts=pack_ints([request.attempt]),
                positions=pack_ints([position]),
                offsets=pack_ints([0, 1]),
                token_ids=pack_ints([prompt[position % len(prompt)]]),
                openings=[opening] if first else [],
                finishes={0: FinishReason(FinishType.LENGTH)} if last else {},
            )
            if self._node.send(request.detokenizer, output):
                self.running[rid, index] = (request, frontend, position + 1, False)
                if last:
                    del self.running[rid, index]


class EchoDetokenizer:
    """Detokenizer that writes words with a space before each."""

    def __init__(self, node: ThreadNode) -> None:
        self._node = node
        self._frontends: dict[str, str] = {}

    def handle(self, message: object) -> None:
        if not isinstance(message, BatchTokenIDOutput):
            return
        openings = []
        for opening in message.openings:
            self._frontends[message.rids[opening.row]] = opening.frontend
            openings.append(FirstTextRow(row=opening.row, prompt_tokens=opening.prompt_tokens, cached_tokens=0))
        (token_id,) = unpack_ints(message.token_ids)
        text = BatchStrOutput(
            rids=message.rids,
            indices=message.indices,
            attempts=message.attempts,
            positions=message.positions,
            offsets=message.offsets,
            token_ids=message.token_ids,
            texts=[f" {WORDS[token_id]}"],
            openings=openings,
            finishes=message.finishes,
        )
        self._node.send(self._frontends[message.rids[0]], text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", type=float)
    parser.add_argument("--torn", action="store_true")
    for flag in ("--peer", "--listen", "--supervisor", "--log-level", "--log-format"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--parent-fd", type=int, required=True)
    options = parser.parse_args()
    exit_with_parent(options.parent_fd)
    stopped = threading.Event()
    on_signals([signal.SIGTERM], stopped.set)
    is_scheduler = options.peer.startswith("scheduler")
    role = Role.SCHEDULER if is_scheduler else Role.DETOKENIZER
    running: list[object] = []

    def status(_: str) -> Heartbeat:
        return Heartbeat(phase=Phase.IDLE, load=Load(running=len(running)))

    def files(_: str, request: Message) -> tuple[Message, bytes]:
        assert isinstance(request, TokenizerFilesReq)
        content = tokenizer_json()[: -1 if options.torn else None]
        sums = [hashlib.sha256(content).hexdigest()]
        return TokenizerFiles(id=request.id, model="echo", names=["tokenizer.json"], sha256=sums), content

    node = ThreadNode(
        NodeConfig(role, options.peer, options.listen, supervisor=options.supervisor),
        SchedulerInbox if is_scheduler else DetokenizerInbox,
        status,
        answers={TokenizerFilesReq: files} if is_scheduler else {},
    )
    node.start()
    limits = ModelLimits(model="echo", context_length=4096, vocab_size=len(WORDS), max_total_tokens=4096, max_loras=8)
    node.set_ready(Ready(limits=limits, identity=ModelIdentity(weights="w")) if is_scheduler else Ready())
    scheduler, detokenizer = EchoScheduler(node, str), EchoDetokenizer(node)
    due = time.monotonic()
    while not stopped.is_set():
        for delivery in node.drain(0.001 if scheduler.running else 0.05):
            if is_scheduler:
                scheduler.handle(delivery.source, delivery.message)
            else:
                detokenizer.handle(delivery.message)
        if time.monotonic() >= due:
            due = time.monotonic() + options.step
            scheduler.step()
            running[:] = scheduler.running
    node.close("told to")


if __name__ == "__main__":
    main()
