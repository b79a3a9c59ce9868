"""Other packages' remarks: held back while they are imported, and never for longer."""

import json
import logging
import subprocess
import sys

import pytest

from vramfit.quiet import hush, quiet

SCRIPT = """
import json, logging
logging.getLogger("torchao").setLevel({level})
import vramfit
vramfit.estimate("bert-tiny", batch=2, seq=16, gpu="t4")
from vramfit.quiet import CHATTY
print(json.dumps({{name: logging.getLogger(name).level for name in CHATTY}}))
"""


def test_the_first_lines_of_a_script_are_its_own_and_levels_are_as_before() -> None:
    code = SCRIPT.format(level=logging.INFO)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    levels = json.loads(done.stdout)
    assert done.stderr == ""
    assert levels["torchao"] == logging.INFO
    assert levels["torch.utils._pytree"] < logging.ERROR
    assert levels["transformers"] == logging.WARNING  # as transformers itself sets it


def test_only_errors_are_heard_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vramfit.tests.chatty")
    with quiet(logger.name):
        logger.warning("of no use")
        logger.error("of use")
    logger.warning("after")
    assert [record.message for record in caplog.records] == ["of use", "after"]


def test_a_level_that_is_set_meanwhile_stays_and_a_higher_one_is_not_lowered() -> None:
    changed, higher = logging.getLogger("vramfit.tests.changed"), logging.getLogger("vramfit.tests.higher")
    higher.setLevel(logging.CRITICAL)
    with quiet(changed.name, higher.name):
        assert higher.level == logging.CRITICAL
        changed.setLevel(logging.DEBUG)
    assert (changed.level, higher.level) == (logging.DEBUG, logging.CRITICAL)
    hush(changed.name)
    assert changed.level == logging.ERROR
