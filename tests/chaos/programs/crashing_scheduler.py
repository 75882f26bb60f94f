"""Scheduler process that dies in the step that would compute one particular prompt.

Usage: python tests/chaos/programs/crashing_scheduler.py MODULE OPTIONS
"""

import os
import signal
import sys
from collections.abc import Callable

from tercet.protocol.messages.values import Grammar, LoRAAdapter, unpack_ints
from tercet.scheduler.__main__ import main
from tercet.scheduler.async_loader import AsyncLoader
from tercet.scheduler.config import ExpertOptions, ModelOptions, ScheduleOptions
from tercet.scheduler.core.plan import Capacity, Plan, StepResult
from tercet.scheduler.executor.ranks.host_network import HostNetwork
from tercet.scheduler.executor_factory import EXECUTORS, build_torch
from tercet.scheduler.ports import Advance, AudioSamples, Executor, ImageArrays, LateMasks, LoadedAdapter, Pending
from tercet.scheduler.resolved_model import ResolvedModel

POISON = [11, 12, 13, 14, 15, 16, 17, 18]


class CrashingExecutor:
    """Real executor that crashes on one prompt."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    @property
    def adapters(self) -> AsyncLoader[LoRAAdapter, LoadedAdapter] | None:
        return self._executor.adapters

    @property
    def images(self) -> ImageArrays | None:
        return self._executor.images

    @property
    def audio(self) -> AudioSamples | None:
        return self._executor.audio

    @property
    def late_masks(self) -> LateMasks | None:
        return self._executor.late_masks

    @property
    def grammars(self) -> AsyncLoader[Grammar, object] | None:
        return self._executor.grammars

    @property
    def weights(self) -> AsyncLoader[str, None]:
        return self._executor.weights

    def submit(self, plan: Plan) -> Pending[StepResult]:
        if any(list(unpack_ints(init.tokens))[: len(POISON)] == POISON for init in plan.introduce):
            os.kill(os.getpid(), signal.SIGSEGV)
        return self._executor.submit(plan)

    def prepare(self) -> bool:
        return self._executor.prepare()

    def close(self) -> None:
        self._executor.close()


def build_crashing(
    options: ModelOptions,
    schedule: ScheduleOptions,
    found: ResolvedModel,
    report: Callable[[int, int], None],
    advance: Advance,
    network: HostNetwork | None = None,
    experts: ExpertOptions = ExpertOptions(),
) -> Executor:
    return CrashingExecutor(build_torch(options, schedule, found, report, advance, network, experts))


if __name__ == "__main__":
    EXECUTORS["torch"] = build_crashing
    main(sys.argv[2:])
