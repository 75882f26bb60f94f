"""Which layers of a model see only a window, and which do not rotate, in the words of each family's config.json."""

from tercet.scheduler.executor.config_fields import Fields, wrong


def windows_of(fields: Fields, architecture: str, layers: int) -> tuple[int, ...]:
    """Mistral slides in all layers unless told null, Mixtral and Phi-3 if told; others in those they name or imply."""
    match architecture:
        case "GptOssForCausalLM":
            null = fields.values.get("sliding_window", 128) is None
            window = 0 if null else fields.count("sliding_window", 128)
            return tuple(window if slides else 0 for slides in _sliding_layers(fields, architecture, layers))
        case "Dots1ForCausalLM":
            null = fields.values.get("sliding_window", 4096) is None
            window = 0 if null else fields.count("sliding_window", 4096)
            return tuple(window if slides else 0 for slides in _sliding_layers(fields, architecture, layers))
        case "MistralForCausalLM":
            null = fields.values.get("sliding_window", 4096) is None
            return (0 if null else fields.count("sliding_window", 4096),) * layers
        case "MixtralForCausalLM" | "Phi3ForCausalLM":
            return (fields.count("sliding_window") if fields.has("sliding_window") else 0,) * layers
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM" | "Qwen2MoeForCausalLM" | "Qwen3MoeForCausalLM":
            if not fields.flag("use_sliding_window"):
                return (0,) * layers
            window = fields.count("sliding_window", 4096)
            return tuple(window if slides else 0 for slides in _sliding_layers(fields, architecture, layers))
        case "Gemma2ForCausalLM" | "Gemma3ForCausalLM" | "Gemma3ForConditionalGeneration":
            window = fields.count("sliding_window")
            return tuple(window if slides else 0 for slides in _sliding_layers(fields, architecture, layers))
        case "SmolLM3ForCausalLM":
            told = fields.flag("use_sliding_window") and fields.has("sliding_window")
            window = fields.count("sliding_window") if told else 0
            return tuple(window if slides else 0 for slides in _sliding_layers(fields, architecture, layers))
    return (0,) * layers


def unrotated_layers(fields: Fields, layers: int) -> frozenset[int]:
    """The layers that `no_rope_layers` has a 0 for; left out, every fourth or as often as the config says."""
    name = "no_rope_layers"
    every = fields.count("no_rope_layer_interval", 4)
    rotates = fields.values.get(name)
    if rotates is None:
        rotates = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotates, list) or len(rotates) != layers or any(one not in (0, 1) for one in rotates):
        raise wrong(name, f"must say 0 or 1 for each of the {layers} layers")
    return frozenset(layer for layer, one in enumerate(rotates) if not one)


def _sliding_layers(fields: Fields, architecture: str, layers: int) -> list[bool]:
    """Of a model with windows: which of its layers slide."""
    kinds = fields.values.get("layer_types")
    if architecture == "Qwen3MoeForCausalLM":
        return [True] * layers
    if kinds is None and architecture == "GptOssForCausalLM":
        return [layer % 2 == 0 for layer in range(layers)]
    if kinds is None and architecture == "SmolLM3ForCausalLM":
        unrotated = unrotated_layers(fields, layers)
        return [layer in unrotated for layer in range(layers)]
    if kinds is None:
        border = fields.count("max_window_layers", 62 if architecture == "Dots1ForCausalLM" else 28, least=0)
        if architecture == "Qwen2MoeForCausalLM":
            return [layer < border and layer % 2 == 0 for layer in range(layers)]
        return [layer >= border for layer in range(layers)]
    names = ["full_attention", "sliding_attention"]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in names for kind in kinds):
        raise wrong("layer_types", f"must say {' or '.join(names)} for each of the {layers} layers")
    return [kind == "sliding_attention" for kind in kinds]
