"""OpenAI's shape: /v1/embeddings and /v1/models, and errors as its client libraries read them."""

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vramfit.serve.requests import (
    MODEL,
    Answers,
    Asked,
    Known,
    Refused,
    Reply,
    choice,
    dumps,
    need_vectors,
    read_dims,
    read_inputs,
    read_object,
    read_texts,
    write_numbers,
)
from vramfit.units import shown

EMBEDDINGS, MODELS = "/v1/embeddings", "/v1/models"
FIELDS = ("input", "model", "encoding_format", "dimensions", "user")
HINT = '{"model": "…", "input": "a text, or a list of them", "encoding_format": "float" or "base64", "dimensions": N}'
FORMATS = ("float", "base64")
CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}


def read(body: bytes, known: Known) -> Asked:
    """What a request for vectors asks for.

    Raises:
        Refused: not as OpenAI's clients send it, or to a model that gives no vectors.
    """
    data = read_object(body, FIELDS, HINT)
    if "input" not in data:
        raise Refused(400, "there is no input", HINT)
    need_vectors(known, 400)
    name = data.get(MODEL, "")
    if not isinstance(name, str):
        raise Refused(400, f"model is {shown(name)}, not a name", HINT)
    in_base64 = choice(data, "encoding_format", FORMATS) == "base64"
    num_dims = read_dims(data, known)
    given = data["input"]
    references = read_inputs(read_texts(given, "input", HINT), known.task, "input", is_list=isinstance(given, list))

    def write(answers: Answers) -> bytes:
        vectors = (cut(rows[0]["embedding"], num_dims, known.normalizes) for rows in answers.rows)
        written = [f'"{encode(vector)}"' if in_base64 else write_numbers(vector) for vector in vectors]
        made = (f'{{"object":"embedding","index":{n},"embedding":{text}}}' for n, text in enumerate(written))
        usage = f'{{"prompt_tokens":{answers.num_tokens},"total_tokens":{answers.num_tokens}}}'
        data = f'{{"object":"list","data":[{",".join(made)}],"model":'.encode()
        return data + dumps(name) + f',"usage":{usage}}}'.encode()

    return Asked(references, write, is_list=True)


def cut(vector: Sequence[float], num_dims: int | None, normalizes: bool) -> Sequence[float]:
    """The first numbers of a vector; of unit length again where it had that."""
    if num_dims is None or num_dims == len(vector):
        return vector
    return normalized(vector[:num_dims]) if normalizes else vector[:num_dims]


def normalized(vector: Sequence[float]) -> list[float]:
    """A vector of unit length; one of zeros stays.

    >>> normalized([3.0, 4.0])
    [0.6, 0.8]
    """
    length = math.sqrt(sum(x * x for x in vector)) or 1.0
    return [x / length for x in vector]


def encode(vector: Sequence[float]) -> str:
    """fp32 numbers, little-endian, in base64.

    Raises:
        ValueError: some are no numbers.

    >>> encode([1.0])
    'AACAPw=='
    """
    if not all(map(math.isfinite, vector)):
        raise ValueError("a vector has values that are no numbers")
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode()


def problem(reply: Reply) -> Reply:
    """Why there is no answer."""
    kind = "invalid_request_error" if reply.status < 500 else "server_error"
    kind = "rate_limit_error" if reply.status == 429 else kind
    message = f"{reply.error} ({reply.hint})" if reply.hint else reply.error
    said = {"message": message, "type": kind, "param": None, "code": CODES.get(reply.status)}
    return replace(reply, body=dumps({"error": said}))


def models(names: Iterable[str], since: int) -> dict[str, Any]:
    """The list of models.

    Args:
        since: when the server started, in seconds since 1970.
    """
    return {"object": "list", "data": [model(name, since) for name in names]}


def model(name: str, since: int) -> dict[str, Any]:
    """One of them."""
    return {"id": name, "object": "model", "created": since, "owned_by": "vramfit"}
