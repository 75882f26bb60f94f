"""Lifetime of tokenizers in the store."""

import hashlib

from tercet.detokenizer.tokenizer_store import TokenizerStore
from tercet.detokenizer.vocabulary import Vocabulary
from tercet.protocol.messages.messages import TokenizerFiles


def read(store: TokenizerStore, scheduler: str, vocabulary: Vocabulary) -> str:
    """Add a scheduler's tokenizer to the store; return its hash."""
    contents = vocabulary.tokenizer.to_str().encode()
    sha256 = hashlib.sha256(contents).hexdigest()
    names = ["config.json", "tokenizer.json"]
    files = TokenizerFiles(id="x", model="m", names=names, sha256=["", sha256])
    store.read(scheduler, files, (memoryview(b"{}"), memoryview(contents)))
    return sha256


def test_schedulers_of_one_model_share_a_tokenizer(byte_level: Vocabulary) -> None:
    store = TokenizerStore()
    sha256 = read(store, "s1", byte_level)
    first = store.get(sha256, "s1")
    assert read(store, "s2", byte_level) == sha256
    assert store.get(sha256, "s2") is first is not None
    assert len(store) == 1


def test_a_spec_without_a_hash_means_the_tokenizer_of_its_scheduler(byte_level: Vocabulary, llama: Vocabulary) -> None:
    store = TokenizerStore()
    assert store.get("", "s1") is None
    one = read(store, "s1", byte_level)
    assert store.get("", "stranger") is store.get(one, "")
    two = read(store, "s2", llama)
    assert (store.get("", "s1"), store.get("", "s2")) == (store.get(one, ""), store.get(two, ""))
    assert store.get("", "stranger") is None


def test_a_tokenizer_outlives_its_scheduler_until_another_one_comes(byte_level: Vocabulary, llama: Vocabulary) -> None:
    store = TokenizerStore()
    one = read(store, "s", byte_level)
    store.drop_scheduler("s")
    assert store.get(one, "") is not None
    two = read(store, "s", llama)
    assert store.get(one, "") is None
    assert store.get(two, "") is not None
