"""A report in a real Chromium, from a file and with the network off."""

from pathlib import Path

import pytest

import vramfit
from tests.browser.chromium import Page
from vramfit.estimator.grid import fit_grid
from vramfit.records.course import StepCourse, sample
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
    assert page.evaluate("document.querySelectorAll('#modules .slice').length") > 10
    assert "measured, requested" in page.text("#timeline")
