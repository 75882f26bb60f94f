"""Random checkpoints, one of which reasons and calls tools in Qwen3's notation: random text in valid form."""

from pathlib import Path

REASONING = """\
{%- if tools %}<|im_start|>system
These tools can be called:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
A call is written as
<tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ (message.content or "").split("</think>") | last }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
PLAIN = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ["<|im_end|>", "<|im_start|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
SENTENCES = [
    "The quick brown fox books a table for four on Friday, outside, and the dog sleeps on.",
    'A call looks like {"name": "book_table", "arguments": {"day": "monday", "guests": 3}}.',
]


def write(directory: Path, template: str, family: str = "Qwen3", **more: object) -> Path:
    """Write the same weights and tokenizer every time, and a chat template; `more` is added to the family's config."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0])
    wrapped.chat_template = template
    wrapped.save_pretrained(directory)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=-(-tokenizer.get_vocab_size() // 8) * 8,
        hidden_size=48,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(SPECIAL[0]),
        **more,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory
