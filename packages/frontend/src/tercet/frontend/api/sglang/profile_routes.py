"""SGLang's endpoints for profiles of schedulers."""

from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.openai.sampling_schema import UNSUPPORTED, Name, Strict, Unsupported
from tercet.frontend.api.sglang.control_routes import send_control
from tercet.frontend.http.auth import require_admin
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.protocol.messages.profiles import StartProfileReq, StopProfileReq

_MOST_STEPS = 1000
_TIMEOUT = 60.0
"""Seconds to wait for a reply. The first profile of a process loads torch's profiler."""


class StartProfile(Strict):
    """Contents of a profile. The scheduler chooses its file."""

    num_steps: Annotated[int, Field(ge=1, le=_MOST_STEPS)] | None = None
    activities: Annotated[list[Literal["CPU", "GPU"]], Field(min_length=1, max_length=2)] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_prefix: Annotated[str, Field(max_length=64, pattern=r"^[\w-]*$")] | None = None
    output_dir: Annotated[Name | None, UNSUPPORTED] = None
    start_step: Annotated[int | None, UNSUPPORTED] = None
    profile_by_stage: Annotated[bool | None, UNSUPPORTED] = None
    profile_stages: Unsupported = None
    merge_profiles: Annotated[bool | None, UNSUPPORTED] = None


class ProfileRoutes:
    """Endpoints that start and stop profiles. They need an admin key."""

    def __init__(self, manager: TokenizerManager, body_limit: int) -> None:
        self._manager = manager
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        both = ("GET", "POST")
        return [
            *(Route(method, "/start_profile", self.start_profile) for method in both),
            *(Route(method, "/stop_profile", self.stop_profile) for method in both),
        ]

    async def start_profile(self, request: Request) -> Response:
        """Record the next steps of all schedulers. The answer has the file that each will write."""
        require_admin(request)
        body = await read_model(request, StartProfile, self._body_limit, optional=True)
        activities = body.activities or ["CPU", "GPU"]
        return await send_control(
            self._manager.control,
            lambda number: StartProfileReq(
                id=number,
                name=body.profile_prefix or "",
                steps=body.num_steps or _MOST_STEPS,
                cpu="CPU" in activities,
                gpu="GPU" in activities,
                stacks=bool(body.with_stack),
                shapes=bool(body.record_shapes),
            ),
            _TIMEOUT,
            conflicts=True,
        )

    async def stop_profile(self, request: Request) -> Response:
        """End the profiles of all schedulers, which then write their files."""
        require_admin(request)
        return await send_control(
            self._manager.control, lambda number: StopProfileReq(id=number), _TIMEOUT, conflicts=True
        )
