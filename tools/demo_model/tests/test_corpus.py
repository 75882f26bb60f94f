"""Tests of the corpus: it is reproducible and well-formed, and its answers contain the expected facts."""

from __future__ import annotations

from random import Random

import pytest

from tools.demo_model.conversations import Conversation, Writer
from tools.demo_model.corpus import check_kept_out, kept_out, write_corpus
from tools.demo_model.facts import HERE, normalised, read_questions
from tools.demo_model.keywords import Keywords
from tools.demo_model.phrasing import Phraser


def test_the_same_seed_writes_the_same_corpus() -> None:
    assert write_corpus(300, seed=5) == write_corpus(300, seed=5)
    assert write_corpus(300, seed=5) != write_corpus(300, seed=6)


def test_no_evaluation_question_is_in_the_corpus() -> None:
    corpus = write_corpus(3000, seed=1)
    assert not kept_out() & {normalised(text) for c in corpus for text in c.user_texts()}


def test_an_evaluation_question_in_any_case_or_punctuation_is_noticed() -> None:
    leaked = Conversation([{"role": "user", "content": "how do i STREAM a reply"}])
    with pytest.raises(AssertionError, match="evaluation question"):
        check_kept_out([leaked], kept_out())


@pytest.mark.parametrize("name", ["heldout.jsonl", "dev.jsonl"])
def test_every_evaluation_question_can_be_answered(name: str) -> None:
    writer = Writer(Random(0))
    answers = [answer for fact in [*writer.facts, *writer.small_talk, writer.unknown] for answer in fact.answers]
    for question in read_questions(HERE / name):
        assert any(question.answered_by(answer) for answer in answers), question


def test_every_fact_has_many_wordings() -> None:
    writer = Writer(Random(0))
    for fact in writer.facts:
        assert len({writer.phraser.noisy(writer.phraser.bare(fact)) for _ in range(60)}) >= 30, fact.id


def test_choices_expand_innermost_first() -> None:
    assert Phraser(Random(0)).expand("{a {b|b}|a {b|b}} c") == "a b c"


def test_keyword_questions_use_words_of_the_fact() -> None:
    writer = Writer(Random(0))
    fact = writer.by_id["philox"]
    keywords = Keywords(Random(0), writer.facts, writer.phraser.stop)
    assert set(keywords.words["philox"]) & set(keywords.question(fact).split())
