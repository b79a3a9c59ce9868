"""Shapes of requests and answers that clients know, by path: SageMaker's, OpenAI's, text-embeddings-inference's.

A worker reads bodies and writes answers; the process that speaks HTTP says why there is no answer, in the same shape.
Of text-embeddings-inference these are /embed, /rerank, /predict, /info and errors (its OpenAPI, 1.7): where that server
says 424, "the model is no such model", and 422, "the inputs are wrong", so does this one.
"""

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from vramfit.serve.requests import (
    INVOCATIONS,
    MODEL,
    Answers,
    Asked,
    Known,
    Refused,
    Reply,
    choice,
    dumps,
    kind_of,
    need_vectors,
    read_body,
    read_dims,
    read_inputs,
    read_object,
    read_texts,
    switch,
    write_numbers,
)
from vramfit.serve.settings import MAX_REQUEST_TOKENS
from vramfit.tasks import find_task
from vramfit.units import shown

EMBEDDINGS, MODELS = "/v1/embeddings", "/v1/models"
INPUT_FIELDS = ("input", "model", "encoding_format", "dimensions", "user")
INPUT_HINT = (
    '{"model": "…", "input": "a text, or a list of them", "encoding_format": "float" or "base64", "dimensions": N}'
)
FORMATS = ("float", "base64")
CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}
CUTTING = ("truncate", "truncation_direction")
RIGHT = ("right", "Right")
EMBED_HINT = '{"inputs": "a text, or a list of them", "normalize": true, "truncate": true}'
RERANK_HINT = '{"query": "a text", "texts": ["a text", …], "raw_scores": false, "return_text": false}'
PREDICT_HINT = '{"inputs": "a text", ["a text", "its pair"], or [["a text"], …]}'
FUNCTIONS = ("default", "sigmoid", "softmax", "none")
UNREADABLE = 422
KINDS = {429: "Overloaded", 503: "Unhealthy", 424: "Backend", 500: "Backend"}
Scale = Callable[[Sequence[float]], list[float]]


def read_openai(body: bytes, known: Known) -> Asked:
    """What a request for vectors asks for.

    Raises:
        Refused: not as OpenAI's clients send it, or to a model that gives no vectors.
    """
    data = read_object(body, INPUT_FIELDS, INPUT_HINT)
    if "input" not in data:
        raise Refused(400, "there is no input", INPUT_HINT)
    need_vectors(known, 400)
    name = data.get(MODEL, "")
    if not isinstance(name, str):
        raise Refused(400, f"model is {shown(name)}, not a name", INPUT_HINT)
    in_base64 = choice(data, "encoding_format", FORMATS) == "base64"
    num_dims = read_dims(data, known)
    given = data["input"]
    references = read_inputs(
        read_texts(given, "input", INPUT_HINT), known.task, "input", is_list=isinstance(given, list), hint=INPUT_HINT
    )

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


def list_of_models(names: Iterable[str], since: int) -> dict[str, Any]:
    """The list of models.

    Args:
        since: when the server started, in seconds since 1970.
    """
    return {"object": "list", "data": [model_entry(name, since) for name in names]}


def model_entry(name: str, since: int) -> dict[str, Any]:
    """One of them."""
    return {"id": name, "object": "model", "created": since, "owned_by": "vramfit"}


def read_embed(body: bytes, known: Known) -> Asked:
    """What a request for vectors asks for."""
    names = ("inputs", "normalize", "dimensions", "prompt_name", "encoding_format", *CUTTING)
    data = read_object(body, names, EMBED_HINT)
    given = _needed(data, "inputs", EMBED_HINT)
    need_vectors(known, 424)
    if "prompt_name" in data:
        raise Refused(400, "prompts are not added here", "put the prompt before each text")
    choice(data, "encoding_format", ("float",))
    normalizes = switch(data, "normalize", True)
    if known.normalizes and not normalizes:
        raise Refused(400, "normalize is false, and the model itself gives vectors of unit length", EMBED_HINT)
    num_dims, may_cut = read_dims(data, known), _may_cut(data)
    references = read_inputs(read_texts(given, "inputs", EMBED_HINT), known.task, "inputs", hint=EMBED_HINT)

    def write(answers: Answers) -> bytes:
        whole = known.normalizes and num_dims in (None, known.num_dims)  # as the model gives it
        vectors = (cut(rows[0]["embedding"], num_dims, normalizes=False) for rows in answers.rows)
        made = (write_numbers(normalized(v) if normalizes and not whole else v) for v in vectors)
        return f"[{','.join(made)}]".encode()

    return Asked(references, write, is_list=True, may_cut=may_cut)


