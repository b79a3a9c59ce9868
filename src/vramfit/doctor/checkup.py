"""The checkup: every check of the environment, in the order a person would ask."""

from vramfit.doctor.drivers import check_gpu, check_others, check_torch
from vramfit.doctor.environment import Environment, gather
from vramfit.doctor.packages import check_extras, check_packages, check_python
from vramfit.doctor.variables import check_variables
from vramfit.records.finding import Finding

CHECKS = (check_python, check_torch, check_packages, check_gpu, check_others, check_variables, check_extras)


def check_environment(env: Environment | None = None) -> list[Finding]:
    """All findings about an environment; about this one when none is given."""
    env = env or gather()
    return [finding for check in CHECKS for finding in check(env)]
