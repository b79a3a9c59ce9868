"""The API of `vramfit web`: exact figures, and a sentence for everything it does not answer."""

import socket
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import vramfit
from vramfit.records.estimate import Estimate
from vramfit.settings import PLANNED, having
from vramfit.web import answers
from vramfit.web import app as server_module
from vramfit.web.app import create_app
from vramfit.web.queries import MAX_PARAMETERS, EstimateQuery
from vramfit.workload import CHOICES


def refused(client: TestClient, path: str, status: int = 422, **parameters: Any) -> answers.Problem:
    response = client.get(path, params=parameters)
    assert response.status_code == status, response.text
    return answers.Problem.model_validate_json(response.text)


def test_an_estimate_is_that_of_the_library(client: TestClient) -> None:
    asked = {
        "model": "bert-mini",
        "batch": 12,
        "seq": 96,
        "gpu": "t4",
        "precision": "amp-fp16",
        "checkpointing": "full",
    }
    answer = answers.EstimateAnswer.model_validate_json(client.get("/api/estimate", params=asked).text)
    expected = vramfit.estimate(asked["model"], **{k: v for k, v in asked.items() if k != "model"})
    assert answer.peak_allocated_bytes == expected.peak_allocated_bytes
    assert answer.safe_reserved_bytes == expected.safe_reserved_bytes
    assert answer.breakdown == dict(expected.breakdown)
    assert answer.settings["model"] == "bert-mini"
    assert answer.command == (
        "vramfit estimate bert-mini --batch 12 --seq 96 --gpu t4 --precision amp-fp16 --checkpointing full"
    )


def test_an_answer_has_the_fields_of_its_record_and_what_is_said_of_them() -> None:
    left_out = {"workload", "modules", "groups", "snapshot"}
    assert set(Estimate.__dataclass_fields__) - left_out <= set(answers.EstimateAnswer.model_fields)
    about = create_app().openapi()["components"]["schemas"]["EstimateAnswer"]["properties"]
    assert about["host_bytes"]["description"] == "What offloading holds in host memory, beside the process itself."


def test_the_parts_of_every_moment_add_up(client: TestClient) -> None:
    answer = client.get("/api/estimate", params={"model": "bert-tiny", "batch": 4}).json()
    assert len(answer["timeline"]) > 50
    for moment in answer["timeline"]:
        assert sum(moment["breakdown"].values()) == moment["allocated_bytes"]
    assert max(m["allocated_bytes"] for m in answer["timeline"]) <= answer["peak_allocated_bytes"]


def test_a_largest_batch_and_a_plan_are_those_of_the_library(client: TestClient) -> None:
    found = client.get("/api/max-batch", params={"model": "bert-tiny", "seq": 128, "memory": "300MiB"}).json()
    largest = vramfit.max_batch("bert-tiny", seq=128, memory="300MiB", gpu="t4", precision="fp32")
    assert (found["batch"], found["margin_batch"]) == (largest.batch, largest.margin_batch)
    planned = client.get("/api/plan", params={"model": "bert-mini", "batch": 64, "seq": 128, "gpu": "t4"}).json()
    expected = vramfit.plan("bert-mini", batch=64, seq=128, gpu="t4")
    assert planned["missing"] is None
    assert planned["found"]["safe_reserved_bytes"] == expected.estimate.safe_reserved_bytes
    assert planned["found"]["commands"]["plan"].startswith("vramfit plan bert-mini --batch 64 --seq 128 --gpu t4")


def test_every_setting_that_a_plan_answers_can_be_asked_for(client: TestClient) -> None:
    asked = {"model": "bert-mini", "batch": 8, "seq": 128, "gpu": "t4", "memory": "140MiB"}
    plan = client.get("/api/plan", params=asked).json()["found"]
    assert "offload" in plan["settings"]
    estimate = client.get("/api/estimate", params=plan["settings"])
    assert estimate.status_code == 200, estimate.text
    assert estimate.json()["safe_reserved_bytes"] == plan["safe_reserved_bytes"]
    assert estimate.json()["settings"] == plan["settings"]


