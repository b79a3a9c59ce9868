"""`Finding`: one thing a check has to say: how bad it is, what it is, why it matters, what to do."""

from dataclasses import dataclass
from typing import Literal, get_args

Severity = Literal["ok", "info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One result of one check."""

    check: str
    """Which check found it: a stable, dotted name such as `environment.driver`."""
    severity: Severity
    """`ok` nothing to do; `info` good to know; `warning` will cost something; `error` will fail."""
    what: str
    """One line: what was found, with numbers."""
    why: str = ""
    """One line: why it matters."""
    fix: str = ""
    """One line: what to do; a command where there is one."""
    fatal: bool = False
    """Work must not go on."""


def worst(findings: "list[Finding] | tuple[Finding, ...]") -> Severity:
    """The gravest severity among findings; `ok` when there are none."""
    return max((f.severity for f in findings), key=SEVERITIES.index, default="ok")
