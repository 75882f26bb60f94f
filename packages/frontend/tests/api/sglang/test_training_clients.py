"""Calls of verl (HttpServerAdapter) and slime (SGLangEngine, rollouts), with the bodies that they send."""

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest

from packages.frontend.tests.polling import until
from tercet.frontend.api.sglang.profile_routes import ProfileRoutes
from tercet.frontend.api.sglang.training_routes import TrainingRoutes
from tercet.frontend.config.config import HttpConfig
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.messages import (
    ContinueGenerationReq,
    FlushCacheReq,
    PauseGenerationReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    UpdateWeightsFromDiskReq,
)
from tercet.protocol.messages.profiles import ProfileReq, StartProfileReq, StopProfileReq
from tercet.protocol.messages.values import MemoryTag
from tercet.protocol.messages.weight_transfers import (
    DestroyWeightsUpdateGroupReq,
    GetWeightsByNameReq,
    InitWeightsUpdateGroupReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
    WeightTransferReq,
)

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
OPEN = HttpConfig(open_admin=True)
SLIME_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 8,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": True,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


async def ok(answer: httpx2.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_verl_starts_flushes_and_generates(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), OPEN) as served:
        http = http_of(served)
        headers = {"Content-Type": "application/json; charset=utf-8", "Authorization": "Bearer None"}
        await ok(await http.get("/health_generate", headers=headers))
        await ok(await http.get("/flush_cache", headers=headers))
        assert any(isinstance(message, FlushCacheReq) for _, message in served.engine.sent)
        payload = {
            "sampling_params": {"n": 1, "max_new_tokens": 3, "temperature": 0, "repetition_penalty": 1.0},
            "input_ids": [5, 6],
            "return_logprob": True,
        }
        answer = await ok(await http.post("/generate", json=payload))
        assert [each[1] for each in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
        await ok(await http.post("/abort_request", json={"rid": "", "abort_all": True}))


async def test_slime_collects_partial_rollouts_and_goes_on(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(auto=False)
    async with serving(engine, OPEN) as served:
        http = http_of(served)
        payload = {"sampling_params": SLIME_SAMPLING, "return_logprob": True, "input_ids": [5, 6]}
        rollout = asyncio.ensure_future(http.post("/generate", json=payload))
        await until(lambda: bool(engine.running))
        engine.step()
        await asyncio.sleep(0.02)
        await ok(await http.post("/abort_request", json={"abort_all": True}))
        meta = (await ok(await rollout))["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        tokens = [each[1] for each in meta["output_token_logprobs"]]
        assert tokens == [10]
        loads = await ok(await http.get("/v1/loads?include=core"))
        assert sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in loads["loads"]) == 0
        engine.auto = True
        further = {**payload, "input_ids": [5, 6, *tokens]}
        further["sampling_params"] = {**SLIME_SAMPLING, "max_new_tokens": 8 - len(tokens)}
        assert (await ok(await http.post("/generate", json=further)))["output_ids"] == [10, 11, 12, 13]


async def test_slime_updates_weights_and_reads_their_version(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), OPEN) as served:
        http = http_of(served)
        await ok(await http.post("/pause_generation", json={}))
        await ok(await http.get("/flush_cache"))
        weights = {"model_path": "/checkpoints/7", "load_format": None, "weight_version": "7"}
        await ok(await http.post("/update_weights_from_disk", json=weights))
        await ok(await http.post("/continue_generation", json={}))
        assert (await ok(await http.get("/get_weight_version")))["weight_version"] == "7"
        assert (await ok(await http.get("/model_info")))["weight_version"] == "7"
        await ok(await http.post("/update_weight_version", json={"new_version": "8"}))
        assert (await ok(await http.get("/weight_version")))["weight_version"] == "8"
        kinds = (PauseGenerationReq, FlushCacheReq, UpdateWeightsFromDiskReq, ContinueGenerationReq)
        assert [type(message) for _, message in served.engine.sent if isinstance(message, kinds)] == list(kinds)


async def test_the_check_of_weights_has_a_fingerprint_for_each_scheduler(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(schedulers=["scheduler-0", "scheduler-1"]), OPEN) as served:
        http = http_of(served)
        checked = await ok(await http.post("/weights_checker"))
        assert checked["weights"] == {"scheduler-0": "weights-1", "scheduler-1": "weights-1"}
        await ok(await http.post("/update_weights_from_disk", json={"model_path": "/checkpoints/7"}))
        later = await ok(await http.post("/weights_checker", json={"action": "checksum"}))
        assert len(set(later["weights"].values())) == 1
        assert later["weights"] != checked["weights"]
        refused = await http.post("/weights_checker", json={"action": "snapshot"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "action")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_slime_releases_and_resumes_memory_by_tags(engine_of: EngineOf, http_of: HttpOf, method: str) -> None:
    async with serving(engine_of(schedulers=["scheduler-0", "scheduler-1"]), OPEN) as served:
        http = http_of(served)
        answer = await ok(await http.request(method, "/release_memory_occupation"))
        assert answer == {"success": True, "schedulers": {"scheduler-0": "done", "scheduler-1": "done"}}
        for tags in (["weights"], ["kv_cache", "cuda_graph"]):
            await ok(await http.request(method, "/resume_memory_occupation", json={"tags": tags}))
        orders = [each for peer, each in served.engine.sent if peer == "scheduler-1"]
    memory = [(type(each), each.tags) for each in orders if isinstance(each, ReleaseMemoryReq | ResumeMemoryReq)]
    assert memory == [
        (ReleaseMemoryReq, [MemoryTag.WEIGHTS, MemoryTag.KV_CACHE]),
        (ResumeMemoryReq, [MemoryTag.WEIGHTS]),
        (ResumeMemoryReq, [MemoryTag.KV_CACHE]),
    ]


def safetensors(*values: int) -> bytes:
    """A safetensors file of one int8 tensor."""
    header = f'{{"a":{{"dtype":"I8","shape":[{len(values)}],"data_offsets":[0,{len(values)}]}}}}'.encode()
    return len(header).to_bytes(8, "little") + header + bytes(values)


async def test_tensors_are_sent_in_parts_and_served_with_the_last(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(schedulers=["scheduler-0", "scheduler-1"])
    files = [safetensors(1), safetensors(1, 2), safetensors(3)]
    coded = [base64.b64encode(file).decode() for file in files]
    async with serving(engine, OPEN) as served:
        http = http_of(served)
        path = "/update_weights_from_tensor"
        before = (await ok(await http.post("/weights_checker")))["weights"]
        part = await ok(await http.post(path, json={"serialized_named_tensors": coded[:2], "flush_cache": False}))
        assert part["weights"] == before
        last = {"serialized_named_tensors": coded[2:], "weight_version": "7"}
        weights = (await ok(await http.post(path, json=last)))["weights"]
        assert weights != before
        assert (await ok(await http.get("/get_weight_version")))["weight_version"] == "7"
        await ok(await http.post(path, json={"serialized_named_tensors": []}))
    sent = [(peer, each.part, each.last) for peer, each in engine.sent if isinstance(each, UpdateWeightsFromTensorReq)]
    assert sorted(sent) == [(peer, *part) for peer in engine.schedulers for part in [(0, False), (0, True), (1, True)]]
    assert [frame for frames in engine.frames for frame in frames] == [*files[:2], *files[:2], files[2], files[2]]


async def test_broadcast_tensors_and_their_group(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(schedulers=["scheduler-1", "scheduler-0"])
    async with serving(engine, OPEN) as served:
        http = http_of(served)
        group = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
        await ok(await http.post("/init_weights_update_group", json={**group, "group_name": "g", "backend": "gloo"}))
        body = {"names": ["a", "b"], "dtypes": ["torch.bfloat16", "float32"], "shapes": [[2, 3], []], "group_name": "g"}
        await ok(await http.post("/update_weights_from_distributed", json=body))
        await ok(await http.post("/destroy_weights_update_group", json={"group_name": "g"}))
        values = await http.request("GET", "/get_weights_by_name", json={"name": "a", "truncate_size": 2})
        assert await ok(values) == [1.0, 2.0]
    orders = [each for peer, each in engine.sent if peer == "scheduler-0" and isinstance(each, WeightTransferReq)]
    join, update, leave, get = orders
    assert isinstance(join, InitWeightsUpdateGroupReq)
    assert join.ranks == {"scheduler-0": 1, "scheduler-1": 2}
    assert isinstance(update, UpdateWeightsFromDistributedReq)
    assert (update.dtypes, update.shapes, update.last) == (["bfloat16", "float32"], [[2, 3], []], True)
    assert leave == DestroyWeightsUpdateGroupReq(id=leave.id, group="g")
    assert get == GetWeightsByNameReq(id=get.id, name="a", rows=2)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASVAAAAAAA="]}, "serialized_named_tensors"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["?"]}, "serialized_named_tensors"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [], "load_format": "direct"}, "load_format"),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": [], "shapes": []}, "names"),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["object"], "shapes": [[1]]}, "dtypes"),
        ("/get_weights_by_name", {"name": "a", "truncate_size": 0}, "truncate_size"),
    ],
)
async def test_weights_that_cannot_be_sent_are_refused(
    engine_of: EngineOf, http_of: HttpOf, path: str, body: dict[str, Any], param: str
) -> None:
    engine = engine_of()
    async with serving(engine, OPEN) as served:
        refused = await http_of(served).post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith(param)
    assert not any(isinstance(each, WeightTransferReq) for _, each in engine.sent)


