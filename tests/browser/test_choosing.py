"""What the page of `vramfit web` does with choices: the model's field, plans that are used, waiting for answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from tests.browser.chromium import Page
from vramfit.models.catalogue import all_entries

FAMILIES = {entry.name: entry.family for entry in all_entries()}

ANSWERED = "!['wait', 'refused'].includes(document.getElementById('answer').dataset.tone)"
PLANNED = "document.getElementById('plan').getAttribute('aria-busy') === 'false'"
ROW = "document.querySelector('#row .n') && !document.querySelector('#row .waiting')"
LISTED = "[...document.querySelectorAll('#models [role=option] span')].map(o => o.innerText)"
EMPTY_BOXES = (
    "[...document.querySelectorAll('.card, select, table, ul, #bar, #timeline, input[type=text]')]"
    ".filter(box => box.checkVisibility() && box.getBoundingClientRect().height > 0 && "
    "!(box.innerText || '').trim() && !box.value && !box.childElementCount).map(box => box.outerHTML)"
)


@contextmanager
def held_back(page: Page, *paths: str) -> Iterator[None]:
    """Requests for these paths do not get their answers inside the block."""
    page.call("Fetch.enable", patterns=[{"urlPattern": f"*{path}*"} for path in paths])
    try:
        yield
    finally:
        page.call("Fetch.disable")


def type_text(page: Page, text: str) -> None:
    page.evaluate("(() => { const c = document.getElementById('model'); c.focus(); c.select(); })()")
    for character in text:
        page.call("Input.dispatchKeyEvent", type="char", text=character)


def use_plan(page: Page, settings: dict[str, Any]) -> None:
    """Have the next plan answer these settings, and use it."""
    page.wait(f"{ANSWERED} && {PLANNED}")
    page.evaluate(
        "(() => { const real = window.fetch; window.fetch = async (url, ...more) => {"
        "const got = await real(url, ...more); if (!String(url).startsWith('/api/plan')) return got;"
        f"const body = await got.json(); body.found.settings = {json.dumps(settings)};"
        "window.isStubbed = true; return new Response(JSON.stringify(body)); } })()"
    )
    page.evaluate("document.querySelector('#allow input').click()")  # so that it plans anew
    page.wait(f"window.isStubbed && {PLANNED}")
    page.evaluate("document.querySelector('#plan button.main').click()")


def asked(page: Page, path: str) -> list[dict[str, str]]:
    found = [urlsplit(url) for url in page.requests]
    return [dict(parse_qsl(url.query)) for url in found if url.path == path]


def test_a_model_is_found_by_parts_of_its_name_and_chosen_by_keys(page: Page, address: str) -> None:
    page.open(f"{address}?model=bert-tiny&seq=64")
    page.wait(ANSWERED)
    type_text(page, "rob lar")
    listed = page.evaluate(LISTED)
    assert "roberta-large" in listed
    assert all("lar" in name and ("rob" in name or "rob" in FAMILIES[name]) for name in listed)
    page.press("ArrowDown", number=40)
    chosen = page.evaluate("document.querySelector('#models [aria-selected=true] span').innerText")
    assert chosen == listed[1]
    assert page.evaluate("document.getElementById('model').getAttribute('aria-activedescendant')") == "models-1"
    page.press("Enter", number=13)
    page.wait(f"document.getElementById('asked').innerText.startsWith({json.dumps(chosen)})")
    assert page.evaluate("document.getElementById('models').hidden") is True


def test_text_that_is_given_up_leaves_the_model_as_it_was(page: Page, address: str) -> None:
    page.open(f"{address}?model=bert-tiny&seq=64")
    page.wait(ANSWERED)
    type_text(page, "zzz")
    assert "--allow-local" in page.text("#models")
    page.press("Escape", number=27)
    assert page.evaluate("document.getElementById('model').value") == "bert-tiny"
    page.press("ArrowDown", number=40)  # the whole list again
    assert len(page.evaluate(LISTED)) > 20
    assert "zzz" not in json.dumps(asked(page, "/api/estimate"))


def test_a_model_that_is_not_known_is_refused_in_words(page: Page, address: str) -> None:
    page.open(f"{address}?model=bert-tiny&seq=64")
    page.wait(ANSWERED)
    type_text(page, "no/such-model")
    page.press("Enter", number=13)
    page.wait("document.getElementById('answer').dataset.tone === 'refused'")
    assert "no/such-model" in page.text("#details")


SETTINGS: dict[str, Any] = {
    "model": "bert-tiny",
    "task": "sequence-classification",
    "mode": "train",
    "batch": 7,
    "accumulate": 2,
    "micro_batch": 5,
    "seq": 64,
    "precision": "amp-fp16",
    "attention": "sdpa",
    "checkpointing": 1,
    "optimizer": "adamw-fused",
    "offload": "optimizer",
    "allocator": "expandable",
    "loop": "stepper",
    "gpu": "t4",
}
"""As a plan answers them; every one of them is something else on the page by itself, or in its address."""


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        {**SETTINGS, "checkpointing": "full", "offload": "weights"},
        {
            **{name: value for name, value in SETTINGS.items() if name not in ("offload", "checkpointing")},
            "precision": "amp-bf16",
            "attention": "packed",
            "fused": True,
            "graphs": True,
            "gpu": "a100-40gb",
        },
    ],
    ids=["offload-optimizer", "offload-weights", "fused-graphs"],
)
def test_a_plan_is_used_with_every_setting_that_it_answers(page: Page, address: str, settings: dict[str, Any]) -> None:
    page.open(f"{address}?model=bert-tiny&batch=7&seq=64&lora=8&gpu={settings['gpu']}")
    use_plan(page, settings)
    page.wait("location.search.includes('loop=stepper')")
    page.wait(f"!document.body.classList.contains('asking') && {ANSWERED}")
    defaults = page.evaluate("fetch('/api/catalogue').then(a => a.json()).then(c => c.defaults)")
    given = {**defaults, **asked(page, "/api/estimate")[-1]}
    told = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}
    assert {name: str(given[name]) for name in told} == told
    assert "lora" not in given
    assert page.evaluate("document.querySelector('.notice')") is None
    page.choose("batch", "8")  # what a plan split unevenly is split evenly again
    page.wait("document.getElementById('asked').innerText.includes('batch 8')")
    assert "micro_batch" not in asked(page, "/api/estimate")[-1]


def test_a_plan_with_settings_that_the_page_has_not_says_so(page: Page, address: str) -> None:
    page.open(f"{address}?model=bert-tiny&batch=7&seq=64")
    use_plan(page, {**SETTINGS, "offload": "cellar", "colour": "red"})
    page.wait("document.querySelector('.notice')")
    assert "The plan has offload “cellar”, colour “red”" in page.text(".notice")


def test_there_are_words_before_anything_can_be_chosen(page: Page, address: str) -> None:
    with held_back(page, "/api/catalogue"):
        page.open(address)
        assert "Loading the models" in page.text("#job")
        assert page.evaluate(EMPTY_BOXES) == []
    page.wait(ANSWERED)
    assert "Loading" not in page.text("#job")


def test_there_are_words_while_the_first_answers_come(page: Page, address: str) -> None:
    with held_back(page, "/api/estimate", "/api/max-batch", "/api/plan"):
        page.open(f"{address}?model=bert-tiny&seq=64")
        page.wait("document.querySelectorAll('#row .waiting').length === 8")
        assert page.text("#headline-text") == "Predicting what it takes …"
        assert "bert-tiny" in page.text("#asked")
        assert "asking" in page.text("#row")
        assert "Planning" in page.text("#plan-card")
        assert page.evaluate(EMPTY_BOXES) == []
    page.wait(f"{ANSWERED} && {ROW} && {PLANNED}")
    assert page.evaluate("document.getElementById('planning').checkVisibility()") is False


def test_the_last_answer_stays_dimmed_until_the_next_comes(page: Page, address: str) -> None:
    page.open(f"{address}?model=bert-tiny&seq=64")
    page.wait(f"{ANSWERED} && {ROW} && {PLANNED}")
    said, numbers, plan = page.text("#headline-text"), page.text("#row"), page.text("#plan")
    with held_back(page, "/api/"):
        page.choose("seq", "65")
        page.wait("document.querySelectorAll('#row .waiting').length === 8")
        page.wait("getComputedStyle(document.getElementById('headline')).opacity < 0.6")
        assert (page.text("#headline-text"), page.text("#row"), page.text("#plan")) == (said, numbers, plan)
        assert page.evaluate("document.getElementById('plan').inert") is True
        assert "Predicting" in page.text(".busy-words")
    page.wait(f"!document.body.classList.contains('asking') && {ROW} && {PLANNED}")
    assert page.evaluate("getComputedStyle(document.getElementById('headline')).opacity") == "1"


@pytest.mark.parametrize(("gpu", "is_cut"), [("t4", True), ("gtx-1650", False)])
def test_a_step_has_an_axis_with_units_a_line_and_a_legend(page: Page, address: str, gpu: str, is_cut: bool) -> None:
    page.open(f"{address}?model=bert-base-uncased&batch=8&seq=128&gpu={gpu}")
    page.wait(ANSWERED)
    ticks = page.evaluate("[...document.querySelectorAll('#timeline .tick')].map(t => t.innerText)")
    assert ticks[0] == "0 GiB"
    assert len(ticks) >= 3
    assert all(tick.endswith("GiB") for tick in ticks)
    title = page.evaluate("document.getElementById('gpu').selectedOptions[0].text").split(",")[0].split()[-1]
    assert title in page.text("#timeline .limit-name")
    assert "may be reserved" in page.text("#timeline .limit-name")
    line, highest = (
        page.evaluate(f"Math.min(...[...document.querySelectorAll('{what}')].map(e => e.getBoundingClientRect().top))")
        for what in ("#timeline .top-line", "#timeline polygon")
    )
    assert line < highest
    assert page.evaluate("document.querySelector('#timeline .cut') !== null") is is_cut
    legend = page.text("#legend")
    for name in ("weights", "gradients", "optimizer", "activations", "temporaries"):
        assert name in legend
    assert "in the optimizer’s step only the loss and the model’s outputs are left" in legend


def test_what_is_held_at_the_optimizers_peak_is_called_what_it_is(page: Page, address: str) -> None:
    page.open(f"{address}?model=bert-tiny&batch=1&seq=32&loop=stepper")
    page.wait(ANSWERED)
    assert "optimizer's step" in page.text("#when")
    row = page.evaluate(
        "[...document.querySelectorAll('#parts tbody tr')].map(r => r.innerText).find(t => t.includes('activations'))"
    )
    assert "loss and outputs of the forward pass" in row
    assert "kept for the backward pass" not in row


def test_what_experts_set_is_folded_away_and_explained(page: Page, address: str) -> None:
    page.open(f"{address}?model=bert-tiny&seq=64")
    page.wait(ANSWERED)
    assert page.evaluate("document.getElementById('advanced').open") is False
    unexplained = page.evaluate(
        "[...document.querySelectorAll('#advanced select, #advanced input')].filter(c => "
        "!(c.closest('label, .field').querySelector('small')?.textContent.length > 20)).map(c => c.id)"
    )
    assert unexplained == []
    page.choose("allocator", "expandable")
    page.wait("document.getElementById('advanced-set').textContent.includes('allocator expandable')")
    page.choose("fused", "true")  # refused: it is for packed attention
    page.wait("document.getElementById('answer').dataset.tone === 'refused'")
    assert page.evaluate("document.getElementById('advanced').open") is True
