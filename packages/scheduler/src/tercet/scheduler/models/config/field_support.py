"""The support of config.json fields by architecture: honoured, without effect here, or refused.

The fields are those that transformers declares and reads for the architecture (`tools/reference_fields`). A field that
transformers does not know has no effect there and is ignored here. Fields that only a family's published code reads are
in this table, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tercet.scheduler.models.config.config_defaults import family_defaults
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
    """The fields of an architecture in addition to those of all; it takes precedence over `_EVERY`."""

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


def _because(reasons: Mapping[str, str]) -> dict[str, str]:
    """Turn reason to names (in one string) into name to reason."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}


def _table(honoured: str = "", refused: Mapping[str, Refused] | None = None, **unused: str) -> FieldTable:
    aliases = {"num_local_experts": "num_experts"} if "num_experts " in f"{honoured} " else {}
    return FieldTable(
        honoured=frozenset(honoured.split()), refused=refused or {}, without_effect=unused, aliases=aliases
    )


_EVERY = FieldTable(
    honoured=names(
        "architectures dtype eos_token_id head_dim hidden_act hidden_size intermediate_size is_causal "
        "max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads "
        "original_max_position_embeddings partial_rotary_factor quantization_config rms_norm_eps rope_parameters "
        "rope_scaling rope_theta tie_word_embeddings torch_dtype vocab_size"
    ),
    without_effect=_because(
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
            "of layers that guess tokens ahead": "chain_hidden_post_norm logits_mup_width_multiplier "
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
_OWN_CODE = FieldTable(without_effect={"auto_map": "the family's own code computes what is computed here"})

_WINDOWS = "sliding_window layer_types "
_QWEN = _WINDOWS + "use_sliding_window max_window_layers "
_EXPERTS = "num_experts num_experts_per_tok "
_QWEN_EXPERTS = _EXPERTS + "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob "
_DEEPSEEK = (
    "attention_bias first_k_dense_replace moe_intermediate_size moe_layer_freq n_group n_routed_experts "
    "n_shared_experts norm_topk_prob num_experts_per_tok routed_scaling_factor scoring_func topk_group topk_method "
)
_LATENT = _DEEPSEEK + "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
_GEMMA = (
    _WINDOWS + "attention_bias hidden_activation final_logit_softcapping query_pre_attn_scalar "
    "sliding_window_pattern rope_local_base_freq text_config "
)
_BIASES = "attention_bias mlp_bias "
_NOT_READ = "transformers does not read it"
_IMAGES = dict.fromkeys(
    names(
        "boi_token_id boi_token_index eoi_token_id eoi_token_index image_size image_token_id image_token_index "
        "layer_norm_eps mm_tokens_per_image patch_size vision_config"
    ),
    "of images, which are not read",
)
_BIDIRECTIONAL = {
    "use_bidirectional_attention": Refused((False,), "attention to following tokens is not supported for Gemma")
}
_GEMMA3 = _table(_GEMMA, _BIDIRECTIONAL, hidden_act=_NOT_READ, attn_logit_softcapping=_NOT_READ, **_IMAGES)
_ROUTED = {"num_local_experts": "n_routed_experts"}
_AHEAD = _ROUTED | {"num_mtp_layers": "num_nextn_predict_layers"}


_FAMILIES: dict[str, FieldTable] = {
    "DeepseekV2ForCausalLM": FieldTable(
        honoured=names(_LATENT + "mlp_bias"),
        without_effect={"head_dim": _NOT_READ},
        aliases={"num_experts": "n_routed_experts"},
    ),
    "DeepseekV3ForCausalLM": FieldTable(
        honoured=names(_LATENT + "rope_interleave num_nextn_predict_layers"), aliases=_AHEAD
    ),
    "Dots1ForCausalLM": FieldTable(honoured=names(_DEEPSEEK + _WINDOWS + "max_window_layers"), aliases=_ROUTED),
    "Ernie4_5ForCausalLM": _table("use_bias"),
    "Gemma2ForCausalLM": _table(_GEMMA + "attn_logit_softcapping", _BIDIRECTIONAL, hidden_act=_NOT_READ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Glm4MoeForCausalLM": FieldTable(
        honoured=names(_DEEPSEEK + "use_qk_norm num_nextn_predict_layers"), aliases=_AHEAD
    ),
    "Glm4MoeLiteForCausalLM": FieldTable(
        honoured=names(_LATENT + "rope_interleave mlp_layer_types num_nextn_predict_layers"),
        aliases=_AHEAD,
    ),
    "GlmForCausalLM": _table("attention_bias"),
    "GptOssForCausalLM": _table(_EXPERTS + _WINDOWS + "attention_bias swiglu_alpha swiglu_limit", hidden_act=_NOT_READ),
    "GraniteForCausalLM": _table(
        _BIASES + "attention_multiplier embedding_multiplier logits_scaling residual_multiplier"
    ),
    "LLaMAForCausalLM": _table(_BIASES),
    "LlamaForCausalLM": _table(_BIASES),
    "MiniMaxM2ForCausalLM": _table(_EXPERTS + "rotary_dim scoring_func"),
    "MistralForCausalLM": _table(_WINDOWS),
    "MixtralForCausalLM": _table(_EXPERTS + "sliding_window"),
    "OlmoeForCausalLM": _table(
        _EXPERTS + "attention_bias norm_topk_prob",
        {
            "clip_qkv": Refused((), "queries, keys and values that are clipped are not supported"),
            "sliding_window": Refused((), "transformers applies the family's window in some of its kernels alone"),
        },
    ),
    "Phi3ForCausalLM": _table("sliding_window"),
    "Qwen2ForCausalLM": _table(_QWEN),
    "Qwen2MoeForCausalLM": _table(_QWEN + _QWEN_EXPERTS + "qkv_bias shared_expert_intermediate_size"),
    "Qwen3ForCausalLM": _table(_QWEN + "attention_bias"),
    "Qwen3MoeForCausalLM": _table(_QWEN_EXPERTS + "attention_bias sliding_window use_sliding_window"),
    "SeedOssForCausalLM": _table(_BIASES + "attention_out_bias"),
    "SmolLM3ForCausalLM": _table(_WINDOWS + _BIASES + "use_sliding_window no_rope_layers no_rope_layer_interval"),
}


def tables_of(architecture: str) -> tuple[FieldTable, ...]:
    """Return the tables of an architecture, its own first. Raise KeyError for an unknown one."""
    own_code = (_OWN_CODE,) if family_defaults(architecture).ships_own_code else ()
    return (_FAMILIES[architecture], *own_code, _EVERY)


def support_of(name: str, architecture: str) -> Support | None:
    """Return the support of a field of an architecture; None for a field that transformers does not know."""
    return next((support for table in tables_of(architecture) if (support := table.support_of(name))), None)


def honoured_fields(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the honoured fields of a config, under one name each. Raise ModelError for a refused value."""
    family = _FAMILIES[architecture]
    counted: dict[str, Any] = {}
    for name, value in config.items():
        support = support_of(name, architecture)
        if support == "refused":
            refusal = family.refused.get(name) or _EVERY.refused[name]
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
