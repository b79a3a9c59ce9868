"""Tokenizers, loaded and freed of the settings that some files carry."""

from pathlib import Path
from typing import Any

from vramfit.errors import CheckpointError
from vramfit.models.catalogue import find_entry

HINT = "name a folder that holds tokenizer.json or vocab.txt beside config.json (--tokenizer)"


def load_tokenizer(path_or_name: str | Path) -> Any:
    """The fast tokenizer of a folder, a catalogue name or a hub id.

    Some `tokenizer.json` carry a fixed length to pad and cut to, which a saved copy would go on with; it is taken off.

    Raises:
        CheckpointError: there is no tokenizer, or none that gives the places of its tokens (a fast one does).
    """
    from transformers import AutoTokenizer

    name = str(path_or_name)
    is_folder = Path(name).is_dir()
    entry = None if is_folder else find_entry(name)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            entry.hub_id if entry is not None else name, local_files_only=is_folder
        )
    except Exception as error:  # whatever transformers and its hub client raise for a name that leads nowhere
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"no tokenizer at {name}: {reason}", file=name, hint=HINT) from None
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(f"the tokenizer at {name} is not a fast one", file=name, hint=HINT)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # transformers makes one of special tokens alone where config.json is all there is
        raise CheckpointError(f"no tokenizer at {name}: no vocabulary is there", file=name, hint=HINT)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