def read_rerank(body: bytes, known: Known) -> Asked:
    """What a request for an order of texts asks for."""
    data = read_object(body, ("query", "texts", "raw_scores", "return_text", *CUTTING), RERANK_HINT)
    query, texts = _needed(data, "query", RERANK_HINT), _needed(data, "texts", RERANK_HINT)
    if known.num_labels != 1:
        what = f"the model is no reranker: its task is {known.task}, with {known.num_labels:,} labels"
        raise Refused(424, what, "serve a cross-encoder: sequence classification with one label")
    if not isinstance(query, str) or not isinstance(texts, list):
        raise Refused(400, "query is to be a text, and texts a list", RERANK_HINT)
    if not query.strip():
        raise Refused(400, "query is empty", RERANK_HINT)
    scale = _plain if switch(data, "raw_scores", False) else _sigmoid
    gives_text = switch(data, "return_text", False)
    pairs = [_input((query, text), known.task) for text in read_texts(texts, "texts", RERANK_HINT)]
    may_cut = _may_cut(data)

    def write(answers: Answers) -> bytes:
        scores = [scale(rows[0]["logits"])[0] for rows in answers.rows]
        order = sorted(range(len(scores)), key=lambda n: -scores[n])
        ranks: list[dict[str, Any]] = [{"index": n, "score": _digits(scores[n])} for n in order]
        return dumps([rank | {"text": texts[rank["index"]]} for rank in ranks] if gives_text else ranks)

    references = read_inputs(pairs, known.task, "texts", hint=RERANK_HINT)
    return Asked(references, write, is_list=True, has_logits=True, may_cut=may_cut)


def read_predict(body: bytes, known: Known) -> Asked:
    """What a request for labels asks for."""
    data = read_object(body, ("inputs", "raw_scores", "parameters", *CUTTING), PREDICT_HINT)
    given = _needed(data, "inputs", PREDICT_HINT)
    if not known.num_labels:
        what = f"the model gives no labels for a text: its task is {known.task}"
        raise Refused(424, what, "serve a model for sequence classification")
    top_k, function = _parameters(data.get("parameters", {}))
    scale = _plain if switch(data, "raw_scores", False) else FUNCTION[function] or usual_scale(known)
    is_batch = isinstance(given, list) and bool(given) and isinstance(given[0], list)
    several = given if is_batch else [given if isinstance(given, list) else [given]]
    inputs = [_input(one, known.task) for one in several]
    may_cut = _may_cut(data)

    def write(answers: Answers) -> bytes:
        made = []
        for rows in answers.rows:
            scored = zip(known.label_names, scale(rows[0]["logits"]), strict=True)
            best = sorted(scored, key=lambda one: -one[1])[:top_k]
            made.append([{"score": _digits(score), "label": name} for name, score in best])
        return dumps(made if is_batch else made[0])

    references = read_inputs(inputs, known.task, "inputs", is_list=is_batch, hint=PREDICT_HINT)
    return Asked(references, write, is_list=is_batch, has_logits=True, may_cut=may_cut)


def read_any(body: bytes, known: Known) -> Asked:
    """A request to the server as a whole: what its model is for."""
    if known.num_labels == 1:
        return read_rerank(body, known)
    return read_predict(body, known) if known.num_labels else read_embed(body, known)


def usual_scale(known: Known) -> Scale:
    """What makes scores of logits, as the text-classification pipeline of transformers chooses it."""
    if known.problem_type == "regression":
        return _plain
    if known.problem_type == "multi_label_classification" or known.num_labels == 1:
        return _sigmoid
    return _softmax


def info(name: str, known: Known, limits: dict[str, int]) -> dict[str, Any]:
    """What /info says of a model.

    Args:
        limits: `max_concurrent_requests`, `max_batch_tokens` and `tokenization_workers`.
    """
    return {
        "model_id": name,
        "model_sha": None,
        "model_dtype": known.dtype,
        "model_type": _model_type(known),
        "max_input_length": known.max_length,
        "max_client_batch_size": MAX_REQUEST_TOKENS,
        "max_batch_requests": None,
        "auto_truncate": True,
        **limits,
    }


