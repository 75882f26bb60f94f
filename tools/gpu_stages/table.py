"""Table of the README: every target, with the results of one machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.gpu_stages.processes import NOT_RUN
from tools.gpu_stages.records import trouble_of

Measured = tuple[str, bool | None]
"""(figure, whether it reaches the target; None without a target)"""

_MEMORY_BOUND = 0.85

_WHY = {
    "fused sample all": "computes ten rounds of a generator for every token, and read all logits twice on 2026-11-26",
    "fused sample top-p": "read all logits three times and drew rejected rows again on 2026-11-26; no longer",
    "fused bitmask": "writes every other number, so half of each sector",  # old name of `fused grammar mask`
    "fused latent decode": "writes parts of splits and reads them again, a tenth of its bytes",
    "fused grammar mask": "waits for the mask before it writes 33 MB, all in 11 us",
    "fused fp8 linear, 16 rows": "widens weights by arithmetic",
    "fused int8 linear, 16 rows": "widens weights by arithmetic",
    "fused int4 linear, 1 row": "makes numbers of codes by arithmetic",
    "fused int4 linear, 16 rows": "widens weights by arithmetic",
    "fused lora, an adapter each": "multiplied in float32 on 2026-11-26, two programs to a multiprocessor; no longer",
    "fused lora, one adapter": "read the adapter for every 16 tokens on 2026-11-26; now for every 64",
}
"""Bound of a memory-bound operation that is below its target; others are not explained."""


@dataclass(frozen=True)
class Row:
    """Row of the table. `read` finds it in a stage's results, and raises KeyError if it is missing."""

    work: str
    target: str
    stage: str
    read: Callable[[Mapping[str, Any]], Measured]


def _decoded(batch: int, least: float) -> Callable[[Mapping[str, Any]], Measured]:
    def read(results: Mapping[str, Any]) -> Measured:
        found = results[f"batch {batch}"]
        share = found["share_of_limit"]
        return f"{found['ms_per_token']:.2f} ms, {share:.0%} of the limit of {found['limit_ms']:.2f} ms", share >= least

    return read


def _single(results: Mapping[str, Any]) -> Measured:
    said, _ = _decoded(1, 0.0)(results)
    return said, results["batch 1"]["ms_per_token"] <= 4.0


def _wide(results: Mapping[str, Any]) -> Measured:
    if "wide tables" not in results:
        return "not measured", None
    found = {name: row for name, row in results["wide tables"].items() if name.startswith("batch ")}
    parts = [f"{batch}: {row['ms_per_token']:.2f} ms ({row['share_of_limit']:.0%})" for batch, row in found.items()]
    return f"{', '.join(parts)} of the limits", None


def _rotation(results: Mapping[str, Any]) -> Measured:
    apart = {batch: found["ms_per_token"] for batch, found in results["two kernels"].items()}
    parts = [
        f"{batch}: {results['one kernel'][batch]['ms_per_token']:.2f} ms for {ms:.2f}" for batch, ms in apart.items()
    ]
    return ", ".join(parts), None


def _prefill(results: Mapping[str, Any]) -> Measured:
    share = results["share_of_matmul"]
    return f"{results['tokens_per_s']:,.0f} tokens/s, {share:.0%} of the matrix rate", share >= 0.65


def _offline(results: Mapping[str, Any]) -> Measured:
    speed = results["output_tokens_per_s"]
    return f"{speed:,.0f} output tokens/s", speed >= 5500


def _small(name: str) -> Callable[[Mapping[str, Any]], Measured]:
    return lambda results: (f"{results[name]['output_tokens_per_s']:,.0f} output tokens/s", None)


def _ratio(least: float) -> Callable[[Mapping[str, Any]], Measured]:
    return lambda results: (f"{results['ratio']:.1f} times", results["ratio"] >= least)


def _ready(results: Mapping[str, Any]) -> Measured:
    return f"{results['warm_s']:.1f} s", results["warm_s"] < 20


def _idle(name: str, most: float) -> Callable[[Mapping[str, Any]], Measured]:
    return lambda results: (f"{results[name]['idle_share']:.1%}", results[name]["idle_share"] <= most)


def _python(results: Mapping[str, Any]) -> Measured:
    spent = results["batch 256"]["outside_ms"]
    return f"{spent:.2f} ms", spent < 1


