"""The config of the text model in a config.json of a model that reads more than text."""

from collections.abc import Mapping
from typing import Any

from tercet.scheduler.architectures import WRAPPERS, named_architecture, text_architecture
from tercet.scheduler.model_files import saved_dtype
from tercet.scheduler.models.config.config_fields import wrong
from tercet.scheduler.models.config.field_support import field_table, honoured_fields, names

_ANYWHERE = ("auto_map", "eos_token_id", "tie_word_embeddings", "quantization_config")
"""Fields that may be set for the whole model and then apply to the text model."""
WRAPPER_FIELDS = field_table(
    "auto_map text_config",
    without_effect=dict.fromkeys(
        names(
            "activation_dropout activation_function architecture attention_chunk_size attention_context_left "
            "attention_context_right attention_invalid_logits_value attention_logit_cap audio_config "
            "audio_soft_tokens_per_image audio_token_id audio_token_index boa_token_id boi_token_id boi_token_index "
            "conf_attention_chunk_size conf_attention_context_left conf_attention_context_right "
            "conf_attention_logit_cap conf_conv_kernel_size conf_num_attention_heads conf_num_hidden_layers "
            "conf_reduction_factor conf_residual_weight conv_kernel_size d_model deepstack_visual_indexes depth "
            "do_pooling downsample_ratio dropout embed_dim encoder_attention_heads encoder_ffn_dim encoder_layerdrop "
            "encoder_layers eoa_token_id eoa_token_index eoi_token_id eoi_token_index fullatt_block_indexes "
            "gradient_clipping hidden_dropout_prob ignore_index image_grid_pinpoints image_seq_length image_size "
            "image_token_id image_token_index in_channels input_feat_size layer_norm_eps layer_scale_init_value "
            "layerdrop max_source_positions merge_kernel_size mlp_ratio mm_tokens_per_image model_args "
            "multi_modal_projector_bias multimodal_projector_bias norm_eps norm_type num_channels num_heads "
            "num_mel_bins num_position_embeddings out_hidden_size output_proj_dims patch_size pixel_shuffle_ratio "
            "pooling_kernel_size pos_emb_height pos_emb_time pos_emb_width position_embedding_size projection_dropout "
            "projection_hidden_size projection_layer_norm_eps projector_dropout projector_hidden_act "
            "projector_input_dim projector_output_dim residual_weight scale_embedding scale_factor spatial_merge_size "
            "sscp_conv_channel_size sscp_conv_group_norm_eps sscp_conv_kernel_size sscp_conv_stride_size standardize "
            "subsampling_conv_channels temporal_patch_size tokens_per_second use_absolute_position_embeddings "
            "use_clipped_linears use_mask_token use_mean_pooling use_qk_norm video_token_id video_token_index "
            "vision_aspect_ratio vision_config vision_end_token_id vision_feature_layer vision_feature_select_strategy "
            "vision_output_dim vision_soft_tokens_per_image vision_start_token_id vocab_offset window_size"
        ),
        "of images or audio, which the text model does not read",
    ),
)
"""Fields of models that read more than text, beside those of the text model."""

_SIZES: Mapping[str, Mapping[str, int]] = {
    "Qwen2ForCausalLM": {
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "max_position_embeddings": 32_768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151_936,
    },
    "LlamaForCausalLM": {
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32_000,
    },
    "MistralForCausalLM": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
    },
}
"""transformers' defaults, which the `text_config` of LLaVA's, Pixtral's and Qwen2-Audio's checkpoints leaves out."""
_OWN_SIZES: Mapping[str, Mapping[str, int | float]] = {
    "VoxtralForConditionalGeneration": {
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131_072,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e8,
        "vocab_size": 131_072,
    }
}
"""Those of a model that reads more than text, where they differ."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model, and any other model's config unchanged. Raise ModelError."""
    if named_architecture(config) not in WRAPPERS or "text_config" not in config:
        return config
    architecture = text_architecture(config)
    honoured = honoured_fields(config, WRAPPER_FIELDS)
    text = honoured["text_config"] or {}
    if not isinstance(text, Mapping):
        raise wrong("text_config", "is not an object")
    above = {name: honoured[name] for name in _ANYWHERE if honoured.get(name) is not None}
    return {
        **_SIZES.get(architecture, {}),
        **_OWN_SIZES.get(named_architecture(config), {}),
        **{name: value for name, value in text.items() if name != "torch_dtype"},
        **above,
        "architectures": [architecture],
        "dtype": saved_dtype(config),
    }