def _model_type(known: Known) -> dict[str, Any]:
    if known.gives_vectors:
        return {"embedding": {"pooling": known.pooling}}
    if not known.num_labels:
        return {known.task: {}}
    names = {str(n): name for n, name in enumerate(known.label_names)}
    labels = {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}
    return {"reranker" if known.num_labels == 1 else "classifier": labels}


def _needed(data: dict[str, Any], name: str, hint: str) -> Any:
    if name not in data:
        raise Refused(400, f"there is no {name}", hint)
    return data[name]


def _may_cut(data: dict[str, Any]) -> bool:
    """Whether a text that is too long is cut: unless a request says that it is not."""
    direction = data.get("truncation_direction")
    if direction is not None and direction not in RIGHT:
        raise Refused(400, f"truncation_direction is {shown(direction)}; texts are cut at their right end")
    return switch(data, "truncate", True)


def _input(texts: Any, task: str) -> dict[str, Any]:
    """One or two texts under the names that a task has for them."""
    if not isinstance(texts, list | tuple) or not 1 <= len(texts) <= 2:
        what = f"a list of {len(texts):,}" if isinstance(texts, list) else kind_of(texts)
        raise Refused(400, f"an input is {what}, not a text or a pair of texts", PREDICT_HINT)
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None or None in texts:
        raise Refused(400, f"an input has {kind_of(wrong)}, not a text", PREDICT_HINT)
    names = next((names for names in find_task(task).request_fields if len(names) == len(texts)), None)
    if names is None:
        raise Refused(424, f"{task} takes no {'pairs' if len(texts) > 1 else 'single texts'}", PREDICT_HINT)
    return dict(zip(names, texts, strict=True))


def _parameters(given: Any) -> tuple[int | None, str]:
    """`top_k` and `function_to_apply`, as huggingface_hub's client sends them."""
    if not isinstance(given, dict):
        raise Refused(400, f"parameters is {kind_of(given)}, not an object", PREDICT_HINT)
    others = [name for name in given if name not in ("top_k", "function_to_apply")]
    if others:
        raise Refused(400, f"parameters: {shown(others[0])} is not known; there are top_k, function_to_apply")
    top_k = given.get("top_k")
    if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
        raise Refused(400, f"parameters: top_k is {shown(top_k)}, not a number above 0")
    named = {name: value for name, value in given.items() if value is not None}
    return top_k, choice(named, "function_to_apply", FUNCTIONS)


def _plain(logits: Sequence[float]) -> list[float]:
    return list(logits)


def _sigmoid(logits: Sequence[float]) -> list[float]:
    """Without numbers that overflow."""
    return [1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x)) for x in logits]


def _softmax(logits: Sequence[float]) -> list[float]:
    most = max(logits)
    parts = [math.exp(x - most) for x in logits]
    return [part / sum(parts) for part in parts]


def _digits(score: float) -> float:
    """As many as tell one fp32 number from the next."""
    return float(f"{score:.9g}")


FUNCTION: dict[str, Scale | None] = {"default": None, "sigmoid": _sigmoid, "softmax": _softmax, "none": _plain}
Read = Callable[[bytes, Known], Asked]
READERS: Mapping[str, Read] = MappingProxyType(
    {
        INVOCATIONS: lambda body, known: read_body(body, known.task),
        EMBEDDINGS: read_openai,
        "/embed": read_embed,
        "/rerank": read_rerank,
        "/predict": read_predict,
        "/": read_any,
    }
)
"""Path → what reads a request that was sent there; raises Refused."""
TEI_PATHS = ("/", "/embed", "/rerank", "/predict", "/info", "/health")


def shaped(path: str, reply: Reply) -> Reply:
    """A reply as clients of a path understand it: answers stay, and problems take its shape."""
    if reply.error is None:
        return reply
    message = f"{reply.error} ({reply.hint})" if reply.hint else reply.error
    if path == "/v1" or path.startswith("/v1/"):
        kind = "invalid_request_error" if reply.status < 500 else "server_error"
        kind = "rate_limit_error" if reply.status == 429 else kind
        said = {"message": message, "type": kind, "param": None, "code": CODES.get(reply.status)}
        return replace(reply, body=dumps({"error": said}))
    if path in TEI_PATHS:
        status = UNREADABLE if reply.status == 400 else reply.status
        said = {"error": message, "error_type": KINDS.get(reply.status, "Validation")}
        return replace(reply, status=status, body=dumps(said))
    return reply
