import json
from dataclasses import dataclass

import pytest

from vramfit.records.codec import SCHEMA_VERSION, RecordError, from_json, to_json
from vramfit.records.finding import Finding, worst


@dataclass(frozen=True, kw_only=True)
class Inner:
    num_things: int


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...] = ()
    table: dict[str, int] | None = None
    mixed: str | int | None = None
    pair: tuple[int, str] = (1, "a")
    ratio: float = 0.0


OUTER = Outer(
    inner=Inner(num_things=3),
    many=(Inner(num_things=1),),
    table={"a": 1},
    mixed="x",
    pair=(2, "b"),
    ratio=0.5,
)


def test_records_survive_json() -> None:
    assert from_json(Outer, to_json(OUTER)) == OUTER
    finding = Finding(check="a.b", severity="warning", what="w", why="y", fix="f")
    assert from_json(Finding, to_json(finding)) == finding


def test_json_says_which_record_and_schema_it_is() -> None:
    data = json.loads(to_json(OUTER))
    assert (data["schema_version"], data["record"]) == (SCHEMA_VERSION, "Outer")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 99}, "schema_version 99"),
        ({"schema_version": None}, "schema_version None"),
        ({"record": "Plan"}, "this is a Plan"),
        ({"inner": {}}, "'num_things' is missing"),
        ({"inner": {"num_things": "3"}}, "Outer.inner.num_things: expected int"),
        ({"inner": {"num_things": True}}, "expected int"),
        ({"many": [1]}, "Outer.many[0]: expected an object"),
        ({"pair": [1]}, "expected 2 items"),
        ({"table": [1]}, "expected dict"),
        ({"surprise": 1}, "unknown field 'surprise'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(change: dict[str, object], says: str) -> None:
    text = json.dumps(json.loads(to_json(OUTER)) | change)
    with pytest.raises(RecordError) as caught:
        from_json(Outer, text)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "3", "{", "null", "[" * 100_000])
def test_text_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(RecordError):
        from_json(Outer, text)


def test_a_severity_outside_the_list_is_refused() -> None:
    finding = json.loads(to_json(Finding(check="a", severity="ok", what="w"))) | {"severity": "bad"}
    with pytest.raises(RecordError, match="'bad' is not one of"):
        from_json(Finding, json.dumps(finding))


def test_the_worst_severity_wins() -> None:
    assert worst([]) == "ok"
    assert (
        worst([Finding(check="a", severity=s, what="") for s in ("info", "error", "warning")]) == "error"  # type: ignore[arg-type]
    )