def _launches(results: Mapping[str, Any]) -> Measured:
    parts = [f"{name}: {found['launch_share']:.0%}" for name, found in results.items()]
    return f"launching takes {', '.join(parts)} of a step", not any(
        found["graphs_would_pay"] for found in results.values()
    )


def _operations(results: Mapping[str, Any]) -> Measured:
    bound = {name: found["share"] for name, found in results.items() if found["unit"] == "GB/s" and "fused" in name}
    low = {name: share for name, share in bound.items() if share < _MEMORY_BOUND}
    parts = [f"{name} {share:.0%}" + (f" ({_WHY[name]})" if name in _WHY else "") for name, share in low.items()]
    said = f"{len(bound) - len(low)} of {len(bound)}"
    return (f"{said}; below: {', '.join(parts)}" if low else said), not low


def _correct(results: Mapping[str, Any]) -> Measured:
    said = [*results["checks"].values()]
    missing = sum(word.startswith(NOT_RUN) for word in said)
    return _summed(results["wrong"], f"{said.count('ok')} checks right", missing)


def _compared(what: str) -> Callable[[Mapping[str, Any]], Measured]:
    def read(results: Mapping[str, Any]) -> Measured:
        found = [*results["compared"].values()]
        right = sum(bool(one.get("right")) for one in found)
        missing = sum(one.get("trouble") == NOT_RUN for one in found)
        return _summed(results["wrong"], f"{right} {what} right", missing)

    return read


def _summed(wrong: Sequence[str], right: str, missing: int) -> Measured:
    """Return the summary of checks that are right, wrong, or unknown."""
    said = f"wrong: {', '.join(wrong)}" if wrong else right
    return f"{said}; {missing} not run" if missing else said, not wrong and not missing


def _troubled(trouble: str) -> Measured:
    return trouble, None if trouble == NOT_RUN else False


def _model(results: Mapping[str, Any]) -> Measured:
    parts = [f"{name} {found['alike']} of {found['tokens']}" for name, found in results.items()]
    return ", ".join(parts), all(found["alike"] > 0 for found in results.values())


def _replaced(results: Mapping[str, Any]) -> Measured:
    found = results["replaced"]
    if "trouble" in found:
        return _troubled(found["trouble"])
    return f"{found['far']:.1e} apart; the old ones {found['moved']:.1e}", found["right"]


def _assumed(results: Mapping[str, Any]) -> Measured:
    parts = []
    for name, one in results["compared"].items():
        said = one["trouble"] if "trouble" in one else f"{one['alike']} of {one['tokens']} tokens"
        apart = f" ({one['far']:.1e} apart, {one['moved']:.1e} after a wrong one)" if "far" in one else ""
        parts.append(f"{name}: {said}{apart}")
    missing = any(one.get("trouble") == NOT_RUN for one in results["compared"].values())
    return ", ".join(parts), False if results["wrong"] else None if missing else True


def _guessing(results: Mapping[str, Any]) -> Measured:
    found = results["timed"]
    if "trouble" in found:
        return _troubled(found["trouble"])
    parts = []
    for batch, steps in found.items():
        times = [f"{rows} {one['ms']:.2f} ms" for rows, one in steps.items()]
        parts.append(f"{batch}: {', '.join(times)} ({steps['1 row']['ahead_ms']:.2f} ms ahead of results)")
    return "; ".join(parts), None


def _adapters(results: Mapping[str, Any]) -> Measured:
    found = results["timed"]
    if "trouble" in found:
        return _troubled(found["trouble"])
    parts = [
        f"{batch}: {', '.join(format(one['ms_per_token'], '.2f') for one in turns.values())} ms"
        for batch, turns in found.items()
        if batch.startswith("batch ")
    ]
    speeds = ", ".join(f"{speed:,.0f}" for speed in found["prefill_tokens_per_s"].values())
    return f"{', '.join(parts)}; prompts {speeds} tokens/s", None


def _form(name: str) -> Callable[[Mapping[str, Any]], Measured]:
    def read(results: Mapping[str, Any]) -> Measured:
        found = results["timed"][name]
        if "trouble" in found:
            return _troubled(found["trouble"])
        return _per_token(found), None

    return read


