"""Tiny random Qwen2-VL, Qwen2.5-VL and Qwen3-VL, with a processor, a tokenizer and a chat template."""

import json
from pathlib import Path
from typing import Any

from packages.scheduler.tests.conftest import VOCAB_SIZE, write_tokenizer

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, IMAGE, VIDEO = range(VOCAB_SIZE - 5, VOCAB_SIZE - 1)
PATCH, MERGE = 4, 2
SQUARE = PATCH * MERGE
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_VISION = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE}
_WIDE = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
_SIGHT: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 32, "hidden_size": 64},
    "Qwen2_5_VL": {**_WIDE, "window_size": 16, "fullatt_block_indexes": [1]},
    "Qwen3VL": {**_WIDE, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
}
_SIGHT["Qwen3VLMoe"] = _SIGHT["Qwen3VL"]
_MIXTURE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}
FAMILIES = tuple(_SIGHT)
_SIGHT["Qwen3_5"] = {**_WIDE, "num_position_embeddings": 36}


_RECURRENT = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
_FURTHER = {"Qwen3VLMoe": _MIXTURE, "Qwen3_5": _RECURRENT}


def processor_of() -> dict[str, Any]:
    """Return the fields of preprocessor_config.json."""
    return {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "min_pixels": 4 * SQUARE**2,
        "max_pixels": 60 * SQUARE**2,
        "image_mean": [0.48, 0.45, 0.4],
        "image_std": [0.27, 0.26, 0.28],
    }


def write_qwen(directory: Path, family: str = "Qwen2_5_VL", *, old: bool = True) -> Path:
    """Write the same checkpoint every time; an `old` one has names of tensors and a config.json of transformers 4."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer

    config = getattr(transformers, f"{family}Config")(
        text_config=_TEXT | _FURTHER.get(family, {}),
        vision_config={**_VISION, **_SIGHT[family]},
        vision_start_token_id=START,
        vision_end_token_id=END,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
        for name, parameter in model.named_parameters():
            if "visual" in name or "norm" in name or "bias" in name:
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1 if "visual" in name else 0.3)
    model.save_pretrained(directory, save_original_format=old)
    if old:
        _write_old_config(directory / "config.json")
    (directory / "preprocessor_config.json").write_text(json.dumps(processor_of()))
    write_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


def _write_old_config(path: Path) -> None:
    """Write the rotation in the older format, and before Qwen3-VL the fields of the text model beside the others."""
    config = json.loads(path.read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"], sections = rope["rope_theta"], {"mrope_section": rope["mrope_section"]}
    if config["model_type"] in ("qwen2_vl", "qwen2_5_vl"):
        del config["text_config"], text["model_type"]
        config = {**text, **config, "rope_scaling": {"type": "mrope", **sections}}
    else:
        text["rope_scaling"] = {"rope_type": "default", "mrope_interleaved": True, **sections}
    path.write_text(json.dumps({**config, "torch_dtype": config["dtype"]}))
