"""Architectures that run on transformers' own modules, against transformers with attention of its own."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tercet.kernels.native.library import missing_library
from tercet.protocol.messages.values import SamplingParams, pack_ints, unpack_floats
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor import loading
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.hugging_face import read_shape

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDES = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma2": {**SLIDES, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "Gemma3Text": {**SLIDES, "head_dim": 16, "query_pre_attn_scalar": 16},
    "GraniteMoe": {**EXPERTS, "initializer_range": 0.2},
    "GraniteSWA": {**SLIDES, "attention_multiplier": 0.25, "layer_rope_theta": [1e4, 0.0, 1e4, 1e3]},
    "Cohere2": SLIDES,
    "Glm4": {"head_dim": 16},
    "Olmo2": {},
    "GPTNeoX": {"num_key_value_heads": 4},
    "Starcoder2": {"use_bias": True},
    "GPT2": {"n_inner": 96, "num_key_value_heads": 4},
}
"""transformers' name of each, and what its config has beside the shape."""
NAMES = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
"""Where models are called otherwise than configs."""
SEES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
SEEING: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3": ("Gemma3Text", "siglip_vision_model", {"patch_size": 14}, {"mm_tokens_per_image": 4}),
    "Mistral3": ("Mistral", "pixtral", {"patch_size": 14, "head_dim": 16}, {"image_token_index": 290}),
    "Llava": ("Llama", "clip_vision_model", {"patch_size": 14}, {"image_token_index": 290}),
}
"""Of models that read images, too: what reads text, what sees, and what their configs have beside the shapes."""
NATIVE = pytest.mark.skipif(bool(missing_library()), reason=missing_library())
PROMPTS = [list(range(30, 71)), [7, 200, 45]]


