"""The page of `vramfit web` in a real Chromium."""

import json
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.browser.chromium import Page

ANSWERED = "!['wait', 'refused'].includes(document.getElementById('answer').dataset.tone)"
HEADLINE = "#headline-text"
NUM_FIGURES = "performance.getEntriesByName('vramfit-figure').length"

QUESTIONS_OF_ONE_MOVE = """(() => {
  const slider = document.getElementById("batch-slider"), fetched = window.fetch, asked = [];
  window.fetch = (address, ...more) => { asked.push(address.split("?")[0]); return fetched(address, ...more); };
  slider.stepUp();
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  window.fetch = fetched;
  return asked;
})()"""
"""Moves the slider by one place; gives what was asked before the event was over."""


def bar_widths(page: Page) -> dict[str, float]:
    script = (
        "Object.fromEntries([...document.querySelectorAll('#bar .part')]"
        ".map(p => [p.className, parseFloat(p.style.width)]))"
    )
    return {name.split("c-")[1]: width for name, width in page.evaluate(script).items()}


def move(page: Page, slider: str, steps: int = 1) -> None:
    """Move a slider by keys, and wait until the new figure stands there."""
    before = page.evaluate(NUM_FIGURES)
    page.evaluate(f"document.getElementById('{slider}').focus()")
    for _ in range(abs(steps)):
        page.press("ArrowRight" if steps > 0 else "ArrowLeft", number=39 if steps > 0 else 37)
    page.wait(f"{NUM_FIGURES} > {before}")


def test_the_page_loads_without_a_complaint_and_asks_nobody_else(page: Page, address: str) -> None:
    page.open(address)
    page.wait(ANSWERED)
    page.wait("document.querySelector('#row .n') && !document.querySelector('#row .waiting')")
    page.wait("document.getElementById('plan').getAttribute('aria-busy') === 'false'")
    assert page.complaints == []
    assert {urlsplit(url).netloc for url in page.requests} == {urlsplit(address).netloc}
    assert page.text(HEADLINE).startswith("Fits")
    numbers = [
        int(n.replace(",", ""))
        for n in page.evaluate("[...document.querySelectorAll('#row .n')].map(n => n.innerText)")
    ]
    assert len(numbers) == 8
    assert numbers[0] < numbers[-1]
    assert "vramfit plan bert-base-uncased" in page.text("#plan")


def test_the_api_is_described_by_a_page_that_asks_nobody_else(page: Page, address: str) -> None:
    page.open(f"{address}docs")
    page.wait("document.querySelectorAll('#api section').length > 4")
    assert "/api/estimate" in page.text("#api")
    assert page.complaints == []
    assert {urlsplit(url).netloc for url in page.requests} == {urlsplit(address).netloc}


def test_moving_the_batch_updates_bar_and_verdict(page: Page, address: str) -> None:
    page.open(f"{address}?gpu=rtx-3060&seq=512&batch=16")
    page.wait(ANSWERED)
    before, said = bar_widths(page), page.text(HEADLINE)
    assert said.startswith("Fits")
    move(page, "batch-slider", 12)
    page.wait("document.getElementById('headline-text').innerText.startsWith('Does not fit')")
    after = bar_widths(page)
    assert after["activations"] > before["activations"]
    assert page.evaluate("document.querySelector('#bar .over').hidden") is False
    page.wait("document.getElementById('spoken').textContent.startsWith('Does not fit')")


