from vramfit.records.finding import Displayed
from vramfit.report.display import DRAWINGS, TEXTS


def test_every_record_that_shows_itself_has_a_text() -> None:
    assert {record.__name__ for record in TEXTS} == {record.__name__ for record in Displayed.__subclasses__()}
    assert set(DRAWINGS) <= set(TEXTS)