async def test_profiles_are_started_and_stopped_and_never_placed(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of()
    async with serving(engine, OPEN) as served:
        http = http_of(served)
        await ok(await http.post("/start_profile", json={"num_steps": 5, "activities": ["CPU"], "profile_prefix": "a"}))
        await ok(await http.get("/start_profile"))
        await ok(await http.post("/stop_profile"))
        for name, value in {"output_dir": "/etc", "profile_prefix": "../a", "num_steps": 1001, "start_step": 3}.items():
            refused = await http.post("/start_profile", json={name: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    orders = [each for _, each in engine.sent if isinstance(each, StartProfileReq | StopProfileReq)]
    first = StartProfileReq(id=orders[0].id, name="a", steps=5, cpu=True, gpu=False, stacks=False, shapes=False)
    assert orders[0] == first
    assert orders[1] == msgspec.structs.replace(first, id=orders[1].id, name="", steps=1000, gpu=True)
    assert orders[2:] == [StopProfileReq(id=orders[2].id)]


async def test_memory_belongs_to_administrators_and_has_known_tags(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of()
    async with serving(engine, HttpConfig(api_key=("user",), admin_key=("boss",))) as served:
        http = http_of(served)
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            refused = await http.post(path, json={"tags": ["disk"]}, headers={"authorization": "Bearer boss"})
            assert refused.status_code == 400
        for route in [*TrainingRoutes(served.manager, 0).routes, *ProfileRoutes(served.manager, 0).routes]:
            refused = await http.request(route.method, route.path, headers={"authorization": "Bearer user"})
            assert refused.status_code == 403
    refused_kinds = ReleaseMemoryReq | ResumeMemoryReq | WeightTransferReq | ProfileReq
    assert not any(isinstance(each, refused_kinds) for _, each in engine.sent)


@pytest.mark.parametrize("name", ["is_async", "keep_pause", "recapture_cuda_graph", "manifest"])
async def test_a_weight_update_refuses_by_name(engine_of: EngineOf, http_of: HttpOf, name: str) -> None:
    async with serving(engine_of(), OPEN) as served:
        body = {"model_path": "/checkpoints/7", name: True}
        answer = await http_of(served).post("/update_weights_from_disk", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_a_pause_may_abort_running_requests(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(auto=False)
    async with serving(engine, OPEN) as served:
        http = http_of(served)
        for mode, kind in (("in_place", None), ("abort", "abort")):
            rollout = asyncio.ensure_future(http.post("/generate", json={"text": "hello"}))
            await until(lambda: bool(engine.running))
            await ok(await http.post("/pause_generation", json={"mode": mode}))
            if kind is None:
                assert not rollout.done()
                await ok(await http.post("/abort_request", json={"abort_all": True}))
            assert (await ok(await rollout))["meta_info"]["finish_reason"]["type"] == "abort"


async def test_without_the_option_the_calls_need_an_admin_key(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        http = http_of(served)
        for method, path in [("GET", "/flush_cache"), ("POST", "/pause_generation"), ("POST", "/freeze_gc")]:
            assert (await http.request(method, path, json={})).status_code == 403


async def test_a_client_may_choose_the_id_of_its_request(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(auto=False)
    config = HttpConfig(api_key=("one", "two"))
    async with serving(engine, config) as served:
        http = http_of(served)
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"text": "hello", "rid": "mine", "return_prompt_token_ids": True}
        rollout = asyncio.ensure_future(http.post("/generate", json=body, headers=one))
        await until(lambda: bool(engine.running))
        await ok(await http.post("/abort_request", json={"rid": "mine"}, headers=two))
        assert not rollout.done(), "an id is the caller's own"
        await ok(await http.post("/abort_request", json={"rid": "mine"}, headers=one))
        answer = await ok(await rollout)
        assert answer["meta_info"]["id"] == "mine"
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["prompt_token_ids"]) == answer["meta_info"]["prompt_tokens"]