def _per_token(found: Mapping[str, Any]) -> str:
    """Return the milliseconds of each batch, the shares of the limits, and the speed of prompts."""
    batches = [batch for batch in found if batch.startswith("batch ")]
    times = [f"{batch}: {found[batch]['ms_per_token']:.2f} ms" for batch in batches]
    limits = ", ".join(f"{found[batch]['share_of_limit']:.0%}" for batch in batches)
    said = f"{', '.join(times)} ({limits} of the limits)"
    return f"{said}, {found['layers']} layers; prompts {found['prefill_tokens_per_s']:,.0f} tokens/s"


def _mixture(name: str, least: float) -> Callable[[Mapping[str, Any]], Measured]:
    """Return the reader of a mixture, whose batches are all to reach a share of the limit."""

    def read(results: Mapping[str, Any]) -> Measured:
        found = results["timed"][name]
        if "trouble" in found:
            return _troubled(found["trouble"])
        shares = [row["share_of_limit"] for batch, row in found.items() if batch.startswith("batch ")]
        return _per_token(found), min(shares) >= least

    return read


def _torch(kernel: str, other: str) -> Callable[[Mapping[str, Any]], Measured]:
    """Return the reader of the time of a kernel as a share of another's, by size."""

    def read(results: Mapping[str, Any]) -> Measured:
        both = results["timed"][kernel], results["timed"][other]
        if troubles := [found["trouble"] for found in both if "trouble" in found]:
            return _troubled(troubles[0])
        shares = [f"{size}: {share:.2f}" for size in both[0] if (share := ratio_of(*both, size)) is not None]
        return ", ".join(shares) or f"refused: {next(iter(both[0].values()))}", None

    return read


def ratio_of(mine: Mapping[str, Any], other: Mapping[str, Any], size: str) -> float | None:
    """Return a kernel's time as a share of another's; None where one of them is refused."""
    times = mine[size], other[size]
    return times[0] / times[1] if all(isinstance(each, float) for each in times) else None


