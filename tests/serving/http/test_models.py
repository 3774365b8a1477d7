"""Adapters as models, loaded while the server runs; the counts that dashboards read."""

import asyncio
import base64
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from paged import AsyncEngine, EngineConfig
from paged.serving.command_line.cli import RECALL
from tests.models.lora.folders import Adapter
from tests.processes import wait_until
from tests.serving.http.test_limits import ask
from tests.serving.http.test_openai import PROMPT, check_idle
from tests.serving.served import Served, serving
from tests.tolerance import assert_within

BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0}


def test_adapters_come_and_go(chat_folder: Path, tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    for folder in (allowed / "strong", tmp_path / "forbidden"):
        Adapter(("q_proj", "o_proj"), alpha=1e3, seed=1).save(folder, RECALL)
    (allowed / "link").symlink_to(tmp_path / "forbidden")
    with serving(chat_folder, allow_adapters=allowed) as served:
        for path in ("../forbidden", str(tmp_path / "forbidden"), "link", "nothing", "", "a\0b"):
            status, _, body = ask(served, "/v1/load_lora_adapter", {"lora_name": "b", "lora_path": path})
            assert (status, body["error"]["param"]) == (404, "lora_path"), path
        assert ask(served, "/v1/load_lora_adapter", {"lora_name": "recall", "lora_path": "strong"})[0] == 404
        before = ask(served, "/v1/completions", BODY)[2]["choices"][0]["text"]
        assert ask(served, "/v1/load_lora_adapter", {"lora_name": "strong", "lora_path": "strong"})[0] == 200
        cards = ask(served, "/v1/models")[2]["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("recall", None), ("strong", "recall")]
        after = ask(served, "/v1/completions", BODY | {"model": "strong", "max_tokens": 12})[2]
        assert (after["model"], after["choices"][0]["text"] == before) == ("strong", False)
        assert ask(served, "/v1/unload_lora_adapter", {"lora_name": "strong"})[0] == 200
        assert ask(served, "/v1/completions", BODY | {"model": "strong"})[0] == 404


def test_an_adapter_is_replaced_while_its_requests_go_on(chat_folder: Path, tmp_path: Path) -> None:
    """They end as they began, later ones have the new one; a broken one changes nothing; its slot is free again."""
    for name, seed in (("old", 1), ("new", 2)):
        Adapter(("q_proj", "o_proj"), alpha=1e3, seed=seed).save(tmp_path / name, RECALL)
    (tmp_path / "broken").mkdir()

    def load(path: str, *, in_place: bool) -> int:
        body = {"lora_name": "a", "lora_path": path, "load_inplace": in_place}
        return int(ask(served, "/v1/load_lora_adapter", body)[0])

    def text() -> str:
        body = BODY | {"model": "a", "max_tokens": 60, "ignore_eos": True}
        return str(ask(served, "/v1/completions", body)[2]["choices"][0]["text"])

    with serving(chat_folder, allow_adapters=tmp_path) as served, ThreadPoolExecutor(1) as pool:
        assert load("old", in_place=False) == 200
        first = text()
        running = pool.submit(text)
        wait_until(lambda: served.engine.num_unfinished > 0)
        assert load("old", in_place=False) == 400
        assert load("broken", in_place=True) == 400
        assert load("new", in_place=True) == 200
        second = text()
        assert (running.result(), first != second) == (first, True)
        assert [card["id"] for card in ask(served, "/v1/models")[2]["data"]] == ["recall", "a"]
        wait_until(lambda: len(served.engine.list_loras()) == 1)
        assert load("old", in_place=True) == 200
        assert text() == first
        assert ask(served, "/v1/unload_lora_adapter", {"lora_name": "a"})[0] == 200


def test_blocks_name_the_requests_that_hold_them(chat_folder: Path) -> None:
    """By the id of the answer's header."""
    body = BODY | {"n": 2, "max_tokens": 300, "ignore_eos": True}
    with serving(chat_folder) as served, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, served, "/v1/completions", body)
        found: dict[str, Any] = {"sequences": []}
        while len(found["sequences"]) < 2 and not answer.done():
            found = ask(served, "/v1/paged/blocks")[2]
        request_id = answer.result()[1]["x-request-id"]
    names, blocks = zip(*((one["request_id"], one["blocks"]) for one in found["sequences"]), strict=True)
    assert names == (f"{request_id}/0", f"{request_id}/1")
    held = {block for ids in blocks for block in ids}
    assert {found["blocks"][block - 1] for block in held} <= {"o", "s"}
    assert held


def test_metrics_count_what_was_done(chat_folder: Path) -> None:
    with serving(chat_folder) as served:
        for _ in range(3):
            assert ask(served, "/v1/completions", BODY | {"prompt": PROMPT * 4})[0] == 200
        assert ask(served, "/v1/completions", {"prompt": 3})[0] == 400
        page = ask(served, "/metrics")[2]
    found = dict(
        re.findall(r'^vllm:(\w+)\{engine="0",(?:finished_reason="stop",)?model_name="recall"\} (\S+)$', page, re.M)
    )
    prompt, cached = float(found["prompt_tokens_total"]), float(found["prefix_cache_hits_total"])
    assert (prompt, cached) == (87, 32), "two of three find the first block of 16"
    counts = {name: float(found[name]) for name in found if name.endswith(("_count", "_total"))}
    assert counts["generation_tokens_total"] == float(found["request_generation_tokens_sum"]) == 9
    assert counts["request_success_total"] == counts["e2e_request_latency_seconds_count"] == 3
    assert counts["time_to_first_token_seconds_count"] == 3
    assert found["num_requests_running"] == found["num_requests_waiting"] == "0.0"
    assert "paged_requests_total 3.0" in page


# What the panels of vLLM's boards ask for, and its type: examples/observability/prometheus_grafana/grafana.json, and
# the overview and the service status in examples/observability/dashboards/grafana.
DASHBOARD = {
    "e2e_request_latency_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "time_to_first_token_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "iteration_tokens_total": "histogram",
    "prompt_tokens": "counter",
    "prompt_tokens_cached": "counter",
    "prompt_tokens_by_source": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "external_prefix_cache_queries": "counter",
    "external_prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "num_requests_waiting_by_reason": "gauge",
    "kv_cache_usage_perc": "gauge",
    "engine_sleep_state": "gauge",
}
# The overview's targets, each of them the bound of a bucket.
TARGETS = {
    "time_to_first_token_seconds": (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
    "request_time_per_output_token_seconds": (0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
}


def test_dashboard_of_vllm_finds_its_metrics(chat_folder: Path) -> None:
    """Each with its type, and with the label that every panel chooses by; times add up."""
    with serving(chat_folder) as served:
        for given in ({}, {"n": 2, "max_tokens": 9, "ignore_eos": True}):
            assert ask(served, "/v1/completions", BODY | given)[0] == 200
        for path in ("/v1/completions", "/v1/nothing"):
            assert ask(served, path, {})[0] in (400, 404)
        ask(served, "/metrics")
        page = ask(served, "/metrics")[2]
        served.call(served.service.engine.sleep())
        page_asleep = ask(served, "/metrics")[2]
    families = {one.name: one for one in text_string_to_metric_families(page)}
    values: dict[str, float] = {}
    for name, kind in DASHBOARD.items():
        family = families[f"vllm:{name}"]
        assert family.type == kind, name
        assert {sample.labels["model_name"] for sample in family.samples} == {"recall"}, name
        values |= {
            sample.name.removeprefix("vllm:"): sample.value for sample in family.samples if len(sample.labels) == 2
        }
    assert {one.labels["finished_reason"] for one in families["vllm:request_success"].samples} == {"stop", "length"}
    by_source = {one.labels["source"]: one.value for one in families["vllm:prompt_tokens_by_source"].samples}
    assert sum(by_source.values()) == values["prompt_tokens_total"] > by_source["local_cache_hit"]
    assert by_source["local_cache_hit"] == values["prompt_tokens_cached_total"]
    assert families["vllm:num_requests_waiting_by_reason"].samples[0].labels["reason"] == "capacity"
    for text, state in ((page, "awake"), (page_asleep, "weights_offloaded")):
        assert re.findall(r'engine_sleep_state{.*sleep_state="(.*)"} 1.0', text) == [state]
    for name, targets in TARGETS.items():
        bounds = {sample.labels.get("le") for sample in families[f"vllm:{name}"].samples}
        assert bounds >= set(map(str, targets))
    answers = {(one.labels["handler"], one.labels["status"]): one.value for one in families["http_requests"].samples}
    assert answers == {("/v1/completions", "2xx"): 2, ("/v1/completions", "4xx"): 1, ("none", "4xx"): 1}
    times = {one.labels["handler"]: one for one in families["http_request_duration_seconds"].samples}
    assert set(times) == {"/v1/completions", "none"}
    assert values["request_max_num_generation_tokens_sum"] == 3 + 9
    assert values["request_generation_tokens_sum"] == values["generation_tokens_total"] == 3 + 18
    # Steps that a slow reader takes together count once.
    assert 0 < values["inter_token_latency_seconds_count"] <= 2 + 8
    parts = sum(values[f"request_{one}_time_seconds_sum"] for one in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(values["e2e_request_latency_seconds_sum"])


def test_embeddings(served: Served) -> None:
    """As the engine's own, in both forms, for texts and token ids."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    ids = served.service.tokenizer.encode(PROMPT)
    expected = served.call(served.service.engine.embed([ids, ids[:1]]))
    floats, texts = (
        client.embeddings.create(model="recall", input=[ids, ids[:1]], encoding_format=form)
        for form in ("float", "base64")
    )
    assert floats.usage.prompt_tokens == len(ids) + 1
    assert_within([one.embedding for one in floats.data], expected, 1e-5)
    bits = b"".join(base64.b64decode(str(one.embedding)) for one in texts.data)
    assert_within(torch.frombuffer(bytearray(bits), dtype=torch.float32).view_as(expected), expected, 1e-5)
    one = client.embeddings.create(model="recall", input=PROMPT).data[0].embedding
    assert_within(one, expected[0], 1e-5)
    for wrong in ("", [], [[]], [5] * 10_000):
        assert ask(served, "/v1/embeddings", {"input": wrong})[0] == 400


@pytest.mark.thorough  # waits for a limit of time
def test_limits_of_embeddings(chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They know the queue, the time and the length of prompts."""
    texts = {"input": [PROMPT] * 16}
    with serving(chat_folder, EngineConfig(max_waiting=40, token_budget=16), max_prompt_tokens=20) as served:
        with ThreadPoolExecutor(12) as threads:
            answers = list(threads.map(lambda _: ask(served, "/v1/embeddings", texts), range(12)))
        statuses = sorted(status for status, _, _ in answers)
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 3, "one runs, and two of 16 prompts wait"
        assert ask(served, "/v1/embeddings", {"input": PROMPT * 3})[0] == 400
        assert ask(served, "/v1/embeddings", texts)[0] == 200
    embed = AsyncEngine.embed

    async def slow(engine: AsyncEngine, prompts: Any) -> torch.Tensor:
        await asyncio.sleep(600 * (len(prompts) > 1))
        return await embed(engine, prompts)

    monkeypatch.setattr(AsyncEngine, "embed", slow)
    with serving(chat_folder, request_seconds=1.5) as served:
        status, _, body = ask(served, "/v1/embeddings", texts)
        assert (status, body["error"]["code"]) == (504, "timeout")
        assert ask(served, "/v1/embeddings", {"input": PROMPT})[0] == 200
        check_idle(served)
