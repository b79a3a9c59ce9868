"""The tools that coding agents see: small answers, errors that say what to do."""

import asyncio
import json
from typing import Any

import pytest

mcp = pytest.importorskip("mcp", reason="pip install mcp")

from vramfit.integrations.mcp import TOOLS, make_server  # noqa: E402

JOB = {"model": "bert-tiny", "batch": 32, "seq": 128, "target": "t4"}
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 14.56 GiB "
    "of which 51.94 MiB is free. Including non-PyTorch memory, this process has 14.50 GiB memory in use. Of the "
    "allocated memory 13.20 GiB is allocated by PyTorch, and 800.00 MiB is reserved by PyTorch but unallocated."
)
SMALL = 2500
"""Characters of an answer that is read at a glance."""


def ask(*calls: tuple[str, dict[str, Any]]) -> list[Any]:
    async def talk() -> list[Any]:
        async with mcp.Client(make_server()) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == {tool.__name__ for tool in TOOLS}
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    return asyncio.run(talk())


def answers(*calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    found = ask(*calls)
    assert not any(result.is_error for result in found)
    texts = [result.content[0].text for result in found]
    assert all(len(text) < SMALL for text in texts)
    return [json.loads(text) for text in texts]


def test_estimates_batches_and_plans_are_those_of_the_library() -> None:
    import vramfit

    estimated, largest, planned = answers(
        ("estimate", JOB),
        ("max_batch", {"model": "bert-tiny", "seq": 128, "target": "64MiB", "settings": {"mode": "infer"}}),
        ("plan", JOB),
    )
    e = vramfit.estimate("bert-tiny", batch=32, seq=128, gpu="t4")
    assert estimated["peak_bytes"]["reserved"] == e.peak_reserved_bytes
    assert (estimated["fits"], estimated["basis"]) == (True, "derived")
    assert largest["batch"] == vramfit.max_batch("bert-tiny", seq=128, memory="64MiB", mode="infer").batch
    assert planned["micro_batch"] * planned["accumulate"] >= 32
    assert planned["settings"]


def test_an_out_of_memory_message_is_explained_with_a_plan() -> None:
    plain, planned = answers(
        ("explain", {"log": MESSAGE}),
        ("explain", {"log": MESSAGE, "model": "bert-tiny", "batch": 8, "seq": 64, "gpu": "t4"}),
    )
    assert plain["cause"] == "job"
    assert "plan_that_fits" not in plain
    assert planned["plan_that_fits"]["fits"] is True


def test_what_does_not_fit_is_an_answer_and_a_wrong_name_an_error_with_advice() -> None:
    refused, unknown, listed = ask(
        ("plan", {**JOB, "model": "bert-base-uncased", "target": "40MiB"}),
        ("estimate", {**JOB, "model": "bert-tinny"}),
        ("gpus", {"contains": "t4"}),
    )
    assert json.loads(refused.content[0].text)["fits"] is False
    assert unknown.is_error
    assert "bert-tiny" in unknown.content[0].text
    assert "→" in unknown.content[0].text
    assert "t4" in json.loads(listed.content[0].text)
