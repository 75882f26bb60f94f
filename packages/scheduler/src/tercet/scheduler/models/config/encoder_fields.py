"""The config.json fields of encoders that transformers reads, by family."""

from tercet.scheduler.file_fields import FileFields, Only

_TRAINING = "used in training only"
_HEADS = "of heads that are left out"
_RETURNS = "of what a call returns"
_KERNELS = "a choice of the reference's kernels"
_NOTE = "a name or a version"
_TOKENS = "special tokens are those of tokenizer.json"
_LABELS = frozenset({"architectures", "dtype", "torch_dtype", "id2label", "num_labels", "problem_type"})
_NO_EFFECT = {
    "_name_or_path": _NOTE,
    "attn_implementation": _KERNELS,
    "bos_token_id": _TOKENS,
    "classifier_dropout": _TRAINING,
    "cls_token_id": _TOKENS,
    "eos_token_id": _TOKENS,
    "gradient_checkpointing": _TRAINING,
    "initializer_range": _TRAINING,
    "label2id": "the inverse of id2label",
    "model_type": _NOTE,
    "output_attentions": _RETURNS,
    "output_hidden_states": _RETURNS,
    "return_dict": _RETURNS,
    "sep_token_id": _TOKENS,
    "tie_word_embeddings": _HEADS,
    "transformers_version": _NOTE,
    "use_cache": _RETURNS,
}
_REFUSED = {
    "add_cross_attention": Only("only encoders are supported"),
    "auto_map": Only("the model brings its own code, and Tercet never runs a model's code"),
    "is_decoder": Only("only encoders, whose tokens see each other, are supported"),
    "is_encoder_decoder": Only("only encoders are supported"),
    "pruned_heads": Only("heads that are left out are not supported"),
    "quantization_config": Only("quantized checkpoints are served only of models that generate"),
}
BERT = FileFields(
    honoured=_LABELS
    | {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"}
    | {"max_position_embeddings", "type_vocab_size", "layer_norm_eps", "pad_token_id", "position_embedding_type"},
    no_effect=_NO_EFFECT
    | {
        "attention_probs_dropout_prob": _TRAINING,
        "chunk_size_feed_forward": "parts of a layer give the same numbers",
        "hidden_dropout_prob": _TRAINING,
    },
    refused=_REFUSED,
)
"""Fields of Bert, Roberta, XLM-Roberta and Camembert."""
MODERNBERT = FileFields(
    honoured=_LABELS
    | {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
    | {"hidden_activation", "max_position_embeddings", "norm_eps", "norm_bias", "attention_bias", "mlp_bias"}
    | {"local_attention", "layer_types", "global_attn_every_n_layers", "rope_parameters", "global_rope_theta"}
    | {"local_rope_theta", "classifier_pooling", "classifier_bias", "classifier_activation"},
    no_effect=_NO_EFFECT
    | {
        "attention_dropout": _TRAINING,
        "decoder_bias": _HEADS,
        "deterministic_flash_attn": _KERNELS,
        "embedding_dropout": _TRAINING,
        "initializer_cutoff_factor": _TRAINING,
        "mlp_dropout": _TRAINING,
        "pad_token_id": "inputs are not padded",
        "position_embedding_type": "transformers does not read it",
        "reference_compile": _KERNELS,
        "repad_logits_with_grad": _TRAINING,
        "sparse_pred_ignore_index": _HEADS,
        "sparse_prediction": _HEADS,
    },
    refused=_REFUSED
    | {
        "sliding_window": Only("only local_attention, twice as much, is read"),
        "head_dim": Only("it must be left out: it is hidden_size / num_attention_heads"),
        "rope_scaling": Only(
            "only rotation without scaling is supported", ({"rope_type": "default"}, {"type": "default"})
        ),
    },
)
