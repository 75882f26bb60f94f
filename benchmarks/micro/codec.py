"""Cost of messages: encoding, decoding, and a round trip between two nodes."""

import tempfile
from collections.abc import Callable
from statistics import median
from time import perf_counter

from tercet.protocol.messages.codec import Codec, encode
from tercet.protocol.messages.messages import (
    AbortReq,
    BatchTokenIDOutput,
    ControlReply,
    DetokenizerInbox,
    FirstRow,
    FlushCacheReq,
    FrontendInbox,
    Heartbeat,
    SchedulerInbox,
    TokenizedGenerateReqInput,
)
from tercet.protocol.messages.values import Phase, Role, SamplingParams, pack_ints, unpack_ints
from tercet.protocol.node import NodeConfig, PeerUp, ThreadNode

Row = tuple[str, float, str, float | None]

BATCH = 256


def _p50(work: Callable[[], object], rounds: int, calls: int) -> float:
    """Return the microseconds of one call: the median over rounds."""
    work()
    times = []
    for _ in range(rounds):
        start = perf_counter()
        for _ in range(calls):
            work()
        times.append((perf_counter() - start) / calls)
    return median(times) * 1e6


def _decode_batch(inbox: Codec, frame: bytes) -> int:
    """Decode a frame and read every buffer, as a detokenizer does."""
    batch = inbox.decode(frame)
    assert isinstance(batch, BatchTokenIDOutput)
    buffers = (batch.indices, batch.attempts, batch.positions, batch.offsets, batch.token_ids)
    return sum(unpack_ints(buffer)[-1] for buffer in buffers)


def batch_of(rows: int, *, openings: bool = False) -> BatchTokenIDOutput:
    """Return a batch with a token for each of `rows` requests, as a decode step sends it."""
    return BatchTokenIDOutput(
        rids=[f"chatcmpl-{row:032x}" for row in range(rows)],
        indices=pack_ints([0] * rows),
        attempts=pack_ints([0] * rows),
        positions=pack_ints(range(100, 100 + rows)),
        offsets=pack_ints(range(rows + 1)),
        token_ids=pack_ints(range(1000, 1000 + rows)),
        openings=[
            FirstRow(row=row, frontend="frontend-0", decode_spec=bytes(60), prompt_tokens=100, cached_tokens=64)
            for row in range(rows)
        ]
        if openings
        else [],
    )


def _round_trip(rounds: int) -> float:
    """Return the median microseconds from one node's main thread to another's and back."""
    with tempfile.TemporaryDirectory(prefix="tercet-") as directory:
        listen = f"ipc://{directory}/run"
        beat = Heartbeat(phase=Phase.IDLE)
        scheduler = ThreadNode(
            NodeConfig(Role.SCHEDULER, "s", listen),
            SchedulerInbox,
            lambda _: beat,
            {FlushCacheReq: lambda *_: (ControlReply(id="x", ok=True),)},
        )
        frontend = ThreadNode(
            NodeConfig(Role.FRONTEND, "f", listen, connect=(f"{listen}/s.*",)), FrontendInbox, lambda _: beat
        )
        scheduler.start()
        frontend.start()
        try:
            while not any(isinstance(delivery.message, PeerUp) for delivery in frontend.drain(5)):
                continue
            return _p50(lambda: _ask(frontend), rounds, 1)
        finally:
            frontend.close()
            scheduler.close()


def _ask(frontend: ThreadNode) -> None:
    assert frontend.send("s", FlushCacheReq(id="x"))
    while not any(isinstance(delivery.message, ControlReply) for delivery in frontend.drain(5)):
        continue


def rows(rounds: int = 200) -> list[Row]:
    """Return (name, measured, unit, target) of each measurement."""
    detokenizer, scheduler = Codec(DetokenizerInbox), Codec(SchedulerInbox)
    batch, opened = batch_of(BATCH), batch_of(BATCH, openings=True)
    request = TokenizedGenerateReqInput(
        rid="chatcmpl-1",
        attempt=0,
        detokenizer="detokenizer-0",
        input_ids=pack_ints(range(1000)),
        sampling=SamplingParams(max_new_tokens=100),
        decode_spec=bytes(60),
    )
    abort = AbortReq(rid="chatcmpl-1")
    frame = encode(batch)
    encoding = _p50(lambda: encode(batch), rounds, 20)
    decoding = _p50(lambda: _decode_batch(detokenizer, frame), rounds, 20)
    return [
        (f"encode {BATCH} one-token rows", encoding, "us", None),
        (f"decode {BATCH} one-token rows", decoding, "us", None),
        (
            f"encode and decode {BATCH} one-token rows",
            _p50(lambda: _decode_batch(detokenizer, encode(batch)), rounds, 20),
            "us",
            30.0,
        ),
        (
            f"the same with {BATCH} openings",
            _p50(lambda: _decode_batch(detokenizer, encode(opened)), rounds, 5),
            "us",
            None,
        ),
        ("a request of 1,000 tokens", _p50(lambda: scheduler.decode(encode(request)), rounds, 50), "us", None),
        ("a small message", _p50(lambda: scheduler.decode(encode(abort)), rounds, 50), "us", None),
        ("a question and its answer between two nodes", _round_trip(5 * rounds), "us", None),
    ]


if __name__ == "__main__":
    for name, measured, unit, target in rows():
        print(f"{name:60} {measured:10.1f} {unit:8} {'' if target is None else f'target {target}'}")
