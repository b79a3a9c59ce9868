"""Shapes of requests and answers that clients know, by path: SageMaker's, OpenAI's, text-embeddings-inference's.

A worker reads bodies and writes answers; the process that speaks HTTP says why there is no answer, in the same shape.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from vramfit.serve.requests import INVOCATIONS, Asked, Known, Reply, read_body
from vramfit.serve.shapes import openai, tei

Read = Callable[[bytes, Known], Asked]
READERS: Mapping[str, Read] = MappingProxyType(
    {
        INVOCATIONS: lambda body, known: read_body(body, known.task),
        openai.EMBEDDINGS: openai.read,
        "/embed": tei.read_embed,
        "/rerank": tei.read_rerank,
        "/predict": tei.read_predict,
        "/": tei.read_any,
    }
)
"""Path → what reads a request that was sent there; raises Refused."""
TEI_PATHS = ("/", "/embed", "/rerank", "/predict", "/info", "/health")


def shaped(path: str, reply: Reply) -> Reply:
    """A reply as clients of a path understand it: answers stay, and problems take its shape."""
    if reply.error is None:
        return reply
    if path == "/v1" or path.startswith("/v1/"):
        return openai.problem(reply)
    return tei.problem(reply) if path in TEI_PATHS else reply