def make(family: str, directory: Path) -> Path:
    """A random checkpoint in float32, whose norms and biases are no ones and zeros."""
    config = getattr(transformers, f"{family}Config")(**(SHAPE | FAMILIES[family]))
    with torch.random.fork_rng():
        torch.manual_seed(sum(family.encode()))
        model = getattr(transformers, NAMES.get(family, f"{family}ForCausalLM"))(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or "sinks" in name:
                torch.nn.init.normal_(parameter, float(parameter.detach().mean()), 0.2)
    model.save_pretrained(directory)
    return directory


def make_seeing(family: str, directory: Path) -> Path:
    """The same of a model that reads images, too."""
    reader, eye, sees, more = SEEING[family]
    text = getattr(transformers, f"{reader}Config")(**(SHAPE | FAMILIES.get(reader, {}))).to_dict()
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config={"model_type": eye, **SEES, **sees}, **more
    )
    with torch.random.fork_rng():
        torch.manual_seed(sum(family.encode()))
        getattr(transformers, f"{family}ForConditionalGeneration")(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes each checkpoint once."""
    directories: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in directories:
            directories[family] = make(family, tmp_path_factory.mktemp(family))
        return directories[family]

    return of


@pytest.fixture(autouse=True)
def hosted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here also what Tercet has modules of its own for runs on those of transformers."""
    monkeypatch.setattr(loading, "is_ours", lambda _: False)


def options(directory: Path, **given: Any) -> WorkerOptions:
    return WorkerOptions(model=directory, device="cpu", slots=2, page_size=4, kv_cache_bytes=1 << 24, **given)


def generate(
    worker: TpModelWorker, steps: int, chunk: int = 17, prompts: Sequence[list[int]] = PROMPTS
) -> list[list[tuple[int, float]]]:
    """Greedy tokens of each prompt and their log-probabilities: while one comes in chunks, the other decodes."""
    sampling = SamplingParams(max_new_tokens=steps, temperature=0.0)
    inits = [
        SlotInit(
            slot=slot, tokens=pack_ints(tokens), prompt_tokens=len(tokens), choice=0, sampling=sampling, top_logprobs=0
        )
        for slot, tokens in enumerate(prompts)
    ]
    most = min(30, worker.capacity.context_length // 4)
    pages = [PageUpdate(slot, 0, [[*range(slot, 2 * most, 2)]]) for slot in (0, 1)]
    lengths, ends, step = [0, 0], [len(tokens) for tokens in prompts], 0
    said: list[list[tuple[int, float]]] = [[], []]
    while any(len(tokens) < steps for tokens in said):
        rows = []
        for slot in (0, 1):
            count = max(1, min(chunk, ends[slot] - lengths[slot]))
            rows.append(Row(slot, lengths[slot], count, sample=lengths[slot] + count >= ends[slot]))
            lengths[slot] += count
        plan = Plan(step=step, introduce=[] if step else inits, pages=[] if step else pages, rows=rows)
        result = worker.submit(plan).result()
        for index, scores in result.logprobs.items():
            said[rows[index].slot].append((result.token_ids[index], unpack_floats(scores.chosen)[0]))
        step += 1
    return [tokens[:steps] for tokens in said]


@torch.inference_mode()
def expected(directory: Path, steps: int, prompts: Sequence[list[int]] = PROMPTS) -> list[list[tuple[int, float]]]:
    """The same, each token of a forward over all before it."""
    kind = getattr(transformers, json.loads((directory / "config.json").read_text())["architectures"][0])
    model = kind.from_pretrained(directory, attn_implementation="eager")
    texts: list[list[tuple[int, float]]] = []
    for prompt in prompts:
        texts.append([])
        for _ in range(steps):
            ids = torch.tensor([prompt + [token for token, _ in texts[-1]]])
            score, token = model(ids, use_cache=False).logits[0, -1].float().log_softmax(-1).max(-1)
            texts[-1].append((int(token), float(score)))
    return texts


def assert_alike(texts: list[list[tuple[int, float]]], wanted: list[list[tuple[int, float]]]) -> None:
    for mine, theirs in zip(texts, wanted, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in theirs]
        assert [score for _, score in mine] == pytest.approx([score for _, score in theirs], abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["torch_native", "auto"])
def test_says_what_transformers_says(family: str, backend: str, made: Callable[[str], Path]) -> None:
    worker = TpModelWorker(options(made(family), attention_backend=backend))
    actual = generate(worker, 16)
    worker.close()
    assert_alike(actual, expected(made(family), 16))


@pytest.mark.parametrize("family", SEEING)
def test_what_reads_images_too_says_of_text_what_transformers_says(family: str, tmp_path: Path) -> None:
    worker = TpModelWorker(options(make_seeing(family, tmp_path)))
    assert_alike(generate(worker, 8), expected(tmp_path, 8))
    worker.close()


@pytest.mark.parametrize("family", ["Gemma2", "GraniteSWA", "Cohere2"])
def test_windows_count(family: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    """The checkpoints above do tell a model with its window from one without."""
    blind = shutil.copytree(made(family), tmp_path / "blind")
    config = json.loads((blind / "config.json").read_text())
    (blind / "config.json").write_text(json.dumps(config | {"layer_types": ["full_attention"] * 4}))
    right, wrong = (
        generate(TpModelWorker(options(directory, attention_backend="torch_native")), 4)
        for directory in (made(family), blind)
    )
    assert [score for _, score in right[0]] != pytest.approx([score for _, score in wrong[0]], abs=1e-3)


def test_bfloat16_and_random_weights(made: Callable[[str], Path]) -> None:
    worker = TpModelWorker(options(made("Starcoder2"), dtype="bfloat16", load_format="dummy"))
    assert {len(tokens) for tokens in generate(worker, 4)} == {4}
    worker.close()


def test_the_shape_that_is_served(made: Callable[[str], Path]) -> None:
    shape = read_shape(made("Gemma3Text"), "float32")
    assert (shape.architecture, shape.layers, shape.kv_heads, shape.head_dim) == ("Gemma3ForCausalLM", 4, 2, 16)
    assert (shape.vocab_size, shape.context_length, shape.eos_token_ids) == (300, 256, (2,))


def test_a_stretched_embedding_is_served_as_far_as_it_was_trained(made: Callable[[str], Path], tmp_path: Path) -> None:
    """Beyond, the tokens of one row would change how those of all others are turned."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    directory = changed(made("Starcoder2"), tmp_path, {"rope_parameters": rope})
    assert read_shape(directory, "float32").context_length == 64
    kinds = {
        "full_attention": {**rope, "original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default"},
    }
    directory = changed(made("Gemma3Text"), tmp_path / "other", {"rope_parameters": kinds})
    assert read_shape(directory, "float32").context_length == 32


@pytest.mark.parametrize(("said", "ends"), [(7, (7,)), ([7, 8], (7, 8)), (None, (2,))])
def test_what_ends_a_text(said: Any, ends: tuple[int, ...], made: Callable[[str], Path], tmp_path: Path) -> None:
    """A model that reads more than text says it in one of two places, or in a file of its own."""
    text = json.loads((made("Gemma3Text") / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": said}))
    assert read_shape(tmp_path, "float32").eos_token_ids == ends
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9]}))
    assert read_shape(tmp_path, "float32").eos_token_ids == (9,)


def changed(directory: Path, target: Path, changes: dict[str, Any]) -> Path:
    """A copy of a checkpoint with another config.json."""
    copy = shutil.copytree(directory, target / "changed")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "unheard_of"}, "config.json: transformers cannot read it: .*unheard_of"),
        (
            {"architectures": ["Starcoder2ForTokenClassification"]},
            "is not supported: transformers has Starcoder2ForCausalLM for it",
        ),
        ({"architectures": ["T5Model"], "model_type": "t5"}, "is not supported: transformers has no decoder for it"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "cannot be given another attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: weights in few bits"),
        ({"use_cache": 1.5}, "transformers cannot read it: .*use_cache"),
        ({"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"}, "transformers cannot read it"),
        ({"layer_types": ["full_attention", "conv"] * 2}, "layer_types: conv is not supported"),
        ({"num_hidden_layers": 5}, "does not fit its config.json: missing: .*layers.4"),
        ({"intermediate_size": 100}, r"of the wrong shape: model\.layers\.0\.mlp\.c_fc\.bias \[96\] inst"),
    ],
)
def test_what_cannot_be_served_is_refused(
    changes: dict[str, Any], message: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = changed(made("Starcoder2"), tmp_path, changes)
    with pytest.raises(ModelError, match=message):
        TpModelWorker(options(directory))


def test_a_file_that_is_cut_off_is_refused(made: Callable[[str], Path], tmp_path: Path) -> None:
    directory = changed(made("Starcoder2"), tmp_path, {})
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        TpModelWorker(options(directory))


def test_no_code_of_a_model_is_run(made: Callable[[str], Path], tmp_path: Path) -> None:
    """Some models are published with code of their own beside what transformers has."""
    directory = changed(made("Starcoder2"), tmp_path, {"auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    (directory / "evil.py").write_text("raise SystemExit('run')")
    worker = TpModelWorker(options(directory))
    assert_alike(generate(worker, 3), expected(made("Starcoder2"), 3))
    worker.close()


@NATIVE
@pytest.mark.parametrize(("quantization", "far"), [("int8", 0.1), ("int4", 2.0)])
def test_weights_are_rounded_as_they_are_loaded(quantization: Any, far: float, made: Callable[[str], Path]) -> None:
    exact, rounded = (
        generate(TpModelWorker(options(made("Starcoder2"), quantization=given)), 1) for given in ("none", quantization)
    )
    distances = [abs(mine[0][1] - theirs[0][1]) for mine, theirs in zip(rounded, exact, strict=True)]
    assert 0 < max(distances) < far


@NATIVE
def test_what_has_no_native_kernels_is_not_rounded(made: Callable[[str], Path]) -> None:
    for given, why in (
        ({"attention_backend": "torch_native"}, "attention backend 'cpu'"),
        ({"dtype": "float16"}, "float16"),
    ):
        with pytest.raises(ValueError, match=f"quantization int8 needs native kernels: .*{why}"):
            TpModelWorker(options(made("Starcoder2"), quantization="int8", **given))
