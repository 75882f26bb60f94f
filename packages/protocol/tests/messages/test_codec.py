"""Random messages survive the wire; random bytes never raise anything but DecodeError."""

import contextlib
import types
import typing
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.protocol.tests.extents import extents
from tercet.protocol.errors import DecodeError
from tercet.protocol.messages.codec import Codec, Envelope, decode_envelope, encode, encode_envelope, tag_of
from tercet.protocol.messages.full_inbox import FullFrontendInbox, FullSchedulerInbox
from tercet.protocol.messages.messages import (
    BatchTokenIDOutput,
    DetokenizerInbox,
    Heartbeat,
    Message,
    SupervisorInbox,
)
from tercet.protocol.messages.values import Phase, pack_floats, pack_ints, unpack_array, unpack_floats, unpack_ints

INBOXES = [FullFrontendInbox, FullSchedulerInbox, DetokenizerInbox, SupervisorInbox]
CODECS = [Codec(inbox) for inbox in INBOXES]
BEAT = Heartbeat(phase=Phase.IDLE)

LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    types.NoneType: st.none(),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of an annotation that messages use."""
    if hint in LEAVES:
        return LEAVES[hint]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.builds(hint, **{name: values(inner) for name, inner in get_type_hints(hint).items()})
    origin, parts = get_origin(hint), get_args(hint)
    if origin is list:
        return st.lists(values(parts[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(parts[0]), values(parts[1]), max_size=3)
    if origin is tuple and parts[-1] is Ellipsis:
        return st.lists(values(parts[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, parts))
    assert origin in {types.UnionType, typing.Union}, hint
    return st.one_of(*map(values, parts))


@extents(20, 300)
@pytest.mark.parametrize("kind", Message.__subclasses__(), ids=tag_of)
def test_any_message_survives_the_wire_and_is_read_only_where_it_belongs(kind: type[Message], extent: settings) -> None:
    readers = [codec for codec in CODECS if tag_of(kind) in codec.tags]
    assert readers

    @extent
    @given(values(kind))
    def check(message: Message) -> None:
        frame = encode(message)
        for codec in CODECS:
            if codec in readers:
                assert codec.decode(frame) == message
            else:
                with pytest.raises(DecodeError):
                    codec.decode(frame)

    check()


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(lambda tail: encode(BEAT)[:20] + tail)))
def test_random_bytes_are_refused_in_one_way(frame: bytes) -> None:
    for codec in CODECS:
        try:
            codec.decode(frame)
        except DecodeError:
            continue
    with contextlib.suppress(DecodeError):
        decode_envelope(frame)


@given(st.data())
def test_a_damaged_message_is_another_message_or_refused(data: st.DataObject) -> None:
    frame = bytearray(encode(BEAT))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError):
        assert isinstance(CODECS[0].decode(frame), Message)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xa4type\xdb\xff\xff\xff\xff",
        b"\x81\xa4type\xa5\xff\xff\xff\xff\xff",
        encode(BEAT)[:-1],
        encode(BEAT) + b"\x00",
        encode(BEAT).replace(b"\xa4idle", b"\xa4idol"),
        encode(BEAT).replace(b"Heartbeat", b"Heartbeet"),
        encode(BEAT).replace(b"\xa5steps", b"\xa5unkno", 1).replace(b"\xa5unkno", b"\xa5unkno" + b"\x91" * 100_000),
    ],
    ids=[
        "empty",
        "reserved",
        "deep",
        "huge array",
        "huge string",
        "not utf-8",
        "short",
        "long",
        "enum",
        "tag",
        "deep unknown field",
    ],
)
def test_known_kinds_of_garbage_are_refused(frame: bytes) -> None:
    for codec in CODECS:
        with pytest.raises(DecodeError):
            codec.decode(frame)
    with pytest.raises(DecodeError):
        decode_envelope(frame)


def test_an_envelope_names_both_ends() -> None:
    envelope = Envelope(source="frontend-0", incarnation="a" * 16, target="b" * 16)
    assert decode_envelope(encode_envelope(envelope)) == envelope


def test_tags_are_what_an_inbox_reads() -> None:
    assert "BatchTokenIDOutput" in Codec(DetokenizerInbox).tags
    assert "BatchTokenIDOutput" not in Codec(FullFrontendInbox).tags
    assert Codec(Heartbeat).tags == ("Heartbeat",)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ints_are_packed_little_endian(numbers: list[int]) -> None:
    packed = pack_ints(numbers)
    assert list(unpack_ints(packed)) == numbers
    grown = unpack_array(packed)
    grown.append(7)
    assert [*grown] == [*numbers, 7]
    assert packed == b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_floats_are_packed(numbers: list[float]) -> None:
    assert list(unpack_floats(pack_floats(numbers))) == numbers


def test_a_torn_buffer_decodes_and_is_refused_when_read() -> None:
    torn = BatchTokenIDOutput(rids=["a"], indices=b"abc", attempts=b"", positions=b"", offsets=b"", token_ids=b"12345")
    back = Codec(DetokenizerInbox).decode(encode(torn))
    assert isinstance(back, BatchTokenIDOutput)
    with pytest.raises(ValueError, match="3 bytes"):
        unpack_ints(back.indices)
    with pytest.raises(ValueError, match="5 bytes"):
        unpack_floats(back.token_ids)


def test_packed_numbers_stay_in_range() -> None:
    with pytest.raises(OverflowError):
        pack_ints([2**31])
