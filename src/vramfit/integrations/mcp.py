"""The MCP server of `vramfit mcp`: estimates, largest batches, plans and explanations for coding agents.

Answers are small on purpose: what an engineer would want to know, in words and bytes, not whole records. Settings that
have no parameter of their own go into `settings`, by the keywords of `vramfit.Workload`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import vramfit
from vramfit.errors import MissingExtra, NoPlanFits, VramfitError
from vramfit.records.estimate import Estimate
from vramfit.records.plan import Plan
from vramfit.report.words import verdict_of
from vramfit.units import format_bytes

if TYPE_CHECKING:
    from mcp.server import MCPServer

INSTRUCTIONS = (
    "Predicts GPU memory of transformers models (BERT-class encoders, embedding models, rerankers, small decoders) "
    "on the meta device: no GPU and no weights are needed, and nothing is run or downloaded but a configuration. Use "
    "estimate before you propose a batch size, plan before you propose settings for a memory budget, and explain for "
    "an out-of-memory message."
)
MOST_REASONS = 8
Answer = dict[str, Any]
Settings = dict[str, Any]
Tool = TypeVar("Tool", bound=Callable[..., Answer])


def estimate(model: str, batch: int, seq: int, target: str, settings: Settings | None = None) -> Answer:
    """Predict the peak GPU memory of a training step, a forward pass or inference, to the byte.

    model: catalogue name (bert-base-uncased), folder with config.json, or hub id. batch: samples per optimizer step.
    seq: tokens per sequence. target: a GPU (t4, a10g, rtx-4090) or an amount of memory (11GiB).
    settings: others by keyword, such as {"mode": "infer", "precision": "amp-bf16", "checkpointing": "full",
    "optimizer": "adamw-fused", "accumulate": 4, "task": "embedding"}.
    """
    e = vramfit.estimate(model, batch=batch, seq=seq, **_target(target), **settings or {})
    return _estimated(e) | {"largest_parts": _parts(e), "phase_of_peak": f"{e.peak.part} of {e.peak.phase}"}


def max_batch(model: str, seq: int, target: str, settings: Settings | None = None) -> Answer:
    """Find the largest batch that fits, and the largest that keeps the headroom of plans (use that one).

    The arguments are those of estimate.
    """
    m = vramfit.max_batch(model, seq=seq, **_target(target), **settings or {})
    return {"batch": m.batch, "batch_with_headroom": m.margin_batch, "limited_by": m.limited_by} | _estimated(
        m.estimate
    )


def plan(model: str, batch: int, seq: int, target: str, settings: Settings | None = None) -> Answer:
    """Find the fastest training settings that fit, keeping the effective batch; each setting comes with its reason.

    settings: what is fixed, by keyword, such as {"precision": "amp-bf16"}; {"exact": true} keeps the maths the same;
    {"allow": ["lora", "freeze"]} allows what changes the training: freeze, lora, int8, bf16, adafactor, sgd.
    The other arguments are those of estimate.
    """
    return _planned(vramfit.plan(model, batch=batch, seq=seq, **_target(target), **settings or {}))


def explain(
    log: str, model: str | None = None, batch: int | None = None, seq: int | None = None, gpu: str | None = None
) -> Answer:
    """Explain an out-of-memory message or log: the cause, who held the memory and, given a model, settings that fit."""
    from vramfit.doctor.explain import explain as explained

    keywords = {k: v for k, v in (("batch", batch), ("seq", seq), ("gpu", gpu)) if v is not None and model is not None}
    x = explained(log, model=model, **keywords)
    answer: Answer = {
        "what_happened": x.headline,
        "cause": x.cause,
        "memory_was_in": {h.name: format_bytes(h.num_bytes) for h in x.holdings},
        "findings": [{"what": f.what, "fix": f.fix} for f in x.findings],
    }
    if x.plan is not None:
        answer["plan_that_fits"] = _planned(x.plan)
    if x.no_plan is not None:
        answer["no_plan"] = x.no_plan
    return answer


def gpus(contains: str = "") -> Answer:
    """List GPUs of the catalogue whose name contains a text, with the memory that CUDA reports."""
    from vramfit.devices.catalogue import all_gpus

    return {g.name: format_bytes(g.total_memory_bytes) for g in all_gpus() if contains.lower() in g.name}


TOOLS: tuple[Callable[..., Answer], ...] = (estimate, max_batch, plan, explain, gpus)


def make_server() -> "MCPServer[Any]":
    """The server with its tools.

    Raises:
        MissingExtra: the MCP SDK is not installed.
    """
    try:
        from mcp.server import MCPServer
    except ImportError:
        raise MissingExtra("vramfit mcp", extra="mcp", package="mcp") from None
    server: MCPServer[Any] = MCPServer(
        "vramfit", version=vramfit.__version__, instructions=INSTRUCTIONS, log_level="ERROR"
    )
    for tool in TOOLS:
        server.tool()(_worded(tool))
    return server


def serve() -> None:
    """Answer on standard input and output until the client leaves."""
    make_server().run("stdio")


def _worded(tool: Tool) -> Tool:
    """The tool with errors of ours as errors that a client reads: what happened, and what to do."""
    from functools import wraps

    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(tool)
    def run(*args: Any, **kwargs: Any) -> Answer:
        try:
            return tool(*args, **kwargs)
        except NoPlanFits as error:
            return {"fits": False, "verdict": str(error), "what_would_help": error.hint}
        except VramfitError as error:
            raise ToolError(f"{error}\n→ {error.hint}" if error.hint else str(error)) from None

    return run  # type: ignore[return-value]


def _target(text: str) -> dict[str, str]:
    """An amount of memory begins with a digit and ends with a unit; anything else is a GPU."""
    return {"memory" if text[:1].isdigit() and text.upper().endswith("B") else "gpu": text}


def _estimated(e: Estimate) -> Answer:
    verdict = verdict_of(e)
    figures = ("requested", "allocated", "reserved", "process")
    return {
        "fits": e.fits,
        "verdict": f"{verdict.headline}. {' '.join(verdict.details)}",
        "peak_bytes": {name: getattr(e, f"peak_{name}_bytes") for name in figures},
        "basis": e.basis,
    }


def _parts(e: Estimate) -> dict[str, str]:
    found = sorted(e.breakdown.items(), key=lambda part: -part[1])
    return {name: format_bytes(size) for name, size in found if size}


def _planned(p: Plan) -> Answer:
    return {
        "fits": True,
        "micro_batch": p.micro_batch,
        "accumulate": p.accumulate,
        "settings": {r.setting: f"{r.kind}: {r.why}" for r in p.reasons[:MOST_REASONS]},
        "reserved_at_most": format_bytes(p.most_reserved_bytes),
        "budget": format_bytes(p.budget_bytes),
        "seconds_per_step": float(f"{p.step_time_s:.3g}"),
        "basis": p.estimate.basis,
    }