def test_an_estimate_takes_whatever_the_planner_chooses() -> None:
    taken = EstimateQuery.model_fields
    for name in (*PLANNED, "loop"):
        assert name in taken, name
        for value in CHOICES.get(name, ()):
            assert getattr(EstimateQuery.model_validate({name: value}), name) == value


def test_samples_of_a_pass_give_how_many_passes_there_are(client: TestClient) -> None:
    asked = {"model": "bert-tiny", "batch": 8, "micro_batch": 3, "loop": "stepper"}
    settings = client.get("/api/estimate", params=asked).json()["settings"]
    assert (settings["micro_batch"], settings["accumulate"]) == (3, 3)


def test_the_catalogue_says_what_each_path_takes(client: TestClient) -> None:
    taken = client.get("/api/catalogue").json()["parameters"]
    schema = create_app().openapi()["paths"]
    hidden = having(hidden=True)
    shown = {path: [name for name in names if name not in hidden] for path, names in taken.items()}
    assert {path: [p["name"] for p in schema[path]["get"]["parameters"]] for path in taken} == shown
    assert set(hidden) == {"casts", "loop"} < set(taken["/api/estimate"])  # taken, and not shown
    assert "offload" in taken["/api/estimate"]
    assert "offload" not in taken["/api/plan"]


def test_no_plan_is_an_answer_that_says_what_would_do(client: TestClient) -> None:
    asked = {"model": "bert-small", "batch": 8, "seq": 64, "gpu": "t4", "memory": "150MiB"}
    answer = client.get("/api/plan", params=asked).json()
    assert answer["found"] is None
    assert answer["missing"]["shortfall_bytes"] > 0
    assert answer["missing"]["hint"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"batch": 10**12}, "batch '1000000000000' must be less than or equal to 65536"),
        ({"batch": 0}, "greater than or equal to 1"),
        ({"seq": 10**9}, "seq '1000000000' must be less than or equal to 32768"),
        ({"accumulate": 10**7}, "accumulate"),
        ({"batch": "many"}, "batch 'many' must be a valid integer"),
        ({"memory": "1" * 40 + "GiB"}, "memory"),
        ({"colour": "red"}, "there is no parameter 'colour'"),
        ({"precision": "fp12"}, "precision 'fp12' must be 'fp32'"),
        ({"precision": "amp-bf16", "gpu": "t4"}, "has no bfloat16"),
        ({"seq": 2048}, "beyond the 512 positions"),
        ({"gpu": "voodoo2"}, "nearest"),
        ({"freeze": "../../etc"}, "freeze"),
        ({"mode": "infer", "lora": 8}, "lora is for mode train"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(client: TestClient, asked: dict[str, Any], said: str) -> None:
    problem = refused(client, "/api/estimate", **asked)
    assert said in problem.error
    assert len(problem.error) < 500


def test_no_path_and_no_hub_name_is_opened(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bert-tiny").mkdir()
    (tmp_path / "bert-tiny" / "config.json").write_text("not a configuration")
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "bert-tiny"), "./bert-tiny", "../x", "google/some-model", "https://x.example/y"):
        assert "only the catalogue's models" in refused(client, "/api/estimate", model=name).error
    assert client.get("/api/estimate", params={"model": "bert-tiny", "seq": 77}).status_code == 200


def test_a_task_without_a_loss_does_not_train() -> None:
    from vramfit.web.answers import answer
    from vramfit.web.queries import EstimateQuery

    status, body = answer(EstimateQuery(model="bert-tiny", task="features", batch=2, seq=32), allow_local=False)
    assert status == 422
    assert b"no loss to train on" in body
    query = EstimateQuery(model="bert-tiny", task="features", mode="infer", batch=2, seq=32)
    assert answer(query, allow_local=False)[0] == 200


