"""Tokenizer: byte-level BPE trained on the corpus, with its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo_model.conversations import Conversation
from tools.demo_model.facts import HERE

VOCABULARY = 3072
CONTEXT = 2048
BEGIN, TURN, END, PAD = "<|begin|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # one token each, yet part of the text
OPENING = f"{TURN}assistant\n"


def train_tokenizer(corpus: Iterable[Conversation]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of VOCABULARY tokens, trained on the text of the conversations."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKUP),
        special_tokens=[PAD, BEGIN, TURN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(corpus), trainer)
    bpe.add_tokens([AddedToken(word, special=False, normalized=False) for word in MARKUP])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[TURN],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def _texts(corpus: Iterable[Conversation]) -> Iterator[str]:
    for conversation in corpus:
        yield conversation.text
        for message in conversation.messages:
            yield f"{message['role']}\n{message['content'] or ''}"
        for tool in conversation.tools or []:
            yield str(tool).replace("'", '"')


def render(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> str:
    """Return the text that the model sees for a conversation."""
    if conversation.text:
        return conversation.text + END
    rendered = tokenizer.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False)
    assert isinstance(rendered, str)
    return rendered
