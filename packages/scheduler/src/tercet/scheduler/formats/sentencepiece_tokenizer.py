"""Tokenizers from SentencePiece models, normalized as the model's own file says."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from tercet.scheduler.formats.sentencepiece_model import (
    Algorithm,
    PieceKind,
    SentencePieceModel,
    read_sentencepiece,
)
from tercet.scheduler.tokenizer_files import token_text

SENTENCEPIECE_FILES = "tokenizer.model", "sentencepiece.bpe.model", "spiece.model"
_MOST_SPLITS = 1 << 29
"""Maximum of the squares of the pieces' lengths, summed: the time that merges take to find."""
_MOST_EXTRA_IDS = 10_000
SPACE = "▁"
"""SentencePiece's sign of a space."""

Scored = Sequence[tuple[str, float]]


def sentencepiece_tokenizer(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a model whose ids are those of its pieces, without what is put around a text."""
    model = _model(files)
    vocabulary = [(piece.text, piece.score) for piece in model.pieces]
    return _tokenizer(model, vocabulary, model.unk_id, settings)


def named_pieces(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the special tokens that a model names itself."""
    model = _model(files)
    numbers = {"bos_token": model.bos_id, "eos_token": model.eos_id, "unk_token": model.unk_id}
    named = {name: model.piece(number) for name, number in numbers.items()}
    return {name: text for name, text in named.items() if text is not None}


def t5(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of T5: the pieces, and sentinels behind them in descending order."""
    model, count = _model(files), settings.get("extra_ids")
    if type(count) is not int or not 0 <= count <= _MOST_EXTRA_IDS:
        raise ValueError(f"tokenizer_config.json: extra_ids must be 0 to {_MOST_EXTRA_IDS}")
    sentinels = [f"<extra_id_{number}>" for number in range(count)]
    vocabulary = [(piece.text, piece.score) for piece in model.pieces] + [(each, 0.0) for each in reversed(sentinels)]
    tokenizer = _word_tokenizer(model, vocabulary, model.unk_id)
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in sentinels])
    return tokenizer


def xlm_roberta(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of XLM-RoBERTa, whose ids are one more than those of the pieces."""
    model = _model(files)
    names = [_named(settings, name) for name in ("bos_token", "pad_token", "eos_token", "unk_token")]
    pieces = [(piece.text, piece.score) for piece in model.pieces[3:]]
    vocabulary = [*((name, 0.0) for name in names), *pieces, (_named(settings, "mask_token"), 0.0)]
    return _word_tokenizer(model, vocabulary, 3, prefix=settings.get("add_prefix_space") is not False)


def camembert(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of CamemBERT, whose ids are four more than those of the pieces."""
    model = _model(files)
    names = ["<s>NOTUSED", _named(settings, "pad_token"), "</s>NOTUSED", _named(settings, "unk_token")]
    vocabulary = [*((name, 0.0) for name in names), ("<unk>NOTUSED", -100.0)]
    vocabulary += [(piece.text, piece.score) for piece in model.pieces[1:]]
    vocabulary.append((_named(settings, "mask_token"), 0.0))
    return _word_tokenizer(model, vocabulary, 3, prefix=settings.get("add_prefix_space") is not False)


def _model(files: Mapping[str, bytes]) -> SentencePieceModel:
    return read_sentencepiece(next(files[name] for name in SENTENCEPIECE_FILES if name in files))


def _named(settings: Mapping[str, Any], name: str) -> str:
    text = token_text(settings.get(name))
    if text is None:
        raise ValueError(f"it needs a {name}")
    return text


def _tokenizer(model: SentencePieceModel, vocabulary: Scored, unk_id: int, settings: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer that normalizes as SentencePiece does."""
    given = settings.get("add_prefix_space")
    prefix = given if isinstance(given, bool) else model.add_dummy_prefix
    # Stripped text does not begin at its original beginning, which "first" looks at.
    always = settings.get("legacy") is True or model.remove_extra_whitespaces
    scheme = "never" if not prefix else "always" if always else "first"
    if model.algorithm is Algorithm.BPE:
        tokenizer = _bpe(model, vocabulary, unk_id)
    else:
        tokenizer = _unigram(model, vocabulary, unk_id)
    tokenizer.decoder = _decoder(prefix=prefix)
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    split = not _crosses_spaces(vocabulary)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=split)
    return _with_pieces(tokenizer, model, vocabulary)


def _word_tokenizer(model: SentencePieceModel, vocabulary: Scored, unk_id: int, *, prefix: bool = True) -> Tokenizer:
    """Return a unigram tokenizer that splits at white space before, as those of transformers' older classes do."""
    scheme = "always" if prefix else "never"
    tokenizer = _unigram(model, vocabulary, unk_id)
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    if model.charsmap:
        tokenizer.normalizer = normalizers.Precompiled(model.charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)]
    )
    return _with_pieces(tokenizer, model, vocabulary)


def _unigram(model: SentencePieceModel, vocabulary: Scored, unk_id: int) -> Tokenizer:
    if model.algorithm is not Algorithm.UNIGRAM:
        raise ValueError("it is a model of BPE, while this class has unigrams")
    _check_unknown(vocabulary, unk_id)
    return Tokenizer(Unigram([*vocabulary], unk_id=unk_id, byte_fallback=model.byte_fallback))


def _check_unknown(vocabulary: Scored, unk_id: int) -> None:
    if not 0 <= unk_id < len(vocabulary):
        raise ValueError("its unknown token is not one of its pieces")


def _with_pieces(tokenizer: Tokenizer, model: SentencePieceModel, vocabulary: Scored) -> Tokenizer:
    """Add the pieces that a text is searched for before it is tokenized, and return the tokenizer."""
    if model.treat_whitespace_as_suffix:
        raise ValueError("treat_whitespace_as_suffix is not supported")
    known = {text for text, _ in vocabulary}
    tokenizer.add_tokens(
        [
            AddedToken(piece.text, normalized=False, special=piece.kind is PieceKind.CONTROL)
            for piece in model.pieces
            if piece.kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED) and piece.text in known
        ]
    )
    return tokenizer


def _crosses_spaces(vocabulary: Scored) -> bool:
    """Return whether some token spans the beginning of a word, so that words cannot be tokenized one by one."""
    return any(SPACE in text[1:] for text, _ in vocabulary)


def _bpe(model: SentencePieceModel, vocabulary: Scored, unk_id: int) -> Tokenizer:
    _check_unknown(vocabulary, unk_id)
    unknown = vocabulary[unk_id][0]
    ids = {text: number for number, (text, _) in enumerate(vocabulary)}
    merges = piece_merges(ids, range(len(vocabulary)))
    return Tokenizer(BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback))


def _decoder(*, prefix: bool) -> Any:
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(content=" ", left=1)] if prefix else [])])


def piece_merges(ids: Mapping[str, int], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """Return each pair of pieces that make a third, in the order of that one's rank; `ranks` has those of all ids.

    SentencePiece joins the neighbors whose piece has the best score.
    """
    if sum(len(text) ** 2 for text in ids) > _MOST_SPLITS:
        raise ValueError("its pieces are too long")
    merges: list[tuple[float, int, int, int, str, str]] = []
    for text, number in ids.items():
        for place in range(1, len(text)):
            left, right = text[:place], text[place:]
            if left in ids and right in ids:
                merges.append((ranks[number], number, place, ids[left], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]