def test_the_limit_is_named_above_its_line_and_bars_are_in_proportion(page: Page, address: str) -> None:
    page.open(f"{address}?gpu=rtx-3060&seq=512&batch=48")
    page.wait(ANSWERED)
    assert page.text(HEADLINE).startswith("Does not fit")
    name, line = (
        page.evaluate(f"document.querySelector('.timeline {what}').getBoundingClientRect().{edge}")
        for what, edge in ((".limit-name", "bottom"), (".top-line", "top"))
    )
    assert line - 8 < name <= line
    page.wait("!document.querySelector('#row .waiting') && document.querySelectorAll('#row .n').length > 2")
    numbers = page.evaluate("[...document.querySelectorAll('#row .n')].map(n => Number(n.innerText.replace(',', '')))")
    widths = page.evaluate("[...document.querySelectorAll('#row .track i')].map(i => parseFloat(i.style.width))")
    assert widths == pytest.approx([100 * n / max(numbers) for n in numbers], abs=0.01)


def test_figures_come_while_a_slider_moves(page: Page, address: str) -> None:
    page.open(f"{address}?model=distilbert-base-uncased&seq=128&batch=8")
    page.wait(ANSWERED)
    page.wait(f"{NUM_FIGURES} === 1")
    for number in range(1, 7):
        asked = page.evaluate(QUESTIONS_OF_ONE_MOVE)
        assert asked == ["/api/estimate"]  # with the event itself; benchmarks/web_latency.py says how soon answers come
        page.wait(f"{NUM_FIGURES} === {1 + number}")


def test_a_shared_address_restores_what_was_chosen(page: Page, address: str) -> None:
    page.open(address)
    page.wait(ANSWERED)
    page.choose("model", "roberta-base")
    page.choose("precision", "amp-fp16")
    page.choose("checkpointing", "full")
    page.choose("batch", "23")
    page.wait("location.search.includes('batch=23')")
    page.wait("document.getElementById('asked').innerText.includes('batch 23')")
    shared, said = page.evaluate("location.href"), page.text("#asked")
    assert parse_qs(urlsplit(shared).query) == {
        "model": ["roberta-base"],
        "precision": ["amp-fp16"],
        "checkpointing": ["full"],
        "batch": ["23"],
    }
    page.open("about:blank#")
    page.open(shared)
    page.wait(f"{ANSWERED} && document.getElementById('asked').innerText.length > 9")
    assert page.text("#asked") == said
    assert page.evaluate("document.getElementById('checkpointing').value") == "full"


def test_an_impossible_choice_shows_the_reason(page: Page, address: str) -> None:
    page.open(f"{address}?gpu=t4")
    page.wait(ANSWERED)
    page.choose("precision", "amp-bf16")
    page.wait("document.getElementById('answer').dataset.tone === 'refused'")
    assert "t4 (sm_75) has no bfloat16" in page.text("#details")
    assert page.evaluate("document.getElementById('precision').getAttribute('aria-invalid')") == "true"
    page.choose("gpu", "l4")
    page.wait(ANSWERED)
    assert page.evaluate("document.getElementById('precision').hasAttribute('aria-invalid')") is False


def test_an_address_with_unknown_names_says_so(page: Page, address: str) -> None:
    page.open(f"{address}?model=..%2Fetc&colour=red")
    page.wait(ANSWERED)
    assert "model “../etc”" in page.text(".notice")


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_window_and_every_control_has_a_name(page: Page, address: str, width: int) -> None:
    page.resize(width, 800, phone=width < 500)
    page.open(f"{address}?model=modernbert-base&batch=200")
    page.wait(ANSWERED)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, button')].filter(c => !c.labels?.length && !c.ariaLabel && "
        "!c.innerText).map(c => c.outerHTML)"
    )
    assert json.dumps(unnamed) == "[]"


def test_it_can_be_used_by_keyboard_alone(page: Page, address: str) -> None:
    page.open(address)
    page.wait(ANSWERED)
    reached = []
    for _ in range(24):
        page.press("Tab", number=9)
        reached.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.name || document.activeElement.className"
            )
        )
    assert reached[0] == "skip"
    wanted = [
        "model",
        "task",
        "gpu",
        "mode",
        "batch",
        "batch-slider",
        "seq",
        "seq-slider",
        "precision",
        "checkpointing",
    ]
    assert [name for name in reached if name in wanted] == wanted
