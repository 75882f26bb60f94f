"""Golden bytes: those of a released wire version never change. Run this file to print the current ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tercet.protocol.messages import messages as m
from tercet.protocol.messages.any_resolution import PaddedSquare
from tercet.protocol.messages.audio import (
    AudioFormat,
    AudioInput,
    SoundFormat,
    SoundInput,
    Transcript,
    TranscriptTokens,
)
from tercet.protocol.messages.codec import Envelope, encode, encode_envelope, tag_of
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.encoder_input import EncoderInput
from tercet.protocol.messages.encodings import EncodedMedia, EncodeMediaReq
from tercet.protocol.messages.internal_state import ChoicePhase, ChoiceRow, PrefixRow
from tercet.protocol.messages.media import ImageFormat, ImageInput, PixelRange, TileTexts
from tercet.protocol.messages.profiles import StartProfileReq, StopProfileReq
from tercet.protocol.messages.values import (
    WIRE_VERSION,
    Exemplar,
    FinishReason,
    FinishType,
    Grammar,
    GrammarKind,
    Held,
    HistogramSample,
    Load,
    LogprobParams,
    Logprobs,
    LoRAAdapter,
    MemoryTag,
    ModelIdentity,
    ModelLimits,
    Phase,
    PrefillChunk,
    Resume,
    Role,
    Sample,
    SamplingParams,
    Task,
    pack_floats,
    pack_ints,
)
from tercet.protocol.messages.video import ClipPixels, FrameSampling, VideoFormat
from tercet.protocol.messages.weight_transfers import (
    DestroyWeightsUpdateGroupReq,
    GetWeightsByNameReq,
    InitWeightsUpdateGroupReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
)

GOLDEN = Path(__file__).parent / "golden"
MINORS = range(WIRE_VERSION[1] + 1)

SOUNDS = SoundFormat(rate=16_000, hop=160, samples=480_000, marker="<sound>", token="<sound>", token_id=31_998)
FORM = EmbeddingForm(width=2048, dtype="bfloat16", tower="abc", sounds=SOUNDS)
LOGPROBS = Logprobs(pack_floats([-0.5, -1.5]), 1, pack_ints([7, 8]), pack_floats([-0.25, -1.0]))
EXEMPLAR = Exemplar(trace_id="4bf92f3577b34da6a3ce929d0e0e4736", value=0.25, at=1764205457.5)
CHUNK = PrefillChunk(at=0.25, tokens=2)
FIRST_TEXT_ROW = m.FirstTextRow(
    row=0, prompt_tokens=3, cached_tokens=2, queue_time=0.25, chunks=[CHUNK], detokenize_seconds=0.5
)
HISTOGRAM = HistogramSample(labels=["demo"], buckets=[3, 0, 1], sum=1.25, exemplars={0: EXEMPLAR})
ROWS: dict[str, Any] = {
    "rids": ["r1", "r2"],
    "indices": pack_ints([0, 1]),
    "attempts": pack_ints([0, 2]),
    "positions": pack_ints([0, 17]),
    "offsets": pack_ints([0, 1, 3]),
    "token_ids": pack_ints([42, 128_000, 1]),
    "finishes": {
        0: FinishReason(FinishType.STOP, "\n\n"),
        1: FinishReason(FinishType.ERROR, None, "the logits were NaN", user_requested=True),
    },
    "logprobs": {1: LOGPROBS},
}

MESSAGES: list[m.Message] = [
    m.Hello(
        peer="frontend-0",
        incarnation="00112233445566ff",
        role=Role.FRONTEND,
        address="ipc:///run/tercet/frontend-0.00112233445566ff.ipc",
        version=(1, 1),
        features=["BatchStrOutput", "Hello"],
        software="tercet-protocol 0.1.0",
        reply=True,
        dialled="tcp://10.0.0.1:30000",
    ),
    m.Introduce(peer="detokenizer-0", role=Role.DETOKENIZER, address="tcp://127.0.0.1:5001"),
    m.Ready(
        limits=ModelLimits(
            model="demo",
            context_length=4096,
            vocab_size=32_000,
            max_total_tokens=100_000,
            eos_token_ids=[2],
            task=Task.CLASSIFY,
            grammars="llguidance 1.9.1",
            width=2,
            labels=["no", "yes"],
            max_loras=8,
            images=ImageFormat(
                size=PixelRange(min_pixels=784, max_pixels=12_845_056),
                patch=28,
                resample=2,
                marker="<image>",
                token="<image>",
                token_id=31_999,
                max_tokens=16_384,
                prefix="<begin>",
                row_break="<break>",
                tiles=TileTexts(tile="<{row}, {column}>", row_break="\n", thumbnail="<whole>"),
                several=PaddedSquare(side=384, background=(127, 127, 127)),
            ),
            audio=AudioFormat(
                rate=16_000,
                samples=480_000,
                tokens=TranscriptTokens(
                    start=3,
                    no_timestamps=4,
                    first_timestamp=5,
                    timestamp_seconds=0.02,
                    previous=6,
                    transcribe=7,
                    translate=8,
                    languages={"en": 9},
                ),
            ),
            sounds=SOUNDS,
            embeddings=FORM,
            video=VideoFormat(
                frames=2,
                sampling=FrameSampling(per_second=2.0, min_frames=4, max_frames=768, to_last=True),
                size=ClipPixels(min_pixels=4096, max_pixels=25_165_824, frame_pixels=786_432),
                patch=32,
                resample=3,
                marker="<video>",
                token="<video>",
                token_id=31_997,
                max_tokens=768,
                stamp="<{seconds:.1f} seconds>",
                prefix="<begin>",
                suffix="<end>",
                positions_per_second=2.0,
            ),
            encoder=EncoderInput(tokens=1024, start=[2, 0]),
        ),
        identity=ModelIdentity(
            weights="abc", files={"tokenizer.json": "0f" * 32}, path="/models/demo", weights_path="/ckpt/7"
        ),
        url="http://127.0.0.1:8000",
        software="tercet-scheduler 0.1.0",
        encoder=FORM,
    ),
    m.Progress(text="loading weights", done=3, total=4),
    m.Heartbeat(
        phase=Phase.STEP,
        steps=12,
        step_age=0.5,
        longest_step=1.25,
        step_seconds=6.5,
        load=Load(queued=1, running=2, pages_total=100, pages_free=40, page_size=16, updating=True, drafted_tokens=7),
        held=Held(rids=["r1"], indices=pack_ints([0]), attempts=pack_ints([1]), positions=pack_ints([9])),
    ),
    m.Goodbye(reason="the server stops"),
    m.TokenizedGenerateReqInput(
        rid="r1",
        attempt=1,
        detokenizer="detokenizer-0",
        input_ids=pack_ints([1, 2, 3]),
        sampling=SamplingParams(
            max_new_tokens=16,
            seed=2**64 - 1,
            stop_token_ids=[2],
            logit_bias={5: -1.5},
            grammar=Grammar(GrammarKind.REGEX, "[0-9]+"),
        ),
        decode_spec=b"\x80",
        logprobs=LogprobParams(top=2, prompt=True),
        resume=[Resume(0, pack_ints([4]))],
        priority=-1,
        cache_salt="tenant",
        exclusive=True,
        deferred=True,
        lora=LoRAAdapter("/adapters/sql", "0f" * 32),
        prediction=pack_ints([42, 128_000]),
        tenant="00ff" * 8,
        traced=True,
        images=[
            ImageInput(sha256=b"\x0f" * 32, height=28, width=56, first=1, tokens=2, original=(61, 47)),
            ImageInput(sha256=b"\x0e" * 32, height=28, width=28, first=4, tokens=1, frames=2, clip=3, time=2),
        ],
        audio=AudioInput(sha256=b"\xf0" * 32, transcript=Transcript.TIMESTAMPS),
        sounds=[SoundInput(sha256=b"\x0f" * 32, samples=640, first=1, tokens=1)],
        embedded=True,
        encoder_ids=pack_ints([4, 5]),
    ),
    m.TokenizedEmbeddingReqInput(
        rid="r2",
        attempt=1,
        input_ids=pack_ints([1, 2]),
        token_types=pack_ints([0, 1]),
        priority=1,
        exclusive=True,
        deferred=True,
        tenant="00ff" * 8,
    ),
    EncodeMediaReq(
        rid="r3",
        attempt=1,
        image=ImageInput(sha256=b"\x0f" * 32, height=28, width=56, first=1, tokens=2),
        sound=SoundInput(sha256=b"\x0f" * 32, samples=640, first=1, tokens=1),
        cache_salt="tenant",
        priority=-1,
        exclusive=True,
        deferred=True,
        tenant="00ff" * 8,
    ),
    EncodedMedia(
        rid="r3", attempt=1, finish=FinishReason(FinishType.ERROR, None, "the image is too large"), queue_time=0.25
    ),
    m.AbortReq(rid="r1", indices=[1], reason="the client left", user_requested=True),
    m.FlushCacheReq(id="c1"),
    m.PauseGenerationReq(id="c2"),
    m.ContinueGenerationReq(id="c3"),
    m.UpdateWeightsFromDiskReq(id="c7", path="/ckpt/7"),
    m.ReleaseMemoryReq(id="c8", tags=[MemoryTag.WEIGHTS, MemoryTag.KV_CACHE]),
    m.ResumeMemoryReq(id="c9", tags=[MemoryTag.WEIGHTS]),
    UpdateWeightsFromTensorReq(id="c10", part=1, last=True),
    InitWeightsUpdateGroupReq(
        id="c11",
        group="trainer",
        address="10.0.0.1",
        port=29_500,
        world_size=3,
        ranks={"scheduler-0": 1, "scheduler-1": 2},
        backend="gloo",
    ),
    DestroyWeightsUpdateGroupReq(id="c12", group="trainer"),
    UpdateWeightsFromDistributedReq(
        id="c13", part=0, last=False, group="trainer", names=["lm_head.weight"], dtypes=["bfloat16"], shapes=[[400, 64]]
    ),
    GetWeightsByNameReq(id="c14", name="lm_head.weight", rows=100),
    StartProfileReq(id="c15", name="slow", steps=30, cpu=True, gpu=False, stacks=True, shapes=False),
    StopProfileReq(id="c16"),
    m.LoadLoRAAdapterReq(id="c5", adapter=LoRAAdapter("/adapters/sql")),
    m.UnloadLoRAAdapterReq(id="c6", adapter=LoRAAdapter("/adapters/sql", "0f" * 32)),
    m.TokenizerFilesReq(id="c4"),
    m.GetInternalStateReq(id="s1"),
    m.InternalState(
        id="s1",
        load=Load(queued=1, running=1, pages_total=100, pages_free=40, page_size=16),
        choices=[
            ChoiceRow(
                frontend="frontend-0",
                rid="r1",
                index=1,
                attempt=2,
                tenant="00ff" * 8,
                phase=ChoicePhase.DECODE,
                age=1.5,
                prompt_tokens=40,
                cached_tokens=16,
                computed_tokens=44,
                output_tokens=5,
                max_new_tokens=128,
                pages=3,
                shared_pages=2,
                constrained=True,
                lora=True,
            )
        ],
        prefixes=[PrefixRow(parent=-1, pages=2, users=1, children=3), PrefixRow(parent=0, pages=7)],
    ),
    m.Rejected(rid="r1", attempt=0, code="rate_limit_exceeded", message="the queue is full", retry=True),
    m.ExclusiveReady(rid="r1", attempt=2),
    m.ControlReply(id="c1", ok=False, message="busy", sha256="0f" * 32),
    m.TokenizerFiles(id="c4", model="demo", names=["tokenizer.json"], sha256=["0f" * 32]),
    m.BatchEmbeddingOutput(
        rids=["r2"],
        attempts=pack_ints([1]),
        width=384,
        finishes={0: FinishReason(FinishType.ERROR, None, "the vector was not finite")},
        queue_times=pack_floats([0.25]),
    ),
    m.BatchTokenIDOutput(
        openings=[
            m.FirstRow(
                row=0,
                frontend="frontend-0",
                decode_spec=b"\x80",
                prompt_tokens=3,
                cached_tokens=2,
                queue_time=0.25,
                chunks=[CHUNK],
            ),
            m.FirstRow(
                row=1, frontend="f", decode_spec=b"", prompt_tokens=1, cached_tokens=0, prompt_logprobs=LOGPROBS
            ),
        ],
        **ROWS,
    ),
    m.BatchStrOutput(
        texts=["é", ""], openings=[FIRST_TEXT_ROW], **ROWS
    ),
    m.MetricsReq(id="s1"),
    m.Series(
        id="s1",
        samples={"requests_open": [Sample(value=2.0)], "requests": [Sample(labels=["finished"], value=7.0)]},
        histograms={"queue_seconds": [HISTOGRAM]},
    ),
]  # fmt: skip

DECODE_SPEC = m.DecodeSpec(
    stop=["\n\n"],
    prompt_tail=pack_ints([3]),
    resume=[Resume(1, b"")],
    tokenizer="0f",
    min_tokens=3,
    stops_in_special_tokens=False,
    chars_sent={1: 5},
)
ENVELOPE = Envelope(source="frontend-0", incarnation="00112233445566ff", target="ffeeddccbbaa9988")


def encoded() -> Iterator[tuple[str, msgspec.Struct, bytes]]:
    for message in MESSAGES:
        yield tag_of(type(message)), message, encode(message)
    yield "DecodeSpec", DECODE_SPEC, msgspec.msgpack.encode(DECODE_SPEC)
    yield "Envelope", ENVELOPE, encode_envelope(ENVELOPE)


def golden(minor: int = WIRE_VERSION[1]) -> dict[str, bytes]:
    text = (GOLDEN / f"wire-1.{minor}.txt").read_text()
    lines = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return {name: bytes.fromhex(data) for name, data in lines}


def within(older: Any, newer: Any) -> bool:
    """Return whether a newer message contains everything that an older one does."""
    if isinstance(older, dict) and isinstance(newer, dict):
        return all(key in newer and within(value, newer[key]) for key, value in older.items())
    if isinstance(older, list) and isinstance(newer, list):
        return len(older) == len(newer) and all(map(within, older, newer))
    return bool(older == newer)


CASES = [pytest.param(name, value, frame, id=name) for name, value, frame in encoded()]


def test_every_message_type_has_golden_bytes() -> None:
    kinds = {tag_of(kind) for kind in m.Message.__subclasses__()}
    assert set(golden()) == kinds | {"DecodeSpec", "Envelope"}
    assert {path.name for path in GOLDEN.iterdir()} == {f"wire-1.{minor}.txt" for minor in MINORS}


@pytest.mark.parametrize("minor", MINORS[:-1])
def test_every_older_minor_is_still_read(minor: int) -> None:
    now = {name: (value, frame) for name, value, frame in encoded()}
    for name, frame in golden(minor).items():
        value, newer = now[name]
        older = msgspec.msgpack.decode(frame)
        if name != "Hello":  # Hello contains its own version
            assert within(older, msgspec.msgpack.decode(newer)), name
        read = msgspec.msgpack.decode(frame, type=type(value))
        assert within(older, msgspec.msgpack.decode(msgspec.msgpack.encode(read))), name


@pytest.mark.parametrize(("name", "value", "frame"), CASES)
def test_bytes_are_golden_both_ways(name: str, value: msgspec.Struct, frame: bytes) -> None:
    assert frame.hex() == golden()[name].hex()
    assert msgspec.msgpack.decode(golden()[name], type=type(value)) == value


@pytest.mark.parametrize(("name", "value", "frame"), CASES)
def test_a_newer_minor_may_add_fields(name: str, value: msgspec.Struct, frame: bytes) -> None:
    fields = msgspec.msgpack.decode(golden()[name])
    newer = msgspec.msgpack.encode(fields | {"added_later": {"any": [1, None]}})
    assert msgspec.msgpack.decode(newer, type=type(value)) == value


@pytest.mark.parametrize(("name", "value", "frame"), CASES)
def test_an_older_minor_may_lack_what_has_a_default(name: str, value: msgspec.Struct, frame: bytes) -> None:
    fields = msgspec.msgpack.decode(golden()[name])
    for info in msgspec.structs.fields(type(value)):
        older = msgspec.msgpack.encode({key: field for key, field in fields.items() if key != info.encode_name})
        if info.required:
            with pytest.raises(msgspec.ValidationError, match=info.encode_name):
                msgspec.msgpack.decode(older, type=type(value))
            continue
        default = info.default_factory() if info.default is msgspec.NODEFAULT else info.default
        assert msgspec.msgpack.decode(older, type=type(value)) == msgspec.structs.replace(value, **{info.name: default})


if __name__ == "__main__":
    print("\n".join(f"{name} {frame.hex()}" for name, _, frame in encoded()))  # noqa: T201
