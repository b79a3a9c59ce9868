"""What decoders need before batches go through them: a padding token, no cache, and which token their head reads."""

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def is_causal(model: "nn.Module") -> bool:
    """Whether a token of the model sees only those before it; of an encoder-decoder, in one of its stacks."""
    return any(getattr(module, "is_causal", False) is True for module in model.modules())


def pools_last_token(model_class: type) -> bool:
    """Whether a classification head reads the rightmost token that is not padding, as the heads of decoders do.

    All of them look for it under one name, in transformers' generic head and in those that are older.
    """
    own = (vars(kind).get("forward") for kind in model_class.__mro__)  # some hand on to the generic head
    codes = (getattr(inspect.unwrap(forward), "__code__", None) for forward in own if callable(forward))
    return any("last_non_pad_token" in getattr(code, "co_varnames", ()) for code in codes)


def padding_id(config: Any) -> int:
    """The token that fills up shorter texts: the configuration's, else the one that ends a text, else the first.

    >>> from types import SimpleNamespace
    >>> padding_id(SimpleNamespace(pad_token_id=None, eos_token_id=[7, 8]))
    7
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    named, end = (getattr(text, name, None) for name in ("pad_token_id", "eos_token_id"))
    end = end[0] if isinstance(end, list | tuple) and end else end
    return next((token for token in (named, end) if isinstance(token, int) and token >= 0), 0)


def in_full_precision(config: Any) -> None:
    """Have a configuration name no type for weights, and its parts neither.

    transformers builds the backbone of a generic head in the type that the configuration names, and the head in fp32;
    which type weights have is for the precision of a workload to say.
    """
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if getattr(part, "dtype", None) is not None:
            part.dtype = None


def make_ready(model: Any) -> None:
    """Let a decoder take batches: its configuration names a padding token, and it keeps no keys and values.

    A head that reads the last token must know which one is padding, and refuses batches otherwise. A cache would hold
    the keys and values of every layer beside those that attention keeps; nothing is generated here. Models that are
    not decoders are left alone.

    A configuration may ask a decoder to see whole texts (`is_causal` false). transformers follows it in the masks that
    it makes, and attends causally where no token is padding and no mask is made; here attention follows it too.
    """
    reads_last = pools_last_token(type(model))
    if not reads_last and not is_causal(model):
        return
    text = model.config.get_text_config()
    if reads_last and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = padding_id(text)
    sees_all = getattr(text, "is_causal", True) is False
    for module in model.modules():  # stacks of encoder-decoders have configurations of their own
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
        if sees_all and getattr(module, "is_causal", None) is True:
            module.is_causal = False


def pad_as_configured(tokenizer: Any, config: Any) -> None:
    """Have a tokenizer fill up with the token that the model takes for padding.

    Some decoders come with no padding token, or with one that their configuration does not name: their heads would read
    padding as text.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    is_named = getattr(text, "pad_token_id", 0) is not None
    if tokenizer.pad_token_id is not None and is_named:
        return
    token = tokenizer.convert_ids_to_tokens(padding_id(text))
    if isinstance(token, str):
        tokenizer.pad_token = token