def test_folders_can_be_allowed(tmp_path: Path) -> None:
    from vramfit.web.answers import answer
    from vramfit.web.queries import EstimateQuery

    config = Path(vramfit.__file__).parent / "models" / "configs" / "bert-tiny.json"
    (tmp_path / "config.json").write_text(config.read_text())
    query = EstimateQuery(model=str(tmp_path), batch=2, seq=32)
    assert answer(query, allow_local=False)[0] == 422
    assert answer(query, allow_local=True)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "127.0.0.1.evil.example", "", "localhost@evil.example", "[::2]", "[", "127.0.0.1@localhost"),
        *("127.0.0.1:port", "127.0.0.1/elsewhere", "localhost:80:80", "localhost#"),
    ],
)
def test_names_that_only_lead_here_are_refused(client: TestClient, host: str) -> None:
    response = client.get("/api/catalogue", headers={"Host": host})
    assert response.status_code == 421
    assert "error" in response.json()


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:1", "[::1]:9", "LOCALHOST"])
def test_names_of_this_machine_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"Host": host}).status_code == 200


def test_pages_of_other_sites_are_refused(client: TestClient) -> None:
    assert client.get("/api/catalogue", headers={"Origin": "https://evil.example"}).status_code == 403
    cross = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert client.get("/api/catalogue", headers=cross).status_code == 403
    assert client.get("/api/catalogue", headers={"Origin": "http://127.0.0.1:8765"}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://[", "http://[::1", "http://]", "null", "", "127.0.0.1:8765", "://", "http://[v]"]
)
def test_an_origin_that_is_no_address_is_refused_like_any_other(client: TestClient, origin: str) -> None:
    response = client.get("/api/catalogue", headers={"Origin": origin, "Referer": origin})
    assert response.status_code == 403
    assert "another origin" in response.json()["error"]


@pytest.mark.parametrize("referer", ["http://[", "", "http://evil.example/"])
def test_a_referer_is_of_no_consequence(client: TestClient, referer: str) -> None:
    assert client.get("/api/catalogue", headers={"Referer": referer}).status_code == 200


def test_every_answer_keeps_the_page_to_itself(client: TestClient) -> None:
    for path in ("/", "/docs", "/api/catalogue", "/nothing"):
        response = client.get(path)
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert client.get("/nothing").json()["error"].startswith("GET /nothing")
    assert client.post("/api/estimate", content=b"x" * 10**6).status_code == 405


def test_the_page_names_no_other_host() -> None:
    from vramfit.web.app import PAGE

    for file in PAGE.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text
        assert "https:" not in text


def test_the_schema_has_every_answer_and_problem() -> None:
    schema = create_app().openapi()
    assert set(schema["paths"]) == {"/api/catalogue", "/api/estimate", "/api/max-batch", "/api/plan"}
    for path in ("/api/estimate", "/api/max-batch", "/api/plan"):
        refusal = schema["paths"][path]["get"]["responses"]["422"]["content"]["application/json"]["schema"]
        assert refusal["$ref"].endswith("/Problem")


def test_more_parameters_than_anybody_has_use_for_are_refused_unread(client: TestClient) -> None:
    for number, status in ((MAX_PARAMETERS + 1, 400), (5000, 400), (MAX_PARAMETERS, 422)):
        query = "&".join(f"p{i}=1" for i in range(number))
        response = client.get(f"/api/estimate?{query}")
        problem = answers.Problem.model_validate_json(response.text)
        assert response.status_code == status
        assert (f"{number:,} parameters" in problem.error) == (status == 400)


def test_pages_that_keep_connections_open_may_ask_once_more_when_the_server_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[dict[str, Any]] = []

    class Recorded:
        def __init__(self, app: Any, **options: Any) -> None:
            made.append(options)

        def run(self, sockets: list[socket.socket]) -> None:
            sockets[0].close()

    monkeypatch.setattr(server_module, "Server", Recorded)
    server_module.serve("127.0.0.1", 0, on_listening=lambda: None, on_ready=lambda url: None)
    assert made[0]["last_calls_s"] > 0  # in which answers say `Connection: close`
