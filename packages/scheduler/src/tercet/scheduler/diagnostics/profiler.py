"""Profiler of a scheduler's steps: traces of torch's profiler, bounded in steps, time, size and number."""

import gzip
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic

from tercet.protocol.messages.messages import ControlReply
from tercet.protocol.messages.profiles import ProfileReq, StartProfileReq
from tercet.protocol.system.private_files import make_private_directory, open_private, remove_oldest
from tercet.scheduler.ports import Pending, PlanT_contra, ResultT_co, Runner

if TYPE_CHECKING:
    from torch.profiler import profile

logger = logging.getLogger(__name__)

_MOST_SECONDS = 60.0
_MOST_BYTES = 1 << 30
"""Longest trace before it is compressed."""
_MOST_FILES = 8
"""Traces that are kept."""


class ProfiledRunner(Generic[PlanT_contra, ResultT_co]):
    """Runner whose steps can be profiled. All methods are called by the loop's thread.

    The operations of all threads of this process are recorded; other ranks are not.
    """

    def __init__(
        self, runner: Runner[PlanT_contra, ResultT_co], state: Callable[[], Path], peer: str, refusal: str = ""
    ) -> None:
        """Create it. `state` returns the state directory, or raises ValueError. A `refusal` is the only reply."""
        self._runner = runner
        self._refusal = refusal
        self._state = state
        self._peer = peer
        self._profile: profile | None = None
        self._path: Path | None = None
        self._steps_left = 0
        self._deadline = 0.0

    def submit(self, plan: PlanT_contra) -> Pending[ResultT_co]:
        """Start a step, and end the profile if it has enough of them."""
        if self._profile is None:
            return self._runner.submit(plan)
        if not self._steps_left or time.monotonic() > self._deadline:
            self._stop(self._profile)
            return self._runner.submit(plan)
        from torch.profiler import record_function

        self._steps_left -= 1
        with record_function("step"):
            return self._runner.submit(plan)

    def close(self) -> None:
        """Free devices and peers."""
        self._runner.close()

    def answer(self, request: ProfileReq) -> ControlReply:
        """Start or stop a profile. Return the reply, whose message is the path of the trace."""
        try:
            if self._refusal:
                raise ValueError(self._refusal)
            if isinstance(request, StartProfileReq):
                self._start(request)
            elif self._profile is not None:
                self._stop(self._profile)
            elif self._path is None:
                raise ValueError("no profile has been started")
        except (OSError, ValueError, RuntimeError) as error:
            return ControlReply(id=request.id, ok=False, message=str(error))
        return ControlReply(id=request.id, ok=True, message=str(self._path))

    def _start(self, request: StartProfileReq) -> None:
        if self._profile is not None:
            raise ValueError(f"{self._path} is being recorded: stop it first")
        from torch import cuda
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] if request.cpu else []
        if request.gpu and cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        if not activities:
            raise ValueError("there is no GPU to profile")
        directory = self._state() / "profiles"
        make_private_directory(directory)
        name = "-".join(filter(None, (request.name, self._peer, time.strftime("%Y%m%dT%H%M%S"))))
        running = profile(
            activities=activities,
            with_stack=request.stacks,
            record_shapes=request.shapes,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        running.start()
        self._path = directory / f"{name.replace('/', '_')}.trace.json.gz"
        self._steps_left, self._deadline = request.steps, time.monotonic() + _MOST_SECONDS
        self._profile = running
        logger.info("profile: started path=%s steps=%d", self._path, request.steps)

    def _stop(self, running: "profile") -> None:
        """End the profile, and write its trace in a thread."""
        self._profile = None
        assert self._path is not None
        try:
            running.stop()
        except RuntimeError as error:
            logger.error("profile: not written: path=%s error=%s", self._path, error)
            return
        threading.Thread(target=_write, args=(running, self._path), name="write profile", daemon=True).start()


def _write(ended: "profile", path: Path) -> None:
    """Write a trace: the file appears when it is complete. Remove the oldest ones beyond the limit."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="unfinished-") as directory:
            plain, packed = Path(directory, "trace.json"), Path(directory, "trace.json.gz")
            ended.export_chrome_trace(str(plain))
            if (size := plain.stat().st_size) > _MOST_BYTES:
                raise OSError(f"the trace has {size} bytes, profile fewer steps")
            os.close(open_private(packed, os.O_WRONLY))
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            packed.rename(path)
    except (OSError, RuntimeError) as error:
        logger.error("profile: not written: path=%s error=%s", path, error)
    else:
        logger.info("profile: written path=%s", path)
        remove_oldest(path.parent, "*.trace.json.gz", _MOST_FILES)
