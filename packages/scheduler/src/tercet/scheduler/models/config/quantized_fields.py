"""The fields of `quantization_config` that transformers, gptqmodel and compressed-tensors read, by method.

A GPU may round activations to the 8 bits that a checkpoint of 8-bit weights names; nothing else rounds them.
"""

from tercet.scheduler.file_fields import FileFields, Only

_BY_TENSORS = "the stored tensors show which layers are quantized"
_CALIBRATION = "used while quantizing only"
_KERNELS = "a choice of the reference's kernels"
_STORED = "scales are read as stored"
_NOTE = "a note about how the file was made"
_CACHE = "--kv-cache-dtype chooses how keys and values are kept; their scales are read"

_GPTQ_NO_EFFECT = {
    "act_group_aware": _CALIBRATION,
    "batch_size": _CALIBRATION,
    "block_name_to_quantize": _BY_TENSORS,
    "cache_block_outputs": _CALIBRATION,
    "damp_auto_increment": _CALIBRATION,
    "damp_percent": _CALIBRATION,
    "dataset": _CALIBRATION,
    "disable_exllama": _KERNELS,
    "exllama_config": _KERNELS,
    "max_input_length": _KERNELS,
    "meta": _NOTE,
    "method": _NOTE,
    "model_file_base_name": _NOTE,
    "model_name_or_path": _NOTE,
    "model_seqlen": _CALIBRATION,
    "module_name_preceding_first_block": _CALIBRATION,
    "modules_in_block_to_quantize": _BY_TENSORS,
    "mse": _CALIBRATION,
    "pad_token_id": _CALIBRATION,
    "static_groups": _CALIBRATION,
    "sym": "zero points are read from the file in either case",
    "tokenizer": _CALIBRATION,
    "true_sequential": _CALIBRATION,
    "use_cuda_fp16": _KERNELS,
    "use_exllama": _KERNELS,
}
_GPTQ_REFUSED = {
    "activation": Only("transforms of activations are not computed"),
    "adapter": Only("adapters inside quantized checkpoints are not computed"),
    "is_marlin_format": Only("weights repacked for Marlin are not read"),
    "lm_head": Only("quantized heads are not read"),
    "pack_dtype": Only("only words of int32 are read", ("int32",)),
    "rotation": Only("rotations of activations are not computed"),
}
GPTQ = FileFields(
    honoured=frozenset(
        {"quant_method", "bits", "w_bit", "group_size", "q_group_size", "format", "checkpoint_format"}
        | {"desc_act", "dynamic"}
    ),
    no_effect=_GPTQ_NO_EFFECT | {"backend": _KERNELS},
    refused=_GPTQ_REFUSED,
)
_AWQ_BACKENDS = (
    *("auto", "auto_trainable", "autoawq", "machete", "marlin", "exllama_v1", "exllama_v2"),
    *("gemm", "gemm_triton", "gemv", "gemv_fast", "torch_awq", "torch_fused_awq"),
)
AWQ = FileFields(
    honoured=frozenset(
        {"quant_method", "bits", "w_bit", "group_size", "q_group_size", "version", "format", "zero_point"}
    ),
    no_effect=_GPTQ_NO_EFFECT
    | {
        "checkpoint_format": "not read for AWQ",
        "desc_act": "AWQ does not reorder columns",
        "do_fuse": _KERNELS,
        "fuse_max_seq_len": _KERNELS,
        "modules_to_fuse": _KERNELS,
        "modules_to_not_convert": _BY_TENSORS,
    },
    refused=_GPTQ_REFUSED
    | {
        "backend": Only("checkpoints packed by llm-awq are not read", _AWQ_BACKENDS),
        "dynamic": Only("layers with settings of their own are not read"),
    },
)
FP8 = FileFields(
    honoured=frozenset({"quant_method", "weight_block_size"}),
    no_effect={
        "dequantize": "the weights have the same values",
        "ignored_layers": _BY_TENSORS,
        "kv_cache_quant_method": _CACHE,
        "kv_cache_scheme": _CACHE,
        "modules_to_not_convert": _BY_TENSORS,
    },
    refused={
        "activation_scheme": Only("only dynamic and static are known", ("dynamic", "static")),
        "expert_dtype": Only("only experts in fp8 are read", ("fp8",)),
        "fmt": Only("only e4m3 is read", ("e4m3",)),
        "modules_to_convert": Only("only linear layers may be quantized"),
        "quantization": Only("only e4m3 is read", ("e4m3", "fp8")),
        "scale_fmt": Only("only scales stored as floats are read", ("float", "ue8m0")),
    },
)
MXFP4 = FileFields(
    honoured=frozenset({"quant_method"}),
    no_effect={"dequantize": "the weights have the same values", "modules_to_not_convert": _BY_TENSORS},
)
_FORMS = ("float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized", "pack-quantized")
MODELOPT = FileFields(
    honoured=frozenset({"quant_method", "quant_algo", "group_size"}),
    no_effect={
        "config_groups": "the stored tensors and quant_algo say the same",
        "exclude_modules": _BY_TENSORS,
        "ignore": _BY_TENSORS,
        "kv_cache_quant_algo": _CACHE,
        "kv_cache_scheme": _CACHE,
        "producer": _NOTE,
    },
    refused={
        "has_zero_point": Only("zero points are not read", (False,)),
        "pre_quant_scale": Only("scales of inputs are not multiplied", (False,)),
        "quantized_layers": Only("layers with settings of their own are not read"),
    },
)
COMPRESSED_TENSORS = FileFields(
    honoured=frozenset({"quant_method", "config_groups"}),
    no_effect={
        "dequantize": "the weights have the same values",
        "global_compression_ratio": _NOTE,
        "ignore": _BY_TENSORS,
        "kv_cache_scheme": _CACHE,
        "quantization_status": _NOTE,
        "run_compressed": _KERNELS,
        "use_optimized_inference": _KERNELS,
        "version": _NOTE,
    },
    refused={
        "format": Only("only fp8, int8, packed int4 and NVFP4 are read", _FORMS),
        "moe_sparsity_config": Only("sparse experts are not computed"),
        "sparsity_config": Only("sparse weights are not read"),
        "transform_config": Only("transforms of weights and activations are not computed"),
    },
)
COMPRESSED_GROUP = FileFields(
    honoured=frozenset({"weights", "input_activations"}),
    no_effect={"targets": _BY_TENSORS},
    refused={
        "format": Only("only fp8, int8, packed int4 and NVFP4 are read", _FORMS),
        "output_activations": Only("outputs are not rounded here"),
    },
)
COMPRESSED_WEIGHTS = FileFields(
    honoured=frozenset({"num_bits", "type", "strategy", "block_structure", "group_size", "symmetric"}),
    no_effect={
        "observer": _CALIBRATION,
        "observer_kwargs": _CALIBRATION,
        "scale_dtype": _STORED,
        "zp_dtype": "zero points are read as stored",
    },
    refused={
        "actorder": Only("columns that are reordered are not read"),
        "dynamic": Only("weights are quantized once"),
    },
)
