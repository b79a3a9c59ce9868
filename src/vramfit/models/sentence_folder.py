"""Folders of sentence-transformers, read with suspicion: `modules.json`, and the parts that it names.

What is read becomes `HeadParts`; what vramfit cannot compute is refused by name. `files_of` gives what is written.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.errors import CheckpointError, WorkloadError
from vramfit.models.configuration import MAX_FILE_BYTES
from vramfit.models.hub import plain_file
from vramfit.tasks.embedding import JOINED, MODES, HeadParts, LayerPart
from vramfit.units import shown

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
LENGTHS = tuple(f"sentence_{family}_config.json" for family in FAMILIES)
"""Where a folder says how texts are cut: the names that sentence-transformers 6.2 tries, in its order."""
PLACES = ("", "[0-9]*_*/", "onnx/")
"""Where a folder has a model's own files: its modules' folders are named by their number."""
PACKAGE = "sentence_transformers."
OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Switches of older folders, in the order that vectors are joined in (sentence-transformers 6.2, pooling.py)."""
ACTIVATIONS = ("Tanh", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid", "ELU", "LeakyReLU", "Mish", "SELU", "Softplus")
"""Of `torch.nn`, made without arguments, as sentence-transformers makes them."""
DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"
USUAL_PROMPTS = {"query": "", "document": ""}
"""Prompts that every model of sentence-transformers 6.2 has by name."""
MAX_WIDTH = 2**20
MAX_MODULES = 100
MAX_PATH = 255
SAVE_AGAIN = "save the model again with SentenceTransformer.save_pretrained(folder), or download it again"
NO_VECTORS = (
    "score pairs with it: vramfit predict, vramfit evaluate --rerank, or /rerank of vramfit serve; "
    "vectors come from an embedding model"
)
"""What a reranker is for."""
NOT_HERE = "vramfit reads Transformer, Pooling, Dense, LayerNorm and Normalize; use sentence-transformers for others"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Module:
    kind: str
    """The last part of its class's name."""
    folder: Path


def is_sentence_folder(folder: Path | None) -> bool:
    """Whether a folder says how the vectors of its encoder are pooled.

    Raises:
        CheckpointError: a modules.json that is damaged.
    """
    return folder is not None and any(module.kind == "Pooling" for module in _modules(folder))


def transformer_folder(folder: Path) -> Path:
    """Where the encoder's configuration and weights lie: older folders have them in `0_Transformer`.

    Raises:
        CheckpointError: a modules.json that is damaged, where nothing else says.
    """
    try:
        first = next((m.folder for m in _modules(folder) if m.kind == "Transformer"), folder)
    except CheckpointError:
        if not (folder / "config.json").exists():
            raise
        return folder
    return first if first != folder and (first / "config.json").exists() else folder


def read_parts(folder: Path) -> HeadParts | None:
    """What a folder says of the head; None for one without `modules.json`.

    Raises:
        CheckpointError: a part that is damaged, or that vramfit does not have; names its file.
    """
    modules = _modules(folder)
    if not modules:
        return None
    if marks_of(folder):
        raise CheckpointError(
            f"{folder} is a reranker (a CrossEncoder): it scores pairs of texts, and gives no vectors",
            file=str(folder / SETTINGS),
            hint=NO_VECTORS,
        )
    where = str(folder / MODULES)
    kinds = [module.kind for module in modules]
    for module in modules:
        if module.kind not in ("Transformer", "Pooling", *_LAYERS):
            raise _refused(where, f"names a module {module.kind}, which vramfit does not have")
    if kinds[:2] != ["Transformer", "Pooling"] or len({"Transformer", "Pooling"} & set(kinds[2:])):
        raise _refused(where, f"has {', '.join(kinds)}: not one Transformer, one Pooling, then other modules")
    pooling, includes_prompt = _pooling(modules[1].folder)
    lengths = _lengths(modules[0].folder)
    return HeadParts(
        pooling=pooling,
        layers=tuple(_LAYERS[module.kind](module.folder) for module in modules[2:]),
        includes_prompt=includes_prompt,
        max_length=lengths.get("max_seq_length"),
        lowers_case=lengths.get("do_lower_case") is True,
        settings=_settings(folder),
    )


def marks_of(folder: Path) -> dict[str, Any]:
    """What to add to the configuration of a folder that CrossEncoder 6.2 saved, so that it is known as a reranker.

    Earlier releases wrote the same into config.json.
    """
    with suppress(CheckpointError):
        file = plain_file(folder, SETTINGS)
        data = _object(file) if file is not None else {}
        if data.get("model_type") == "CrossEncoder":
            return {"sentence_transformers": {"activation_fn": data.get("activation_fn")}}
    return {}


def lowers_case(folder: Path) -> bool:
    """Whether a folder says that texts are lowered before they are tokenized."""
    with suppress(CheckpointError):
        return bool(_modules(folder)) and _lengths(transformer_folder(folder)).get("do_lower_case") is True
    return False


def find_prompt(parts: HeadParts | None, prompt: str | None = None, name: str | None = None) -> str:
    """What goes before every text, chosen as sentence-transformers does; nothing for most models.

    Args:
        parts: of the model's folder; None where it says nothing.
        prompt: as it is; it goes before `name`.
        name: of one that the folder has; None takes the folder's default.

    Raises:
        WorkloadError: no prompt of this name.
        CheckpointError: a prompt, and vectors pooled without its tokens.
    """
    settings = json.loads((parts.settings if parts is not None else "") or "{}")
    held = settings.get("prompts")
    prompts = USUAL_PROMPTS | {key: str(text or "") for key, text in (held if isinstance(held, dict) else {}).items()}
    if prompt is None and name is not None and name not in prompts:
        raise WorkloadError([f"prompt name {name!r} is not one that the model has: {', '.join(prompts)}"])
    asked = name if name is not None else settings.get("default_prompt_name")
    found = prompt if prompt is not None else prompts.get(asked, "") if isinstance(asked, str) else ""
    if found and parts is not None and not parts.includes_prompt:
        raise CheckpointError(
            f"the prompt {shown(found)} goes before every text, and the folder pools without its tokens "
            "(include_prompt is false), which vramfit does not",
            hint="use sentence-transformers for this model, or take no prompt: --prompt ''",
        )
    return found


def _modules(folder: Path) -> list[_Module]:
    file = plain_file(folder, MODULES)
    if file is None:
        return []
    where, found = str(file), _read(file)
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise _damaged(where, "holds no list of modules")
    if len(found) > MAX_MODULES:
        raise _damaged(where, f"lists {len(found):,} modules; at most {MAX_MODULES} are read")
    made = []
    for one in found:
        kind, path = one.get("type"), one.get("path", "")
        if not isinstance(kind, str) or not isinstance(path, str):
            raise _damaged(where, f"has a module without type or path: {json.dumps(one)[:100]}")
        is_inside = not Path(path).is_absolute() and ".." not in Path(path).parts
        if not is_inside or not path.isprintable() or len(path) > MAX_PATH:
            raise _damaged(where, f"names the folder {path[:100]!r}, which is not inside this one")
        inside = folder / path
        if inside.is_symlink() and not inside.resolve().is_relative_to(folder.resolve()):
            raise _damaged(where, f"names the folder {path[:100]!r}, a link that leaves this one")
        # code of a model's own is refused by its whole name
        made.append(_Module(kind=kind.rpartition(".")[2] if kind.startswith(PACKAGE) else kind[:100], folder=inside))
    return made


def _pooling(folder: Path) -> tuple[str, bool]:
    file, data = _config(folder)
    modes = data.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in OLD_MODES.items() if data.get(key)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes:
        raise _damaged(file, f"has pooling_mode {json.dumps(modes)[:100]}, which is no name and no list of names")
    for mode in modes:
        if not isinstance(mode, str) or mode not in MODES:
            raise _refused(file, f"pools by {json.dumps(mode)[:60]}; vramfit has {', '.join(MODES)}")
    return JOINED.join(MODES[mode] for mode in modes), data.get("include_prompt") is not False


def _dense(folder: Path) -> LayerPart:
    file, data = _config(folder)
    _check_names(file, data)
    if data.get("use_residual"):
        raise _refused(file, "has use_residual, a connection around the layer, which vramfit does not have")
    activation = data.get("activation_function", DEFAULT_ACTIVATION)
    name = activation.rpartition(".")[2] if isinstance(activation, str) else ""
    if name not in ACTIVATIONS or not str(activation).startswith("torch.nn."):
        known = ", ".join(ACTIVATIONS)
        raise _refused(file, f"has activation_function {json.dumps(activation)[:100]}; vramfit has {known} of torch.nn")
    return LayerPart(
        kind="Dense",
        folder=folder,
        in_features=_width(file, data, "in_features"),
        out_features=_width(file, data, "out_features"),
        bias=data.get("bias") is not False,
        activation=name,
    )


def _layer_norm(folder: Path) -> LayerPart:
    file, data = _config(folder)
    width = _width(file, data, "dimension")
    return LayerPart(kind="LayerNorm", folder=folder, in_features=width, out_features=width)


def _normalize(folder: Path) -> LayerPart:
    if folder.is_dir() and plain_file(folder, "config.json") is not None:
        _check_names(*_config(folder))
    return LayerPart(kind="Normalize", folder=folder)


_LAYERS = {"Dense": _dense, "LayerNorm": _layer_norm, "Normalize": _normalize}


def _check_names(file: str, data: Mapping[str, Any]) -> None:
    """Modules may be put elsewhere than after pooling, on the vectors of tokens."""
    for key in ("module_input_name", "module_output_name"):
        if data.get(key) not in (None, "sentence_embedding"):
            raise _refused(file, f"has {key} {json.dumps(data[key])[:60]}: not the vector of a text")


def _width(file: str, data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if type(value) is not int or not 1 <= value <= MAX_WIDTH:
        raise _damaged(file, f"has {key} {json.dumps(value)[:60]}, not a whole number from 1 to {MAX_WIDTH:,}")
    return value


def _lengths(folder: Path) -> dict[str, Any]:
    """How texts are cut, checked; nothing where the folder does not say."""
    file = next((found for name in LENGTHS if (found := plain_file(folder, name)) is not None), None)
    if file is None:
        return {}
    data = _object(file)
    longest, task = data.get("max_seq_length"), data.get("transformer_task", "feature-extraction")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise _damaged(str(file), f"has max_seq_length {json.dumps(longest)[:60]}, not a whole number from 1")
    if task != "feature-extraction":
        raise _refused(str(file), f"has transformer_task {json.dumps(task)[:60]}; vramfit has feature-extraction")
    modalities = data.get("modality_config") or {}
    text = modalities.get("text", {}) if isinstance(modalities, dict) else None
    output = text.get("method_output_name", "last_hidden_state") if isinstance(text, dict) else None
    if output != "last_hidden_state":
        raise _refused(str(file), f"takes {json.dumps(output)[:60]} of the encoder; vramfit has last_hidden_state")
    return data


def _settings(folder: Path) -> str:
    file = plain_file(folder, SETTINGS)
    if file is None:
        return ""
    data = _object(file)
    kind = data.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise _refused(str(file), f"is of a {json.dumps(kind)[:60]}, which gives no single vector of a text")
    return json.dumps(data)


def _config(folder: Path) -> tuple[str, dict[str, Any]]:
    """Path and content of a part's config.json."""
    where = str(folder / "config.json")
    file = plain_file(folder, "config.json") if folder.is_dir() else None
    if file is None:
        raise CheckpointError(f"{where} is not there, and {MODULES} names its folder", file=where, hint=SAVE_AGAIN)
    return where, _object(file)


def _object(file: Path) -> dict[str, Any]:
    data = _read(file)
    if not isinstance(data, dict):
        raise _damaged(str(file), "holds no JSON object")
    return data


def _read(file: Path) -> Any:
    where = str(file)
    try:
        num_bytes = file.stat().st_size
        if num_bytes > MAX_FILE_BYTES:
            raise _damaged(where, f"is {num_bytes:,} bytes, more than the {MAX_FILE_BYTES:,} that are read")
        return json.loads(file.read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())[:200]
        raise _damaged(where, f"cannot be read as JSON: {reason}") from None


def _damaged(where: str, what: str) -> CheckpointError:
    return CheckpointError(f"{where} {what}", file=where, hint=SAVE_AGAIN)


def _refused(where: str, what: str) -> CheckpointError:
    return CheckpointError(f"{where} {what}", file=where, hint=NOT_HERE)


def layer_folder(place: int, layer: LayerPart) -> str:
    """What the folder of a layer is called, counted from 0, in a folder that is written."""
    return f"{place + 2}_{layer.kind}"


def files_of(parts: HeadParts, hidden_size: int, max_length: int | None) -> dict[str, Any]:
    """Path in a folder → what its JSON holds, for a head that is written."""
    types = ["Transformer", "Pooling", *(layer.kind for layer in parts.layers)]
    paths = ["", "1_Pooling", *(layer_folder(place, layer) for place, layer in enumerate(parts.layers))]
    listed = [
        {"idx": place, "name": str(place), "path": path, "type": f"{PACKAGE}models.{kind}"}
        for place, (kind, path) in enumerate(zip(types, paths, strict=True))
    ]
    made = {
        MODULES: listed,
        LENGTHS[0]: {"max_seq_length": max_length, "do_lower_case": parts.lowers_case},
        SETTINGS: json.loads(parts.settings or "{}"),
        f"{paths[1]}/config.json": _pooling_config(parts, hidden_size),
    }
    configs = zip(paths[2:], map(_layer_config, parts.layers), strict=True)
    return made | {f"{path}/config.json": config for path, config in configs if config}


def _pooling_config(parts: HeadParts, hidden_size: int) -> dict[str, Any]:
    """With the switches that every release reads, but where vectors are joined in an order which those cannot say."""
    theirs = {ours: name for name, ours in MODES.items()}
    modes = [theirs[name] for name in parts.pooling.split(JOINED)]
    rest = {"include_prompt": parts.includes_prompt}
    if modes != [mode for mode in OLD_MODES.values() if mode in modes]:
        return {"embedding_dimension": hidden_size, "pooling_mode": modes} | rest
    return {"word_embedding_dimension": hidden_size} | {key: mode in modes for key, mode in OLD_MODES.items()} | rest


def _layer_config(layer: LayerPart) -> dict[str, Any]:
    if layer.kind == "LayerNorm":
        return {"dimension": layer.in_features}
    if layer.kind == "Normalize":
        return {}
    where = "linear" if layer.activation == "Identity" else "activation"
    return {
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "bias": layer.bias,
        "activation_function": f"torch.nn.modules.{where}.{layer.activation}",
    }


def own_files(folder: Path, *endings: str) -> list[Path]:
    """A model's files that end so, without those of the run that made it: its checkpoints come and go."""
    found = (file for place in PLACES for end in endings for file in folder.glob(f"{place}*{end}"))
    return sorted({file for file in found if file.is_file()})
