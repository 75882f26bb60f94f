"""Command-line options of a scheduler process."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from tercet.protocol.messages.values import Role
from tercet.protocol.options import NodeOptions
from tercet.protocol.system.private_files import state_directory
from tercet.protocol.transport.endpoints import default_peer
from tercet.scheduler.core.config import PolicyName

MOST_THREADS = 1024
"""More cores than any machine gives one process."""
MOST_PROCESSES = 64
"""More GPUs than any machine has."""
MOST_LORAS = 1024
MOST_LORA_RANK = 512
MOST_SPECULATIVE = 256


class ConfigError(ValueError):
    """An invalid option. The message is one line that names it."""


class InsufficientMemoryError(ConfigError):
    """A lack of memory or of a GPU that may be temporary: another start can succeed once other processes have ended."""


@Parameter(name="*", negative="")
@dataclass(frozen=True, kw_only=True)
class ProcessOptions(NodeOptions):
    """Options of the process and its peers."""

    peer: str = field(default_factory=lambda: default_peer(Role.SCHEDULER))
    listen: str = "tcp://127.0.0.1:30100"
    drain_grace: float = 30.0
    """Seconds that requests held get to finish after SIGTERM."""
    weights: str = ""
    """Directory of other weights for the model, such as it had come to before its process died."""
    state_dir: str = ""
    """Directory for weights in messages, profiles and crash dumps; otherwise tercet in XDG_STATE_HOME."""
    crash_dump: Literal["redacted", "full", "none"] = "redacted"
    """Contents of the last events that a scheduler writes when it dies; full has the tokens of requests."""
    event_log: str = ""
    """File to write every event and plan to, for tools/replay.py."""
    kv_events_config: str = ""
    """Publish changes of the prefix cache as KV events: a JSON object with the keys of vLLM and SGLang."""
    data_parallel_rank: int = 0
    """Number of this scheduler in its KV events, added to the ports of --kv-events-config."""

    @property
    def state(self) -> Path:
        """The directory for state. Raises ConfigError for a user without a home."""
        try:
            return Path(self.state_dir) if self.state_dir else state_directory()
        except OSError as error:
            raise ConfigError(f"--state-dir: {error}") from error

    def __post_init__(self) -> None:
        if not 0 <= self.drain_grace < 1e6:
            raise ConfigError(f"--drain-grace must be some number of seconds, not {self.drain_grace}")
        if not 0 <= self.data_parallel_rank < MOST_PROCESSES:
            raise ConfigError(f"--data-parallel-rank must be 0 to {MOST_PROCESSES - 1}, not {self.data_parallel_rank}")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of the model and the memory it uses."""

    model: str = "embedded"
    """A directory, a Hugging Face name, or the model that comes with the package."""
    task: Literal["auto", "generate", "embed", "classify"] = "auto"
    """What the model is served for; auto takes what its architecture and sentence-transformers' files say."""
    executor: Literal["torch", "fake"] = "torch"
    """What runs the plans; fake computes nothing and serves load tests."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights; auto takes the model's own, but none that is slow where it runs."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """Where weights come from; dummy makes random ones."""
    device: str = "auto"
    """cpu, cuda, or auto for what there is; a number behind, as in cuda:2, is that of the (first) GPU."""
    attention_backend: str = "auto"
    """Attention kernels: a name that `tercet-kernels check` lists."""
    quantization: Literal["none", "int8", "int4"] = "none"
    """Weights rounded to 8 or 4 bits as they are loaded, and activations to 8; on native CPU kernels only."""
    grammar_backend: Literal["llguidance", "xgrammar", "none"] = "llguidance"
    """What makes outputs follow grammars; xgrammar is an extra, and none refuses requests with one."""
    threads: int | None = None
    """Cores that each process of a model on a CPU uses; otherwise all that this one may run on, divided evenly."""
    tensor_parallel_size: Annotated[int, Parameter(alias=("--tp-size", "--tp"))] = 1
    """Processes that share the model, each on a GPU or a share of the cores of its own; also --tp-size and --tp."""
    pipeline_parallel_size: Annotated[int, Parameter(alias=("--pp-size", "--pp"))] = 1
    """Pipeline stages of the model, each of --tensor-parallel-size processes; also --pp-size and --pp."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8_e4m3"] = "auto"
    """Number format of keys and values; auto takes that of the weights, fp8_e4m3 half the memory of 16 bits."""
    kv_cache_bytes: int | None = None
    """Memory for keys and values in each process; otherwise a stated share of what is free."""
    page_size: int = 16
    """Tokens in one page of the KV cache."""
    context_length: int | None = None
    """Shorter than the model's own, to save memory."""
    encoder_only: Annotated[bool, Parameter(negative="")] = False
    """Load only the tower of images or sounds, and encode for schedulers with --language-only (SGLang's)."""
    language_only: Annotated[bool, Parameter(negative="")] = False
    """Load no tower: images and sounds come as embeddings from schedulers with --encoder-only (SGLang's)."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"cpu|(auto|cuda)(:\d{1,3})?", self.device):
            raise ConfigError(f"--device must be cpu, auto, auto:N, cuda or cuda:N, not {self.device!r}")
        for option in ("page_size", "kv_cache_bytes", "context_length", "threads"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigError(f"--{option.replace('_', '-')} must be at least 1, not {value}")
        if self.threads is not None and self.threads > MOST_THREADS:
            raise ConfigError(f"--threads must be at most {MOST_THREADS}, not {self.threads}")
        self._check_parallel()
        self._check_tower()

    @property
    def split_flags(self) -> str:
        """The options that make several ranks; empty for one."""
        given = {"tensor": self.tensor_parallel_size, "pipeline": self.pipeline_parallel_size}
        return " ".join(f"--{kind}-parallel-size {size}" for kind, size in given.items() if size > 1)

    def _check_tower(self) -> None:
        flag = "--encoder-only" if self.encoder_only else "--language-only" if self.language_only else ""
        if not flag:
            return
        if self.encoder_only and self.language_only:
            raise ConfigError("--encoder-only and --language-only are the two halves of a model: give one of them")
        if self.executor == "fake" or self.load_format == "dummy":
            option = "--executor fake" if self.executor == "fake" else "--load-format dummy"
            raise ConfigError(f"{flag} does not work with {option}: towers need the weights of a checkpoint")
        if self.language_only:
            return
        refused = {
            self.split_flags: bool(self.split_flags),
            f"--quantization {self.quantization}": self.quantization != "none",
            f"--kv-cache-dtype {self.kv_cache_dtype}": self.kv_cache_dtype != "auto",
            f"--kv-cache-bytes {self.kv_cache_bytes}": self.kv_cache_bytes is not None,
            f"--task {self.task}": self.task not in ("auto", "generate"),
        }
        if wrong := [option for option, given in refused.items() if given]:
            raise ConfigError(f"{wrong[0]} is for models that generate, and --encoder-only loads the tower alone")

    def _check_parallel(self) -> None:
        size = self.tensor_parallel_size
        if not 1 <= size <= MOST_PROCESSES:
            raise ConfigError(f"--tensor-parallel-size must be 1 to {MOST_PROCESSES}, not {size}")
        stages = self.pipeline_parallel_size
        if not 1 <= stages <= MOST_PROCESSES:
            raise ConfigError(f"--pipeline-parallel-size must be 1 to {MOST_PROCESSES}, not {stages}")
        if size * stages > MOST_PROCESSES:
            raise ConfigError(f"{self.split_flags} are more than {MOST_PROCESSES} processes")
        if self.split_flags and self.executor == "fake":
            raise ConfigError(f"{self.split_flags}: the fake executor has nothing to share")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Options of the places of experts."""

    expert_parallel_size: Annotated[int, Parameter(alias=("--ep-size", "--ep"))] = 1
    """Groups of the --tensor-parallel-size processes, each with some experts of every mixture; also --ep-size, --ep."""

    enable_dp_attention: Annotated[bool, Parameter(negative="")] = False
    """Attention of its own requests in each of the --tensor-parallel-size processes, and experts over all of them."""
    init_expert_location: Path | None = None
    """File of expert loads, by which experts are placed; without it, each group has an equal run of them."""
    ep_num_redundant_experts: int = 0
    """Places for second copies of the experts with the highest loads, in each layer of --init-expert-location."""
    expert_load_file: Path | None = None
    """File to which the loads of experts since start are written, each minute and at the end."""

    def __post_init__(self) -> None:
        if self.expert_parallel_size < 1:
            raise ConfigError(f"--expert-parallel-size must be at least 1, not {self.expert_parallel_size}")
        if self.ep_num_redundant_experts < 0:
            raise ConfigError(f"--ep-num-redundant-experts must be at least 0, not {self.ep_num_redundant_experts}")
        if self.ep_num_redundant_experts and self.init_expert_location is None:
            raise ConfigError("--ep-num-redundant-experts needs --init-expert-location, which says what to copy")
        given = {"--init-expert-location": self.init_expert_location, "--expert-load-file": self.expert_load_file}
        placed = self.expert_parallel_size > 1 or self.enable_dp_attention
        if not placed and (useless := [name for name, path in given.items() if path is not None]):
            raise ConfigError(f"{useless[0]} needs --expert-parallel-size above 1")

    def attention_ranks(self, ranks: int) -> int:
        """Return how many of the ranks of a model have requests of their own: all, or one for all."""
        return ranks if self.enable_dp_attention else 1

    def groups(self, ranks: int) -> int:
        """Return the number of groups of ranks that have different experts."""
        return ranks if self.enable_dp_attention else self.expert_parallel_size

    def check(self, ranks: int, stages: int) -> None:
        """Raise ConfigError unless a model on these ranks of each pipeline stage can have them."""
        if self.enable_dp_attention:
            self._check_attention(ranks, stages)
        if stages > 1 and self.expert_load_file is not None:
            raise ConfigError("--expert-load-file: rank 0 knows the loads of its own pipeline stage alone")
        if ranks % self.expert_parallel_size:
            raise ConfigError(
                f"--expert-parallel-size {self.expert_parallel_size} must divide --tensor-parallel-size {ranks}"
            )

    def _check_attention(self, ranks: int, stages: int) -> None:
        if ranks == 1:
            raise ConfigError(
                "--enable-dp-attention needs --tensor-parallel-size above 1: its processes have the attention"
            )
        if stages > 1:
            raise ConfigError(
                f"--enable-dp-attention does not work with --pipeline-parallel-size {stages}: leave one of them out"
            )
        if self.expert_parallel_size not in (1, ranks):
            raise ConfigError(
                f"--enable-dp-attention places experts over all --tensor-parallel-size {ranks} processes: leave "
                f"--expert-parallel-size {self.expert_parallel_size} out"
            )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Options of a model on several hosts. Other hosts get the rest but --model, --device and --threads from host 0."""

    nnodes: int = 1
    """Hosts that share the model; each runs an equal share of its processes."""
    node_rank: int = 0
    """Number of this host: 0 is the scheduler, and the others run processes of the model alone."""
    dist_init_addr: str = ""
    """HOST:PORT at which host 0 waits for the others."""
    dist_timeout: float = 300.0
    """Seconds in which the hosts must meet."""

    def __post_init__(self) -> None:
        if not 1 <= self.nnodes <= MOST_PROCESSES:
            raise ConfigError(f"--nnodes must be 1 to {MOST_PROCESSES}, not {self.nnodes}")
        if not 0 <= self.node_rank < (MOST_PROCESSES if self.nnodes == 1 else self.nnodes):
            raise ConfigError(
                f"--node-rank must be 0 to {self.nnodes - 1} with --nnodes {self.nnodes}, not {self.node_rank}"
            )
        if self.dist_init_addr and self.nnodes == 1 and not self.node_rank:
            raise ConfigError(f"--dist-init-addr {self.dist_init_addr} needs --nnodes above 1, or a --node-rank")
        if not 0 < self.dist_timeout < 1e6:
            raise ConfigError(f"--dist-timeout must be some number of seconds, not {self.dist_timeout}")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options of how requests share the model."""

    schedule_policy: PolicyName = PolicyName.LPM
    """Which waiting request goes first: lpm (longest cached prefix), fcfs, priority, or fair (API keys take turns)."""
    mem_fraction_static: float | None = None
    """Share of memory for the weights with keys and values, instead of --kv-cache-bytes: above 0 and below 1."""
    max_total_tokens: int | None = None
    """The most tokens that the KV cache is made for."""
    max_running_requests: int | None = None
    """Choices that may run at the same time; otherwise 64, and 256 on a GPU."""
    chunked_prefill_size: int | None = None
    """Tokens that one step may compute; otherwise 512, and 8192 on a GPU."""
    max_queued_requests: int = 4096
    """Waiting choices past which new requests are refused."""
    disable_radix_cache: Annotated[bool, Parameter(negative="")] = False
    """Do not share cached prefixes between requests."""
    overlap: Literal[0, 1] | None = None
    """Steps in flight while the next one is planned; otherwise 0, and 1 on a GPU."""
    speculative_tokens: int | None = None
    """Tokens up to which a step that decodes is filled with guesses; otherwise 8, and on a GPU 8 where it pays."""
    max_loras: int = 0
    """Adapters that can run side by side, each in as many requests as there are; 0 refuses them."""
    max_lora_rank: int = 64
    """The highest rank that an adapter can have: memory for so much is set aside."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Log-probabilities of outputs: the model's own, or after penalties, biases, grammar and temperature (SGLang's)."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_loras <= MOST_LORAS:
            raise ConfigError(f"--max-loras must be 0 to {MOST_LORAS}, not {self.max_loras}")
        if not 1 <= self.max_lora_rank <= MOST_LORA_RANK:
            raise ConfigError(f"--max-lora-rank must be 1 to {MOST_LORA_RANK}, not {self.max_lora_rank}")
        if not 0 <= (self.speculative_tokens or 0) <= MOST_SPECULATIVE:
            raise ConfigError(f"--speculative-tokens must be 0 to {MOST_SPECULATIVE}, not {self.speculative_tokens}")
        fraction = self.mem_fraction_static
        if fraction is not None and not 0 < fraction < 1:
            raise ConfigError(f"--mem-fraction-static must be above 0 and below 1, not {fraction}")
        for option in ("max_total_tokens", "max_running_requests", "chunked_prefill_size", "max_queued_requests"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigError(f"--{option.replace('_', '-')} must be at least 1, not {value}")

    def slots(self, *, gpu: bool, ranks: int = 1) -> int:
        """Return the number of choices that run at the same time: as many on each of several attention ranks."""
        return -(-(self.max_running_requests or (256 if gpu else 64)) // ranks) * ranks

    def step_tokens(self, *, gpu: bool, ranks: int = 1) -> int:
        """Return the number of tokens that one step may compute, on each of several attention ranks."""
        return -(-(self.chunked_prefill_size or (8192 if gpu else 512)) // ranks)

    def protection(self, *, gpu: bool) -> int:
        """Return the divisor of a step's tokens that gives those of one API key while another decodes.

        On a CPU these are 15 of 512: with a decode they fill one tile of matrix products, and take not much longer than
        the decode alone, for which all weights are read.
        """
        return 8 if gpu else 34

    def draft_rows(self, *, stages: int = 1) -> int:
        """Return `speculative_tokens`, with its default resolved: 0 with several pipeline stages."""
        return (0 if stages > 1 else 8) if self.speculative_tokens is None else self.speculative_tokens

    def draft_by_cost(self, *, gpu: bool) -> bool:
        """Return whether draft tokens must pay by measured times: by default on a GPU, where nothing is known."""
        return gpu and self.speculative_tokens is None

    def steps_ahead(self, *, gpu: bool, stages: int = 1) -> int:
        """Return `overlap`, with its default resolved: each of several pipeline stages computes another step."""
        if stages > 1:
            return stages
        return int(gpu) if self.overlap is None else self.overlap

    def check_stages(self, stages: int) -> None:
        """Raise ConfigError for options that do not work with several pipeline stages."""
        refused = {
            "--speculative-tokens": bool(self.speculative_tokens),
            "--overlap": self.overlap is not None,
        }
        if wrong := [flag for flag, given in refused.items() if given]:
            raise ConfigError(f"--pipeline-parallel-size {stages} does not work with {wrong[0]}: leave it out")
