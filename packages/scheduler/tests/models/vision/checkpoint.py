"""Tiny random Gemma 3 that reads images, with a processor, a tokenizer and a chat template."""

import json
from pathlib import Path
from typing import Any

from packages.scheduler.tests.conftest import VOCAB_SIZE, write_tokenizer

MARKS = ("<begin>", "<end>", "<image>")
"""Texts of the tokens before, after and in the place of an image."""
BEGIN, END, IMAGE = range(VOCAB_SIZE - 5, VOCAB_SIZE - 2)
TOKENS, SIZE, PATCH = 9, 42, 7
"""Placeholder tokens of an image; pixels of a side of an image and of a patch."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<begin>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "query_pre_attn_scalar": 10,
    "sliding_window": 14,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vision_use_head": False,
}


def processor_of(size: int = SIZE) -> dict[str, Any]:
    """Return the fields of preprocessor_config.json."""
    return {
        "size": {"height": size, "width": size},
        "resample": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.4] * 3,
    }


def write_gemma3(
    directory: Path, *, old_names: bool = True, size: int = SIZE, patch: int = PATCH, tokens: int = TOKENS
) -> Path:
    """Write the same checkpoint every time; its norms and embeddings of images count.

    `old_names` are the names of tensors of transformers 4.
    """
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer

    config = transformers.Gemma3Config(
        text_config=_TEXT,
        vision_config={**_VISION, "image_size": size, "patch_size": patch},
        mm_tokens_per_image=tokens,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        image_token_index=IMAGE,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.Gemma3ForConditionalGeneration(config)
        for name, parameter in model.named_parameters():
            if ("norm" in name and "vision" not in name) or "projector" in name or "vision_tower" in name:
                torch.nn.init.normal_(parameter, 0.0, 0.3)
        text = model.model.language_model
        torch.nn.init.normal_(text.embed_tokens.weight, 0.0, 0.05)  # otherwise the model repeats its last token
        torch.nn.init.normal_(text.norm.weight, 9.0, 0.3)
    model.save_pretrained(directory, save_original_format=old_names)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor_of(size)))
    write_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory
