"""Manager of the detokenizer: rows of a scheduler in, rows of text out."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from packages.detokenizer.tests.script import Row, Script, batch
from tercet.detokenizer.vocabulary import Vocabulary
from tercet.protocol.messages.messages import DecodeSpec, FirstTextRow
from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    Logprobs,
    PrefillChunk,
    Resume,
    pack_floats,
    pack_ints,
    unpack_ints,
)

LENGTH = FinishReason(FinishType.LENGTH)


@pytest.fixture
def script(byte_level: Vocabulary) -> Script:
    return Script(byte_level)


FRESH = DecodeSpec(tokenizer="sha")


def test_tokens_become_text_with_everything_that_came_with_them(script: Script) -> None:
    logprobs = Logprobs(pack_floats([-0.5]))
    [row] = script.send(Row("r", script.ids("a"), spec=FRESH, logprobs=logprobs))
    assert (row, row.text) == (Row("r", script.ids("a"), logprobs=logprobs), "a")
    [row] = script.send(Row("r", script.ids("bc"), 1, finish=LENGTH))
    assert (row, row.text) == (Row("r", script.ids("bc"), 1, finish=LENGTH), "bc")
    assert len(script.manager) == 0


def test_the_time_for_a_batch_comes_with_the_chunks_of_a_traced_request(script: Script) -> None:
    output = batch([Row("1", script.ids("a"), spec=FRESH), Row("2", script.ids("b"), spec=FRESH)])
    chunks = [PrefillChunk(at=0.5, tokens=7)]
    first, second = output.openings
    traced = structs.replace(output, openings=[structs.replace(first, chunks=chunks), second])
    [(_, text)] = script.manager.handle(traced)
    assert [each.chunks for each in text.openings] == [chunks, []]
    assert 0 < text.openings[0].detokenize_seconds < 10
    assert text.openings[1].detokenize_seconds == 0


def test_each_frontend_gets_its_own_rows_and_openings(script: Script) -> None:
    a, b, c = (script.ids(char) for char in "abc")
    output = batch(
        [Row("1", a, spec=FRESH, frontend="f"), Row("2", b, spec=FRESH, frontend="g"), Row("3", c, spec=FRESH)]
    )
    outputs = dict(script.manager.handle(output))
    assert {peer: out.texts for peer, out in outputs.items()} == {"f": ["a", "c"], "g": ["b"]}
    assert outputs["f"].openings == [
        FirstTextRow(row=0, prompt_tokens=7, cached_tokens=0, queue_time=0.0),
        FirstTextRow(row=1, prompt_tokens=7, cached_tokens=2, queue_time=0.5),
    ]
    assert outputs["g"].openings == [FirstTextRow(row=0, prompt_tokens=7, cached_tokens=1, queue_time=0.25)]
    later = script.send(Row("1", a, 1), Row("2", b, 1, finish=LENGTH), Row("3", c, 1))
    assert [(row.frontend, row.rid, row.finish) for row in later] == [
        ("f", "1", None),
        ("f", "3", None),
        ("g", "2", LENGTH),
    ]


def test_choices_of_one_request_do_not_mix(script: Script) -> None:
    script.send(Row("r", script.ids("a"), spec=FRESH), Row("r", script.ids("x"), index=1, spec=FRESH))
    rows = script.send(Row("r", script.ids("y"), 1, index=1, finish=LENGTH), Row("r", script.ids("b"), 1))
    assert [(row.index, row.text, row.finish) for row in rows] == [(1, "y", LENGTH), (0, "b", None)]


def test_stop_string_trims_text_ids_and_logprobs_at_its_last_token(script: Script) -> None:
    spec = DecodeSpec(stop=["cd"], tokenizer="sha")
    logprobs = Logprobs(pack_floats([1, 2, 3, 4]), 1, pack_ints([1, 2, 3, 4]), pack_floats([5, 6, 7, 8]))
    assert script.texts(Row("r", script.ids("abc"), spec=spec)) == ["ab"]
    [row] = script.send(Row("r", script.ids("dxyz"), 3, finish=LENGTH, logprobs=logprobs))
    first = Logprobs(pack_floats([1]), 1, pack_ints([1]), pack_floats([5]))
    assert row == Row("r", script.ids("d"), 3, finish=FinishReason(FinishType.STOP, "cd"), logprobs=first)
    assert row.text == ""
    assert script.send(Row("r", script.ids("z"), 7)) == []
    assert script.manager.counters["dropped_unknown"] == 1


def test_a_stop_string_is_found_in_steps_of_one_token(script: Script) -> None:
    spec = DecodeSpec(stop=["<end>", "ex"], tokenizer="sha")
    shown = script.texts(Row("r", script.ids("a"), spec=spec))
    for position, char in enumerate("b<e<en", 1):
        shown += script.texts(Row("r", script.ids(char), position))
    assert shown == ["a", "b", "", "", "<e", "", ""]
    assert script.texts(Row("r", script.ids("d"), 7)) == [""]
    [row] = script.send(Row("r", script.ids(">"), 8))
    assert (row.text, row.finish) == ("", FinishReason(FinishType.STOP, "<end>"))


def test_an_included_stop_string_stays_in_the_text(script: Script) -> None:
    spec = DecodeSpec(stop=["cd"], include_stop=True, tokenizer="sha")
    [row] = script.send(Row("r", script.ids("abcdef"), spec=spec))
    assert (row.text, list(row.ids)) == ("abcd", script.ids("abcd"))


def test_no_stop_string_ends_the_text_before_min_tokens(script: Script) -> None:
    spec = DecodeSpec(stop=["b", "cd"], min_tokens=4, tokenizer="sha")
    stopped = FinishReason(FinishType.STOP, "cd")
    [row] = script.send(Row("whole", script.ids("abcdbef"), spec=spec))
    assert (row.text, list(row.ids), row.finish) == ("ab", script.ids("abcd"), stopped)
    shown = script.texts(Row("steps", script.ids("a"), spec=spec))
    for position, char in enumerate("bb", 1):
        shown += script.texts(Row("steps", script.ids(char), position))
    assert "".join(shown) == "ab", "the last b may yet be held back"
    [row] = script.send(Row("steps", script.ids("xb"), 3))
    assert (row.text, list(row.ids)) == ("bx", script.ids("xb"))
    assert row.finish == FinishReason(FinishType.STOP, "b")


@pytest.mark.parametrize("size", [1, 8])
def test_stop_strings_do_not_match_in_or_across_skipped_special_tokens(
    script: Script, byte_level: Vocabulary, size: int
) -> None:
    special = byte_level.tokenizer.token_to_id("<|im_end|>")
    assert special is not None
    ids = [*script.ids("ca"), special, *script.ids("b ab")]
    for apart, text, count in ((True, "ca<|im_end|>b ", 7), (False, "ca<|", 3)):
        spec = DecodeSpec(
            stop=["ab", "im"], skip_special_tokens=False, stops_in_special_tokens=not apart, tokenizer="sha"
        )
        rows, rid = list[Row](), f"apart {apart}"
        for at in range(0, count, size):
            rows += script.send(Row(rid, ids[at : at + size], at, spec=None if at else spec))
        assert ("".join(row.text for row in rows), sum(len(row.ids) for row in rows)) == (text, count)
        assert rows[-1].finish == FinishReason(FinishType.STOP, "ab" if apart else "im")


def test_a_resumed_choice_counts_its_earlier_tokens_towards_min_tokens(script: Script) -> None:
    resume = [Resume(0, pack_ints(script.ids("ab")))]
    spec = DecodeSpec(stop=["b"], min_tokens=4, tokenizer="sha", resume=resume, chars_sent={0: 1})
    [row] = script.send(Row("r", script.ids("bbb"), 2, attempt=1, spec=spec))
    assert (row.text, list(row.ids)) == ("bb", script.ids("bb"))
    assert row.finish == FinishReason(FinishType.STOP, "b")


def test_text_held_for_a_stop_string_comes_with_the_finish(script: Script) -> None:
    spec = DecodeSpec(stop=["<end>"], tokenizer="sha")
    assert script.texts(Row("r", script.ids("a<en"), spec=spec)) == ["a"]
    assert script.texts(Row("r", [], 4, finish=LENGTH)) == ["<en"]


def test_a_stop_token_is_not_shown_unless_stops_are_included(script: Script) -> None:
    [z] = script.ids("z")
    finish = FinishReason(FinishType.STOP, z)
    [row] = script.send(Row("r", script.ids("az"), spec=FRESH, finish=finish))
    assert (row.text, list(row.ids), row.finish) == ("a", script.ids("az"), finish)
    spec = DecodeSpec(include_stop=True, tokenizer="sha")
    assert script.texts(Row("r", script.ids("az"), spec=spec, finish=finish)) == ["az"]


def test_an_unfinished_character_waits_and_comes_out_at_the_end(script: Script, byte_level: Vocabulary) -> None:
    token = byte_level.tokenizer.token_to_id("ä")
    assert token is not None
    assert script.texts(Row("r", [token], spec=FRESH)) == [""]
    assert script.texts(Row("r", [], 1, finish=LENGTH)) == ["\ufffd"]


def test_rows_that_do_not_fit_are_dropped_and_counted(script: Script) -> None:
    a = script.ids("a")
    script.send(Row("r", a, spec=FRESH, attempt=1))
    assert script.send(Row("r", a, 0, attempt=1)) == []
    assert script.send(Row("r", a, 2, attempt=1)) == []
    assert script.send(Row("r", a, 1, attempt=0)) == []
    assert script.send(Row("r", a, 1, attempt=2)) == []
    assert script.send(Row("r", a, 1, index=1, attempt=1)) == []
    assert script.send(Row("x", a, 1)) == []
    assert script.texts(Row("r", a, 1, attempt=1)) == ["a"]
    dropped = {name: count for name, count in script.manager.counters.items() if name.startswith("dropped")}
    assert dropped == {"dropped_seen": 1, "dropped_gap": 1, "dropped_stale": 1, "dropped_unknown": 3}


def test_a_finish_counts_even_if_its_ids_were_seen(script: Script) -> None:
    script.send(Row("r", script.ids("ab"), spec=FRESH))
    [row] = script.send(Row("r", script.ids("b"), 1, finish=LENGTH))
    assert row == Row("r", [], 2, finish=LENGTH)


def test_an_opening_that_comes_twice_changes_nothing(script: Script) -> None:
    assert script.texts(Row("r", script.ids("a"), spec=FRESH)) == ["a"]
    assert script.send(Row("r", script.ids("a"), spec=FRESH)) == []
    assert script.texts(Row("r", script.ids("b"), 1)) == ["b"]


def test_of_a_row_that_overlaps_only_the_new_positions_pass(script: Script) -> None:
    script.send(Row("r", script.ids("ab"), spec=FRESH))
    logprobs = Logprobs(pack_floats([1, 2, 3]), 1, pack_ints([1, 2, 3]), pack_floats([4, 5, 6]))
    [row] = script.send(Row("r", script.ids("bcd"), 1, logprobs=logprobs))
    rest = Logprobs(pack_floats([2, 3]), 1, pack_ints([2, 3]), pack_floats([5, 6]))
    assert (row, row.text) == (Row("r", script.ids("cd"), 2, logprobs=rest), "cd")


def test_a_higher_attempt_replaces_and_a_lower_opening_is_ignored(script: Script) -> None:
    script.send(Row("r", script.ids("ab"), spec=FRESH))
    spec = DecodeSpec(resume=[Resume(0, pack_ints(script.ids("ab")))], chars_sent={0: 2}, tokenizer="sha")
    assert script.texts(Row("r", script.ids("c"), 2, attempt=1, spec=spec)) == ["c"]
    assert script.send(Row("r", script.ids("c"), 2)) == []
    assert script.send(Row("r", script.ids("x"), spec=FRESH)) == []
    assert script.texts(Row("r", script.ids("d"), 3, attempt=1)) == ["d"]
    assert len(script.manager) == 1


def test_a_resumed_choice_remembers_held_text_and_what_was_sent(script: Script) -> None:
    ids = script.ids("ab<en")
    spec = DecodeSpec(stop=["<end>"], resume=[Resume(0, pack_ints(ids))], chars_sent={0: 1}, tokenizer="sha")
    [row] = script.send(Row("r", script.ids("d"), 5, attempt=1, spec=spec))
    assert (row.text, row.finish) == ("b", None)
    [row] = script.send(Row("r", script.ids(">x"), 6, attempt=1))
    assert (row.text, row.finish) == ("", FinishReason(FinishType.STOP, "<end>"))


def test_a_resumed_choice_gives_what_the_client_lacks_with_its_first_token(script: Script) -> None:
    spec = DecodeSpec(resume=[Resume(0, pack_ints(script.ids("abc")))], chars_sent={0: 1}, tokenizer="sha")
    assert script.texts(Row("r", script.ids("d"), 3, attempt=1, spec=spec)) == ["bcd"]
    assert script.texts(Row("r", script.ids("e"), 4, attempt=1)) == ["e"]


def test_a_resumed_choice_does_not_repeat_characters_the_client_has(script: Script) -> None:
    spec = DecodeSpec(resume=[Resume(0, pack_ints(script.ids("ab")))], chars_sent={0: 4}, tokenizer="sha")
    assert script.texts(Row("r", script.ids("c"), 2, attempt=1, spec=spec)) == [""]
    assert script.texts(Row("r", script.ids("de"), 3, attempt=1)) == ["e"]


def test_a_resumed_choice_that_had_met_its_stop_ends_at_once(script: Script) -> None:
    spec = DecodeSpec(stop=["b"], resume=[Resume(0, pack_ints(script.ids("ab")))], tokenizer="sha")
    [row] = script.send(Row("r", script.ids("c"), 2, attempt=1, spec=spec))
    assert (list(row.ids), row.text, row.finish) == ([], "a", FinishReason(FinishType.STOP, "b"))
    assert len(script.manager) == 0


@pytest.mark.parametrize(
    "spec",
    [
        b"",
        b"\xc1garbage",
        msgspec.msgpack.encode({"stop": 3}),
        DecodeSpec(prompt_tail=b"odd"),
        DecodeSpec(stop=["x"] * 1000),
        DecodeSpec(stop=["x" * 100_000]),
        DecodeSpec(prompt_tail=b"\0" * 400_000),
        DecodeSpec(tokenizer="another"),
    ],
)
def test_a_spec_that_cannot_be_followed_ends_its_choice_alone(script: Script, spec: DecodeSpec | bytes) -> None:
    bad, good = script.send(Row("bad", script.ids("a"), spec=spec), Row("good", script.ids("b"), spec=FRESH))
    assert (bad.rid, list(bad.ids), bad.text) == ("bad", [], "")
    assert bad.finish is not None
    assert bad.finish.type is FinishType.ERROR
    assert bad.finish.message
    assert (good.rid, good.text, good.finish) == ("good", "b", None)
    assert script.send(Row("bad", script.ids("a"), 1)) == []


def test_wild_ids_and_numbers_harm_nothing(script: Script) -> None:
    tail = pack_ints([-1, 2**31 - 1, -(2**31)])
    spec = DecodeSpec(prompt_tail=tail, chars_sent={0: -5}, resume=[Resume(0, tail)], tokenizer="sha")
    assert script.texts(Row("r", [-1, *script.ids("a"), 10**9], 3, spec=spec)) == ["a"]
    assert script.send(Row("r", script.ids("a"), -4)) == []


def test_a_torn_batch_is_dropped_whole(script: Script) -> None:
    script.send(Row("r", script.ids("a"), spec=FRESH))
    fine = batch([Row("r", script.ids("b"), 1), Row("q", script.ids("cd"), spec=FRESH)])
    torn: list[dict[str, object]] = [
        {"indices": b"abc"},
        {"attempts": b""},
        {"rids": ["r"]},
        {"offsets": pack_ints([0, 2, 1])},
        {"offsets": pack_ints([1, 2, 3])},
        {"offsets": pack_ints([0, 1, 4])},
        {"offsets": b""},
        {"openings": [msgspec.structs.replace(fine.openings[0], row=2)]},
    ]
    for fields in torn:
        assert script.manager.handle(msgspec.structs.replace(fine, **fields)) == []
    assert script.manager.counters["dropped_malformed"] == len(torn)
    assert script.texts(Row("r", script.ids("b"), 1)) == ["b"]


def test_the_number_of_choices_is_bounded_and_the_quietest_go_first(byte_level: Vocabulary) -> None:
    script = Script(byte_level, max_choices=20)
    a = script.ids("a")
    script.send(*[Row(f"old{n}", a, spec=FRESH) for n in range(20)])
    script.send(*[Row(f"old{n}", a, 1) for n in range(19)])
    script.send(Row("new", a, spec=FRESH))
    assert (len(script.manager), script.manager.counters["evicted"]) == (20, 1)
    assert script.send(Row("old19", a, 1)) == []
    assert script.texts(Row("new", a, 1), Row("old0", a, 2)) == ["a", "a"]


def test_a_peer_that_goes_frees_its_choices(script: Script) -> None:
    a = script.ids("a")
    script.send(Row("1", a, spec=FRESH, frontend="f"), Row("2", a, spec=FRESH, frontend="g"))
    assert script.manager.held("g").rids == ["2"]
    assert unpack_ints(script.manager.held("g").positions)[0] == 1
    assert (script.manager.drop_peer("g"), len(script.manager)) == (1, 1)
    assert (script.manager.drop_peer("s"), len(script.manager)) == (1, 0)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_split_with_any_crash_gives_the_same_text_ids_and_finish(
    byte_level: Vocabulary, data: st.DataObject
) -> None:
    text = data.draw(st.text(alphabet="abc🙂é ", min_size=1, max_size=12))
    stops = data.draw(st.lists(st.text(alphabet="abc🙂 ", min_size=1, max_size=3), max_size=2))
    least = data.draw(st.integers(0, 6))
    ids = byte_level.tokenizer.encode(text).ids
    unbroken = DecodeSpec(stop=stops, min_tokens=least, tokenizer="sha")
    [whole] = Script(byte_level).send(Row("r", ids, spec=unbroken, finish=LENGTH))
    script, seen, shown, attempt = Script(byte_level), list[int](), "", -1
    finish: FinishReason | None = None
    while finish is None:
        spec = None
        if attempt < 0 or data.draw(st.booleans()):  # start, or lose the detokenizer and start again elsewhere
            script, attempt = Script(byte_level), attempt + 1
            resume = [Resume(0, pack_ints(seen))] if seen else []
            spec = msgspec.structs.replace(unbroken, resume=resume, chars_sent={0: len(shown)})
        count = data.draw(st.integers(1, 4))
        part = ids[len(seen) : len(seen) + count]
        ends = LENGTH if len(seen) + count >= len(ids) else None
        [row] = script.send(Row("r", part, len(seen), attempt=attempt, spec=spec, finish=ends))
        seen, shown, finish = [*seen, *row.ids], shown + row.text, row.finish
    assert (seen, shown, finish) == (list(whole.ids), whole.text, whole.finish)
