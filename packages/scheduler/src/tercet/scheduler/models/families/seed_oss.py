"""Seed-OSS: Llama with biases of queries, keys and values, and of the output if the config has them."""

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import BIASES, field_table
from tercet.scheduler.models.family import ModelFamily

FAMILIES = (
    ModelFamily(
        architectures=("SeedOssForCausalLM", "SeedOssModel"),
        fields=field_table(BIASES + "attention_out_bias", ships_own_code=True),
        defaults=ConfigDefaults(
            head_dim=128, attention_bias=("attention_bias", True), output_bias="attention_out_bias"
        ),
        pad_token_id=1,
    ),
)
