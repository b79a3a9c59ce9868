"""A report in a real Chromium, from a file and with the network off."""

from pathlib import Path

import pytest

import vramfit
from tests.browser.chromium import Page
from vramfit.estimator.search import fit_grid
from vramfit.records.run import StepCourse, sample
from vramfit.report.html.page import render_report
from vramfit.report.html.subject import Subject


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = vramfit.plan("bert-mini", batch=32, seq=128, gpu="t4")
    requested = [point.requested_bytes for point in plan.estimate.timeline]
    w = plan.workload
    course = StepCourse(
        step=5,
        device="cuda:0",
        batch=w.batch,
        micro_batch=plan.micro_batch,
        seq=w.seq,
        num_events=len(requested),
        requested_bytes=sample(requested),
    )
    subject = Subject(
        source="test", plan=plan, estimate=plan.estimate, grid=fit_grid(w), course=course, course_estimate=plan.estimate
    )
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_report(subject))
    return path


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_every_figure_is_drawn_with_the_network_off(page: Page, report: Path, width: int, dark: bool) -> None:
    page.resize(width, 900, dark=dark, phone=width < 500)
    page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    page.open(report.as_uri())
    page.wait("document.querySelectorAll('.figure').length >= 4")
    page.wait("[...document.querySelectorAll('.figure')].every(f => f.querySelector('svg.main-svg'))")
    assert page.complaints == []
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "blob"}
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelectorAll('#modules .slice').length") >= 5
    assert "measured, requested" in page.text("#timeline")


NAMED = """[...document.querySelectorAll('#modules .slice')].map(slice => {
  const box = slice.querySelector('path').getBoundingClientRect(), text = slice.querySelector('text');
  const name = text?.textContent ? text.getBoundingClientRect() : null;
  return { name: text?.textContent ?? '', fits: !name || (name.left >= box.left - 1 && name.right <= box.right + 1) };
})"""


@pytest.mark.parametrize("width", [1280, 390])
def test_every_module_that_is_drawn_is_named_inside_its_place(page: Page, report: Path, width: int) -> None:
    page.resize(width, 900, phone=width < 500)
    page.open(report.as_uri())
    page.wait("document.querySelector('#modules .slice text')")
    slices = page.evaluate(NAMED)
    assert all(found["fits"] for found in slices)
    inside = page.evaluate("document.getElementById('modules').data[0].parents")
    leaves = [
        label
        for label, id_ in page.evaluate(
            "(d => d.labels.map((l, i) => [l, d.ids[i]]))(document.getElementById('modules').data[0])"
        )
        if id_ not in inside
    ]
    named = " ".join(found["name"] for found in slices)
    assert leaves
    assert [leaf for leaf in leaves if leaf not in named] == []


def test_a_module_can_be_looked_into_and_left(page: Page, report: Path) -> None:
    page.open(report.as_uri())
    page.wait("document.querySelector('#modules .slice text')")
    level = "document.getElementById('modules').data[0].level"
    click = "document.querySelectorAll('#modules .slice')[{}].dispatchEvent(new MouseEvent('click', {{bubbles: true}}))"
    whole = page.evaluate(level)
    page.evaluate(click.format(1))
    page.wait(f"{level} !== '{whole}'")
    assert page.evaluate(level) != whole
    page.evaluate(click.format(0))
    page.wait(f"{level} === '{whole}'")
    assert page.evaluate(level) == whole


def test_the_curves_of_a_run_leave_no_hole(page: Page, tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": n, "loss": 1 / n, "tokens_per_s": 9.0, "reserved_bytes": n} for n in range(1, 9)]
    path = tmp_path / "run.html"
    path.write_text(render_report(Subject(source="test", metrics=tuple(lines))))
    page.resize(1280, 900)
    page.open(path.as_uri())
    page.wait("document.querySelectorAll('.grid svg.main-svg').length >= 3")
    rights = page.evaluate("[...document.querySelectorAll('.grid > *')].map(c => c.getBoundingClientRect().right)")
    edge = page.evaluate("document.querySelector('.grid').getBoundingClientRect().right")
    assert len(rights) == 3
    assert rights[-1] == pytest.approx(edge, abs=1)
