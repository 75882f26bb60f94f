"""SGLang's test kits that need nothing but a server. They lie below `TERCET_KITS`, the server is in `TERCET_URL`."""

import os
import unittest
from importlib import import_module
from pathlib import Path

import openai
import requests

from absent_modules import stand_in  # type: ignore[import-not-found]

_SOURCE = Path(os.environ["TERCET_KITS"])
_KITS = {
    "basic_api_contract_kit": ("BasicAPIContractMixin",),
    "basic_decode_correctness_kit": ("BasicDecodeCorrectnessMixin",),
    "basic_scheduler_stress_kit": ("BasicSchedulerStressMixin",),
    "abort_timeout_kit": ("AbortAllMixin",),
    "anthropic_messages_kit": ("AnthropicMessagesMixin",),
    "ebnf_constrained_kit": ("EBNFConstrainedMixin",),
    "json_constrained_kit": ("JSONConstrainedMixin",),
    "json_mode_kit": ("JSONModeMixin",),
    "matched_stop_kit": ("MatchedStopMixin",),
    "pause_generation_kit": ("PauseResumeInPlaceMixin",),
    "prefix_cache_branching_kit": ("PrefixCacheBranchingMixin",),
    "reasoning_kit": ("ReasoningTokenUsageMixin", "SeparateReasoningMixin"),
    "regex_constrained_kit": ("RegexConstrainedMixin",),
    "spec_server_kits": ("SpecCorrectnessKit", "SpecFeatureKit", "SpecGrammarKit", "SpecLogprobKit", "SpecPenaltyKit"),
}


class _KeySession(requests.Session):
    """Session that sends the key of the server, which the kits do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.headers["authorization"] = f"Bearer {os.environ['TERCET_KEY']}"


class _Running:
    """Process of the server, which runs elsewhere."""

    pid = os.getpid()

    def poll(self) -> None:
        return None


vars(requests.sessions)["Session"] = _KeySession
stand_in("sglang", {"sglang.test.kits": _SOURCE / "sglang/test/kits"})
for _module, _names in _KITS.items():
    for _name in _names:
        _kit = getattr(import_module(f"sglang.test.kits.{_module}"), _name)
        _title = f"Test{_name}"
        _fields = {
            "base_url": os.environ["TERCET_URL"],
            "model": os.environ["TERCET_MODEL"],
            "served_model_name": os.environ["TERCET_MODEL"],
            "api_key": os.environ["TERCET_KEY"],
            "client": openai.Client(base_url=f"{os.environ['TERCET_URL']}/v1", api_key=os.environ["TERCET_KEY"]),
            "process": _Running(),
            "abort_all_max_new_tokens": 1500,
            "pause_max_new_tokens": 200,
            "pause_ignore_eos": True,
        }
        globals()[_title] = type(_title, (_kit, unittest.TestCase), _fields)
