"""The support of config.json fields by family: honoured, without effect here, or refused.

The fields are those that transformers declares and reads for an architecture (`tools/reference_fields`). A field that
transformers does not know has no effect there and is ignored here. Fields that only a family's published code reads are
in its table, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tercet.scheduler.models.config.config_fields import wrong

Support = Literal["honoured", "without effect", "refused"]


OF_OTHERS = "of other families, whose parts transformers shares with this one"
"""The reason for fields that an architecture's own files in transformers must not name."""


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


@dataclass(frozen=True)
class Refused:
    """A field that is accepted only with values that change nothing."""

    harmless: tuple[Any, ...]
    """Values that mean the same as leaving it out."""
    why: str


@dataclass(frozen=True, kw_only=True)
class FieldTable:
    """The fields of a family in addition to those of all; it takes precedence over `EVERY`."""

    honoured: frozenset[str] = frozenset()
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Fields with the reason."""
    refused: Mapping[str, Refused] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative field names and the names that they stand for."""

    def support_of(self, name: str) -> Support | None:
        """Return the support of a field; None if the table does not name it."""
        if name in self.refused:
            return "refused"
        if name in self.honoured or name in self.aliases:
            return "honoured"
        return "without effect" if name in self.without_effect else None


def because(reasons: Mapping[str, str]) -> dict[str, str]:
    """Turn reason to names (in one string) into name to reason."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}


def field_table(
    honoured: str,
    *,
    without_effect: Mapping[str, str] = {},
    refused: Mapping[str, Refused] = {},
    aliases: Mapping[str, str] = {},
    ships_own_code: bool = False,
) -> FieldTable:
    """Return a table that honours the words of a text.

    `ships_own_code`: models may come with their own code, which computes the same as ours.
    """
    own_code = {"auto_map": "the family's own code computes what is computed here"} if ships_own_code else {}
    experts = {"num_local_experts": "num_experts"} if "num_experts" in honoured.split() else {}
    return FieldTable(
        honoured=names(honoured),
        without_effect={**without_effect, **own_code},
        refused=refused,
        aliases={**experts, **aliases},
    )


EVERY = FieldTable(
    honoured=names(
        "architectures dtype eos_token_id head_dim hidden_act hidden_size intermediate_size is_causal "
        "max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads "
        "original_max_position_embeddings partial_rotary_factor quantization_config rms_norm_eps rope_parameters "
        "rope_scaling rope_theta tie_word_embeddings torch_dtype vocab_size"
    ),
    without_effect=because(
        {
            "of training": "attention_dropout classifier_dropout embd_pdrop gradient_checkpointing hidden_dropout "
            "init_std initializer_factor initializer_range output_router_logits pretraining_tp resid_pdrop "
            "residual_dropout router_aux_loss_coef router_jitter_noise",
            "of tokens that the frontend or generation_config.json decides": "bos_token_id sep_token_id",
            "of classifier heads, which read it themselves": "id2label label2id num_labels pad_token_id problem_type "
            "token_classification_bias",
            "of what a call returns": "output_attentions output_hidden_states return_dict use_cache",
            "a name or a version": "model_type name_or_path transformers_version",
            "a choice of kernels, of devices or of how weights are loaded": "attn_implementation base_model_pp_plan "
            "base_model_tp_plan chunk_size_feed_forward device_map device_mesh disable_mmap disk_offload_folder "
            "distributed_config experts_implementation fusion_config hf_quantizer ignore_mismatched_sizes is_quantized "
            "pretrained_model_name_or_path sharded_metadata sub_configs sub_configs_defaults transformers_weights "
            "weight_mapping weights_only",
            "of multi-token prediction (MTP) layers": "chain_hidden_post_norm logits_mup_width_multiplier "
            "num_mtp_layers num_nextn_predict_layers "
            "mtp_hidden_states_first mtp_layer_types mtp_mlp_layer_types mtp_per_layer_config unpadded_vocab_size",
            "of a class, not of a file": "default_rope_type default_theta is_heterogeneous",
            OF_OTHERS: "attention_chunk_size embed_dim first_k_dense_replace layer_types mlp_layer_types num_heads "
            "number_of_conv_states sliding_window",
        }
    ),
    refused={
        "auto_map": Refused(({},), "the model brings its own code, and Tercet never runs a model's code"),
        "is_encoder_decoder": Refused((False,), "only models without an encoder are supported"),
        "kv_sharing_modes": Refused(([],), "layers that share keys and values are not supported"),
        "per_layer_config": Refused(({},), "layers of different shapes are not supported"),
    },
)
WINDOWS = "sliding_window layer_types "
QWEN_WINDOWS = WINDOWS + "use_sliding_window max_window_layers "
BIASES = "attention_bias mlp_bias "
EXPERTS = "num_experts num_experts_per_tok "
QWEN_EXPERTS = EXPERTS + "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob "
DEEPSEEK_EXPERTS = (
    "attention_bias first_k_dense_replace moe_intermediate_size moe_layer_freq n_group n_routed_experts "
    "n_shared_experts norm_topk_prob num_experts_per_tok routed_scaling_factor scoring_func topk_group topk_method "
)
"""Like those above: fields that several families honour, separated by spaces."""
ROUTED = {"num_local_experts": "n_routed_experts"}
"""Aliases of `DEEPSEEK_EXPERTS`."""
NOT_READ = "transformers does not read it"


def support_of(name: str, family: FieldTable) -> Support | None:
    """Return the support of a field in a family; None for a field that transformers does not know."""
    return family.support_of(name) or EVERY.support_of(name)


def honoured_fields(config: Mapping[str, Any], family: FieldTable) -> dict[str, Any]:
    """Return the honoured fields of a config, under one name each. Raise ModelError for a refused value."""
    counted: dict[str, Any] = {}
    for name, value in config.items():
        support = support_of(name, family)
        if support == "refused":
            refusal = family.refused.get(name) or EVERY.refused[name]
            if value is not None and not any(value is one or value == one for one in refusal.harmless):
                raise wrong(name, f"{_short(value)} is not supported: {refusal.why}")
        elif support == "honoured":
            field_name = family.aliases.get(name, name)
            known = counted.get(field_name)
            if value is not None and known is not None and known != value:
                called = " and ".join(other for other in family.aliases if family.aliases[other] == field_name)
                raise wrong(field_name, f"is {_short(known)} and {_short(value)}: it is also called {called}")
            counted[field_name] = known if value is None else value
    return counted


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