ROWS: Sequence[Row] = [
    Row("every kernel and attention backend against its definition", "all right", "correctness", _correct),
    Row("greedy tokens alike with plain torch attention, two layers", "report", "model", _model),
    Row("memory-bound fused operations at 85% of the copy bandwidth", "all", "operations", _operations),
    Row("Llama-3.1-8B, batch 1, 1k context", "<= 4.0 ms a token", "decode", _single),
    Row("Llama-3.1-8B, batch 32, 1k context", ">= 80% of the limit", "decode", _decoded(32, 0.8)),
    Row("Llama-3.1-8B, batch 256, 1k context", ">= 80% of the limit", "decode", _decoded(256, 0.8)),
    Row("the same batches where requests may have 131,072 tokens, as a server's by default", "report", "decode", _wide),
    Row(
        "the same, new tokens rotated by Triton's attention itself, for a kernel before it",
        "report",
        "rotation",
        _rotation,
    ),
    Row("tokens assumed in one step against steps one after another, two layers", "the same", "speculation", _assumed),
    Row(
        "a step of Llama-3.1-8B, 1k context, by the rows of each choice: as many tokens as are assumed, and one",
        "report",
        "speculation_times",
        _guessing,
    ),
    Row("prefill of 8k-token prompts", ">= 65% of the matrix rate", "prefill", _prefill),
    Row("prefill: does launching hold the device up?", "no", "launches", _launches),
    Row(
        "weights and caches in 8 and 4 bits against plain torch, two layers",
        "all right",
        "quantised",
        _compared("forms"),
    ),
    Row("a token of Llama-3.1-8B, 1k context: weights in full", "report", "quantised_times", _form("full")),
    Row("the same, keys and values in 8 bits", "report", "quantised_times", _form("full, fp8 cache")),
    Row("the same, fp8 weights and activations", "report", "quantised_times", _form("fp8")),
    Row(
        "the same, fp8 weights, activations in full",
        "report",
        "quantised_times",
        _form("fp8, activations in full"),
    ),
    Row("the same, int8 weights and activations", "report", "quantised_times", _form("int8")),
    Row("the same, fp8 weights in blocks", "report", "quantised_times", _form("fp8 block")),
    Row("the same, int4 weights (AWQ, GPTQ)", "report", "quantised_times", _form("int4")),
    Row(
        "a token of Qwen3-30B-A3B, 24 of 48 layers, 1k context",
        ">= 80% of the limits",
        "mixtures",
        _mixture("qwen3-30b-a3b, 24 layers", 0.8),
    ),
    Row("a token of DeepSeek-V2-Lite, 1k", ">= 80% of the limits", "mixtures", _mixture("deepseek-v2-lite", 0.8)),
    Row("a token of gpt-oss-20b, MXFP4, 1k", ">= 75% of the limits", "mixtures", _mixture("gpt-oss-20b", 0.75)),
    Row("a token of gpt-oss-120b, MXFP4, 1k", ">= 75% of the limits", "mixtures", _mixture("gpt-oss-120b", 0.75)),
    Row("prompts: cuDNN's time over ours", "report", "torch_kernels", _torch("attention, cuDNN", "attention, own")),
    Row(
        "products of a layer: `_scaled_mm` with a scale a row over bf16",
        "report",
        "torch_kernels",
        _torch("product, _scaled_mm, row", "product, full"),
    ),
    Row("the same: `_int_mm` over bf16", "report", "torch_kernels", _torch("product, _int_mm", "product, full")),
    Row("the same: ours in fp8 over bf16", "report", "torch_kernels", _torch("product, own fp8", "product, full")),
    Row("the same: ours in int4 over bf16", "report", "torch_kernels", _torch("product, own int4", "product, full")),
    Row(
        "experts: `_grouped_mm` over ours with routing",
        "report",
        "torch_kernels",
        _torch("experts, _grouped_mm", "experts, own"),
    ),
    Row("adapters (LoRA) against float32, two layers", "all right", "adapters", _compared("cases")),
    Row(
        "a token of Llama-3.1-8B with adapters of rank 16, 1k context: nobody has one, all the same, each one of eight",
        "report",
        "adapter_times",
        _adapters,
    ),
    Row("other weights under a running worker beside one made with them", "the same", "weights", _replaced),
    Row("offline, 500 requests, input U(1..4096), output U(1..2048)", ">= 5,500 output tokens/s", "offline", _offline),
    Row("Qwen3-0.6B, 256 requests, in/out U(100..1024)", "report", "small_models", _small("qwen3-0.6b")),
    Row("Qwen3-14B, 256 requests, in/out U(100..1024)", "report", "small_models", _small("qwen3-14b")),
    Row("Qwen3-0.6B, batch 256: what Python adds to a step", "<= 10%", "idle", _idle("qwen3-0.6b", 0.1)),
    Row("GPU idle in a decode run of Llama-3.1-8B, batch 256", "< 3%", "idle", _idle("batch 256", 0.03)),
    Row("Python outside the forward, a step of batch 256", "< 1 ms", "step", _python),
    Row("output tokens/s over transformers' continuous batching, 64 requests", ">= 4 times", "transformers", _ratio(4)),
    Row("90% shared 2k prefix, over the prefix cache off", ">= 2.5 times", "shared_prefix", _ratio(2.5)),
    Row("ready after start, 8B with random weights, warm caches", "< 20 s", "ready", _ready),
]


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return Markdown from the records of one machine by stage. Missing records were not measured.

    If kernels were wrong, the table and every later figure say so.
    """
    lines = [f"**Correctness failed, {date}: {trouble}.**\n" for date, trouble in sorted(_failures(records).items())]
    lines += ["| work | target | measured | reached |", "|---|---|---|---|"]
    for row in ROWS:
        said, reached = _read(row, records.get(row.stage))
        word = "-" if reached is None else "yes" if reached else "**no**"
        lines.append(f"| {row.work} | {row.target} | {said} | {word} |")
    return "\n".join(lines)


def _failures(records: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the failures by the date of the record that shows them."""
    known = [_known(record) for record in records.values()]
    if "correctness" in records:
        known.append({"date": records["correctness"]["date"], "trouble": trouble_of(records["correctness"])})
    return {each["date"]: each["trouble"] for each in known if each["trouble"]}


def _known(record: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the correctness known when a record was begun; empty for old records without it."""
    return record.get("correctness") or {"date": "", "trouble": ""}


def _read(row: Row, record: Mapping[str, Any] | None) -> Measured:
    if record is None or not record["results"]:
        return "not measured", None
    try:
        said, reached = row.read(record["results"])
    except KeyError:
        return "not measured: the stage was cut off", None
    notes = [] if record["complete"] else ["cut off"]
    notes += ["correctness failed"] if _known(record)["trouble"] else []
    return (f"{said} ({'; '.join(notes)})" if notes else said), reached
