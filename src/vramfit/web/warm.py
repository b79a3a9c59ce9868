"""Imported for its effect: torch and transformers are there, and a first prediction is made.

Nothing is computed backwards: autograd's threads would not survive the fork of a worker.
"""

from vramfit.estimator.predict import estimate
from vramfit.planner import plan as _planner  # noqa: F401
from vramfit.quiet import CHATTY, hush
from vramfit.web import answers as _answers
from vramfit.web.queries import JobQuery

hush(*CHATTY)
for _precision in ("fp32", "amp-fp16"):
    _model = _answers.model_of(JobQuery(model="bert-tiny"), False)
    estimate(_model, batch=8, seq=32, mode="forward", precision=_precision, gpu="t4")
