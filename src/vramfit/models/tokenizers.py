"""Tokenizers, loaded and freed of the settings that some files carry."""

from pathlib import Path
from typing import Any

from vramfit.errors import CheckpointError
from vramfit.models.catalogue import find_entry
from vramfit.models.configuration import pad_as_configured
from vramfit.models.hub import NotOnHubError, fetch_config, plain_file
from vramfit.models.sentence_folder import lowers_case, transformer_folder

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "spm.model", "sentencepiece.bpe.model"),
)
"""What a tokenizer may be read from."""
HINT = "name a folder that holds tokenizer.json or vocab.txt next to config.json"


def load_tokenizer(path_or_name: str | Path, config: Any = None) -> Any:
    """The fast tokenizer of a folder, a catalogue name or a hub id.

    Some `tokenizer.json` carry a fixed length to pad and cut to, which a saved copy would go on with; it is taken off.

    Args:
        config: of the model; the tokenizer fills up with the token that it takes for padding (`pad_as_configured`).

    Raises:
        CheckpointError: there is no tokenizer, none that gives the places of its tokens (a fast one does), or a file
            of it that is a link out of the folder.
    """
    name, lowers = str(path_or_name), False
    if Path(name).is_dir():
        lowers, name = lowers_case(Path(name)), str(transformer_folder(Path(name)))
        for file in FILES:
            plain_file(Path(name), file)
    try:
        tokenizer = _load(name)
    except NotOnHubError as error:
        hint = "name a folder that holds the weights and tokenizer.json, or run it where the hub can be reached"
        raise CheckpointError(f"no tokenizer for {name}: {error}", file=name, hint=hint) from None
    except Exception as error:  # whatever transformers and its hub client raise for a name that leads nowhere
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"no tokenizer at {name}: {reason}", file=name, hint=HINT) from None
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(f"the tokenizer at {name} is not a fast one", file=name, hint=HINT)
    if not _has_words(tokenizer):
        raise CheckpointError(f"no tokenizer at {name}: no vocabulary is there", file=name, hint=HINT)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    if lowers:
        _lower(tokenizer.backend_tokenizer)
    if config is not None:
        pad_as_configured(tokenizer, config)
    return tokenizer


def _lower(backend: Any) -> None:
    """Lower all text first, as sentence-transformers does for a folder that says so."""
    from tokenizers.normalizers import Lowercase, Sequence

    rest = backend.normalizer
    if rest is not None and rest.normalize_str("A") == "a":
        return
    backend.normalizer = Lowercase() if rest is None else Sequence([Lowercase(), rest])


def _load(name: str) -> Any:
    """From the folder or the local cache; from the hub only after one short request has shown that it answers."""
    from transformers import AutoTokenizer

    is_folder = Path(name).is_dir()
    entry = None if is_folder else find_entry(name)
    source = entry.hub_id if entry is not None else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        if is_folder or _has_words(tokenizer):
            return tokenizer
    except Exception:  # transformers and its hub client raise anything
        if is_folder:
            raise
    fetch_config(source)
    return AutoTokenizer.from_pretrained(source)


def _has_words(tokenizer: Any) -> bool:
    """False where config.json is all there is: transformers makes a tokenizer of special tokens alone then."""
    return len(tokenizer) > len(tokenizer.all_special_ids)
