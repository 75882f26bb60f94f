"""Tests of the table of peers: medians, rows left out because of other processes, wrong answers."""

from pathlib import Path
from typing import Any

from tools.bench_peers import OURS, OURS_INT8, Peer, table

PEERS = [Peer(OURS, ""), Peer("llama-server", ""), Peer("vLLM", "")]


def row(peer: str, load: str, speed: float, *, foreign: float = 0.0, short: int = 0) -> dict[str, Any]:
    return {
        "peer": peer,
        "model": "tiny",
        "workload": load,
        "output_tokens_per_second": speed,
        "foreign_cores": foreign,
        "ttft_ms": {"p50": 1000 / speed, "p99": 2000 / speed},
        "tpot_ms": {"p50": 100 / speed},
        "failed": 0,
        "short": short,
    }


def test_a_row_has_the_medians_and_ours_over_the_best_other() -> None:
    rows = [row(OURS, "W1", speed) for speed in (10.0, 50.0, 20.0)]
    rows += [row("llama-server", "W1", 8.0), row("vLLM", "W1", 5.0), row("vLLM", "W2", 1.0, short=3)]
    lines = table(rows, PEERS, 0.15).splitlines()
    assert lines[0] == "| model, load | tercet | llama-server | vLLM | tercet / best |"
    cells = [
        "tiny, W1",
        "20.0 tok/s, 50 (p99 100) + 5.0 ms",
        "8.0 tok/s, 125 (p99 250) + 12.5 ms",
        "5.0 tok/s, 200 (p99 400) + 20.0 ms",
        "2.50",
    ]
    assert lines[2] == f"| {' | '.join(cells)} |"
    assert lines[3] == "| tiny, W2 | - | - | 1.0 tok/s, 1000 (p99 2000) + 100.0 ms, 3 wrong | - |"


def test_rows_that_failed_or_strangers_spoiled_are_left_out_and_counted() -> None:
    rows = [row(OURS, "W1", 10.0), row(OURS, "W1", 1.0, foreign=0.4), row("vLLM", "W1", 5.0, foreign=0.2)]
    rows.append(row(OURS, "W1", 99.0) | {"ttft_ms": {}, "failed": 3})
    lines = table(rows, PEERS, 0.15).splitlines()
    assert lines[2] == "| tiny, W1 | 10.0 tok/s, 100 (p99 200) + 10.0 ms | - | - | - |"
    assert lines[-1] == "3 of 4 left out; strangers took 0.40 cores at most."


def test_a_command_names_the_model_in_the_peers_own_format(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    plain = Peer("llama-server", "x -m {gguf} --port {port}")
    assert plain.arguments(model, 7)[2:] == [f"{model}.bf16.gguf", "--port", "7"]
    assert Peer("llama-server q8_0", "x {gguf}").arguments(model, 7)[1] == f"{model}.q8_0.gguf"
    assert Peer(OURS, "x serve {model}").arguments(model, 7)[2] == str(model)


def test_a_gguf_file_is_served_by_those_that_read_it(tmp_path: Path) -> None:
    model = tmp_path / "tiny.Q4_1.gguf"
    peers = [*PEERS, Peer(OURS_INT8, ""), Peer("llama-server q8_0", "")]
    assert [peer.name for peer in peers if peer.serves(model)] == [OURS, "llama-server"]
    assert Peer("llama-server", "x -m {gguf}").arguments(model, 7)[2] == str(model)
    assert all(peer.serves(tmp_path / "tiny") for peer in peers)


def test_8_bits_are_compared_with_8_bits() -> None:
    peers = [Peer(OURS, ""), Peer(OURS_INT8, ""), Peer("llama-server", ""), Peer("llama-server q8_0", "")]
    speeds = {OURS: 10.0, OURS_INT8: 30.0, "llama-server": 8.0, "llama-server q8_0": 20.0}
    lines = table([row(name, "W1", speed) for name, speed in speeds.items()], peers, 0.15).splitlines()
    assert lines[0].endswith("| llama-server q8_0 | tercet / best | tercet int8 / best |")
    assert lines[1].count("---") == 7
    assert lines[2].endswith("| 1.25 | 1.50 |")
