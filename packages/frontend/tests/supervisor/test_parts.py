"""Parts that a server starts on a machine, with their options."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tercet.frontend.supervisor.options import ConfigError, FrontendOptions, SchedulerOptions, ServeConfig, ServeOptions
from tercet.frontend.supervisor.parts import dry_run_command, local_parts
from tercet.frontend.supervisor.serve import parse_frontend_config
from tercet.protocol.messages.values import Role


def test_options_become_flags_of_the_part_they_belong_to() -> None:
    config = ServeConfig(
        model="some/model",
        serve=ServeOptions(dp_size=2),
        frontend=FrontendOptions(served_model_name=("mine",), tool_call_parser="hermes", api_key=("s3cret", "0ther")),
        scheduler=SchedulerOptions(dtype="float32", kv_cache_bytes="2GiB", disable_radix_cache=True),
        scheduler_extra={"seed": "7"},
        detokenizer_extra={"max_states": "9"},
    )
    parts = {part.name: part for part in local_parts(config, Path("/run/x"))}
    assert list(parts) == ["scheduler-0", "scheduler-1", "detokenizer-0", "frontend-0"]
    scheduler, detokenizer, frontend = parts["scheduler-1"], parts["detokenizer-0"], parts["frontend-0"]
    assert scheduler.command == (
        *(sys.executable, "-m", "tercet.scheduler", "--model=some/model", "--dtype=float32"),
        *("--kv-cache-bytes=2147483648", "--disable-radix-cache", "--device=auto:1"),
        *("--data-parallel-rank=1", "--seed=7"),
    )
    assert detokenizer.command == (sys.executable, "-m", "tercet.detokenizer", "--max-states=9")
    assert frontend.command == (
        *(sys.executable, "-m", "tercet.frontend", "--served-model-name=mine", "--tool-call-parser=hermes"),
        "--response-store=auto",
        *("--scheduler", "ipc:///run/x/scheduler-*", "--detokenizer", "ipc:///run/x/detokenizer-*"),
    )
    assert [part.role for part in parts.values()] == [
        *(Role.SCHEDULER, Role.SCHEDULER, Role.DETOKENIZER, Role.FRONTEND)
    ]
    assert [part.inherits_listener for part in parts.values()] == [False, False, False, True]


def test_grpc_takes_the_port_and_http_the_next_one() -> None:
    pytest.importorskip("grpc_health.v1", reason="gRPC is an optional extra")
    config = ServeConfig(serve=ServeOptions(host="::1", port=30000, grpc_mode=True))
    frontend = local_parts(config, Path("/run/x"))[-1]
    assert "--grpc-listen=[::1]:30000" in frontend.command
    assert parse_frontend_config(config).http.grpc_listen == "[::1]:30000"
    assert (config.serve.http_port, ServeOptions().http_port) == (30001, 30000)
    for port in (0, 65535):
        with pytest.raises(ConfigError, match="--grpc-mode needs --port"):
            ServeOptions(port=port, grpc_mode=True)


def test_each_allowed_host_of_images_reaches_the_frontend() -> None:
    pytest.importorskip("httpcore2", reason="images are an optional extra")
    config = ServeConfig(frontend=FrontendOptions(allowed_media_host=("a.example.org", "b.example.org:8443")))
    command = local_parts(config, Path("/run/x"))[-1].command
    assert [word for word in command if "media" in word] == [
        "--allowed-media-host=a.example.org",
        "--allowed-media-host=b.example.org:8443",
    ]
    with pytest.raises(ConfigError, match="--allowed-media-host must be like"):
        FrontendOptions(allowed_media_host=("10.0.0.1",))


def test_a_template_is_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = ServeConfig(frontend=FrontendOptions(chat_template=Path("mine.jinja")))
    assert f"--chat-template={tmp_path / 'mine.jinja'}" in local_parts(config, Path("/run/x"))[-1].command


@pytest.mark.parametrize(
    ("schedulers", "ranks", "extra", "expected"),
    [
        (1, None, {}, [None]),
        (1, 4, {}, [None]),
        (3, None, {}, ["auto:0", "auto:1", "auto:2"]),
        (2, 4, {}, ["auto:0", "auto:4"]),
        (2, 2, {"device": "cuda:1"}, ["cuda:1", "cuda:1"]),
    ],
)
def test_each_scheduler_takes_gpus_of_its_own(
    schedulers: int, ranks: int | None, extra: dict[str, str], expected: list[str | None]
) -> None:
    config = ServeConfig(
        serve=ServeOptions(dp_size=schedulers),
        scheduler=SchedulerOptions(tensor_parallel_size=ranks),
        scheduler_extra=extra,
    )
    commands = [part.command for part in local_parts(config, Path("/run/x")) if part.role is Role.SCHEDULER]
    given = [[word.removeprefix("--device=") for word in command if "--device" in word] for command in commands]
    assert given == [[] if device is None else [device] for device in expected]


def test_a_host_of_higher_rank_runs_a_schedulers_process_alone(tmp_path: Path) -> None:
    options = SchedulerOptions(node_rank=1, dist_init_addr="10.0.0.1:5000", keys=tmp_path / "scheduler", threads=2)
    (part,) = local_parts(ServeConfig(model="m", scheduler=options), Path("/run/x"))
    assert (part.name, part.role) == ("scheduler-0", Role.SCHEDULER)
    assert list(part.command[2:]) == [
        "tercet.scheduler",
        "--model=m",
        "--threads=2",
        "--node-rank=1",
        "--dist-init-addr=10.0.0.1:5000",
        f"--keys={tmp_path}/scheduler",
    ]
    near = ServeConfig(scheduler=SchedulerOptions(nnodes=2, node_rank=0, dist_init_addr="10.0.0.1:5000"))
    assert [part.role for part in local_parts(near, Path("/run/x"))] == [
        Role.SCHEDULER,
        Role.DETOKENIZER,
        Role.FRONTEND,
    ]


def test_a_dry_run_is_the_schedulers() -> None:
    options = SchedulerOptions(tensor_parallel_size=8, pipeline_parallel_size=2, nnodes=2)
    config = ServeConfig(model="m", serve=ServeOptions(dry_run=True, memory="80GiB"), scheduler=options)
    flags = ["--tensor-parallel-size=8", "--pipeline-parallel-size=2", "--nnodes=2", f"--memory={80 << 30}"]
    assert dry_run_command(config)[1:] == ["-m", "tercet.scheduler", "dry-run", "--model=m", *flags]
    with pytest.raises(ConfigError, match="--memory is for --dry-run"):
        ServeOptions(memory="1GiB")
    with pytest.raises(ConfigError, match="--memory: 'much' is not a size"):
        ServeOptions(dry_run=True, memory="much")


@pytest.mark.parametrize("options", [SchedulerOptions(nnodes=2), SchedulerOptions(node_rank=1)])
def test_a_model_on_several_hosts_has_one_scheduler(options: SchedulerOptions) -> None:
    with pytest.raises(ConfigError, match="--dp-size 2: a model on several hosts has one scheduler"):
        ServeConfig(serve=ServeOptions(dp_size=2), scheduler=options)


def test_ranks_with_attention_of_their_own_have_one_scheduler() -> None:
    options = SchedulerOptions(tensor_parallel_size=4, enable_dp_attention=True)
    config = ServeConfig(model="m", serve=ServeOptions(dp_size=4), scheduler=options)
    (scheduler,) = (part for part in local_parts(config, Path("/run/x")) if part.role is Role.SCHEDULER)
    assert list(scheduler.command[3:]) == ["--model=m", "--tensor-parallel-size=4", "--enable-dp-attention"]
    near = ServeConfig(serve=ServeOptions(dp_size=4), scheduler=replace(options, nnodes=2, dist_init_addr="10.0.0.1:5"))
    assert near.schedulers == 1
    with pytest.raises(ConfigError, match="--dp-size 2 must be equal to --tensor-parallel-size 4"):
        ServeConfig(serve=ServeOptions(dp_size=2), scheduler=options)


def test_api_keys_are_in_the_frontends_environment_and_in_no_command_line() -> None:
    config = ServeConfig(frontend=FrontendOptions(api_key=("s3cret", "0ther")))
    parts = local_parts(config, Path("/run/x"))
    assert [dict(part.env) for part in parts] == [{}, {}, {"TERCET_API_KEYS": "s3cret\n0ther"}]
    assert not any("s3cret" in word or "0ther" in word for part in parts for word in part.command)


@pytest.mark.parametrize(("told", "expected"), [(None, "--max-loras=8"), (3, "--max-loras=3")])
def test_adapters_that_are_named_are_run(
    told: int | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "haiku").mkdir()
    monkeypatch.chdir(tmp_path)
    given = ("mine=haiku", "org=org/sonnet", "there=/on/other/machines")
    config = ServeConfig(frontend=FrontendOptions(lora=given), scheduler=SchedulerOptions(max_loras=told))
    scheduler, _, frontend = local_parts(config, Path("/run/x"))
    assert [word for word in scheduler.command if "lora" in word] == [expected]
    assert [word for word in frontend.command if "lora" in word] == [
        f"--lora=mine={tmp_path}/haiku",
        "--lora=org=org/sonnet",
        "--lora=there=/on/other/machines",
    ]
    assert frontend.startup_args == ("--require-lora",), "and not once it has served"
    offline, _ = local_parts(config, Path("/run/x"), frontends=False)
    assert offline.command == scheduler.command


def test_schedulers_are_told_of_adapters_only_where_there_are_any() -> None:
    assert not any("lora" in word for part in local_parts(ServeConfig(), Path("/run/x")) for word in part.command)
    config = ServeConfig(scheduler=SchedulerOptions(max_loras=0, max_lora_rank=16))
    assert [word for word in local_parts(config, Path("/run/x"))[0].command if "lora" in word] == [
        "--max-loras=0",
        "--max-lora-rank=16",
    ]


def test_frontends_of_one_socket_know_each_other() -> None:
    parts = local_parts(ServeConfig(serve=ServeOptions(frontend_workers=3)), Path("/run/x"))
    told = {part.name: [word for word in part.command if "sibling" in word] for part in parts}
    assert told == {
        "scheduler-0": [],
        "detokenizer-0": [],
        "frontend-0": ["--sibling=frontend-1", "--sibling=frontend-2"],
        "frontend-1": ["--sibling=frontend-0", "--sibling=frontend-2"],
        "frontend-2": ["--sibling=frontend-0", "--sibling=frontend-1"],
    }


def test_offline_use_has_no_frontend_process() -> None:
    roles = [part.role for part in local_parts(ServeConfig(), Path("/run/x"), frontends=False)]
    assert roles == [Role.SCHEDULER, Role.DETOKENIZER]


@pytest.mark.parametrize("name", ["peer", "parent_fd", "listen", "api-key", "sibling"])
def test_what_the_supervisor_decides_cannot_be_handed_down(name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        local_parts(ServeConfig(frontend_extra={name: "1"}), Path("/run/x"))


def test_encoders_are_schedulers_beside_those_of_the_language_model() -> None:
    config = ServeConfig(
        model="m",
        serve=ServeOptions(dp_size=2, encoders=2),
        scheduler=SchedulerOptions(dtype="float32", threads=3, tensor_parallel_size=2, kv_cache_bytes="2GiB"),
    )
    parts = {part.name: part for part in local_parts(config, Path("/run/x"))}
    assert list(parts) == [*(f"scheduler-{number}" for number in range(4)), "detokenizer-0", "frontend-0"]
    assert [part.role for part in parts.values()][:4] == [Role.SCHEDULER] * 4
    assert ["--language-only" in parts[f"scheduler-{number}"].command for number in range(4)] == [True] * 2 + [
        False
    ] * 2
    assert "--device=auto:2" in parts["scheduler-1"].command
    assert parts["scheduler-3"].command == (
        *(sys.executable, "-m", "tercet.scheduler", "--model=m", "--encoder-only"),
        *("--dtype=float32", "--threads=3", "--device=auto:5"),
    )
    shared = replace(config, scheduler_extra={"device": "cuda:0"})
    assert "--device=cuda:0" in local_parts(shared, Path("/run/x"))[3].command
    assert not any("only" in word for part in local_parts(ServeConfig(), Path("/run/x")) for word in part.command)


def test_the_halves_of_a_model_are_refused_one_by_one() -> None:
    for name in ("encoder-only", "language_only"):
        with pytest.raises(ConfigError, match="with --encoders N"):
            ServeConfig(scheduler_extra={name: "true"})
    several = SchedulerOptions(nnodes=2, dist_init_addr="10.0.0.1:5")
    with pytest.raises(ConfigError, match="--encoders 1: a model on several hosts"):
        ServeConfig(serve=ServeOptions(encoders=1), scheduler=several)
    with pytest.raises(ConfigError, match="--encoders must be 0 to 64, not -1"):
        ServeOptions(encoders=-1)
