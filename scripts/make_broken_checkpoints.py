"""Make broken and mismatched checkpoints of a tiny BERT, and show what `vramfit doctor` says of each.

    python scripts/make_broken_checkpoints.py OUT

OUT gets one folder a kind; nothing is downloaded. Each kind names a phrase that its answer must hold, which
`tests/unit/checkpoints/test_broken_checkpoints.py` asserts.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
LAYER_1 = "bert.encoder.layer.1."
WORDS = "bert.embeddings.word_embeddings.weight"
QUERY = "bert.encoder.layer.0.attention.self.query.weight"


@dataclass(frozen=True)
class Kind:
    """One way for a checkpoint to be bad."""

    break_it: Callable[[Path], None]
    """Changes a sound folder."""
    says: str
    """A phrase that the answer holds, and that of no other kind's gravest finding."""
    check: str
    """The check that finds it."""
    scan: bool = False
    """Whether it takes `--scan` to see it."""


def make_sound(folder: Path) -> Path:
    """A tiny BERT for sequence classification with two labels, with a tokenizer of 100 words."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=48,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(95))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return folder


def read_raw(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file, unjudged."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    return header, content[8 + length :]


def write_raw(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    """A safetensors file with this header, however wrong it is."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def change_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A kind that edits the header only."""

    def break_it(folder: Path) -> None:
        header, data = read_raw(folder / WEIGHTS)
        change(header)
        write_raw(folder / WEIGHTS, header, data)

    return break_it


def change_config(**fields: Any) -> Callable[[Path], None]:
    """A kind that edits config.json only."""

    def break_it(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return break_it


def change_tensors(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    """A kind that writes other tensors in a sound file."""

    def break_it(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})

    return break_it


def only(name: str, content: bytes) -> Callable[[Path], None]:
    """A kind whose folder has another file in place of the weights."""

    def break_it(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(content)

    return break_it


def rename(convert: Callable[[str], str]) -> Callable[[Path], None]:
    """A kind whose tensors have other names."""
    return change_tensors(lambda tensors: {convert(name): tensor for name, tensor in tensors.items()})


def without(*prefixes: str) -> Callable[[Path], None]:
    """A kind that lacks tensors."""
    return change_tensors(lambda tensors: {n: t for n, t in tensors.items() if not n.startswith(prefixes)})


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def header_too_long(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes((len(content) * 2).to_bytes(8, "little") + content[8:])


def header_no_json(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[60:64] = b"\x01\x02{["
    (folder / WEIGHTS).write_bytes(content)


def append_garbage(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"\0" * 512)


def tensor_twice(folder: Path) -> None:
    header, data = read_raw(folder / WEIGHTS)
    raw = json.dumps(header).encode()
    again = json.dumps({WORDS: header[WORDS]}).encode()
    write_raw(folder / WEIGHTS, raw[:-1] + b"," + again[1:], data)


def overlap(header: dict[str, Any]) -> None:
    names = [name for name in header if name != "__metadata__"]
    first, second = sorted(names, key=lambda n: header[n]["data_offsets"])[:2]
    size = header[second]["data_offsets"][1] - header[second]["data_offsets"][0]
    begin = header[first]["data_offsets"][0]
    header[second]["data_offsets"] = [begin, begin + size]


def hole(header: dict[str, Any]) -> None:
    for name, described in header.items():
        if name != "__metadata__":
            described["data_offsets"] = [offset + 4096 for offset in described["data_offsets"]]


def shard(folder: Path, *, absent: bool = False, outside: bool = False, double: bool = False) -> None:
    """The same weights in two shards, one of them absent, outside the folder, or with a tensor of the other."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    weight_map = {name: file for file, part in halves.items() for name in part}
    for number, (file, part) in enumerate(halves.items()):
        if absent and number == 1:
            continue
        extra = names[:1] if double and number == 1 else []
        save_file({name: tensors[name] for name in (*part, *extra)}, folder / file)
    if outside:
        weight_map = {n: f"../elsewhere/{f}" if f.startswith("model-00002") else f for n, f in weight_map.items()}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def put_code(folder: Path) -> None:
    """A pickle that would write the file `code-was-run` if anything loaded it."""
    import torch

    canary = str(folder / "code-was-run")

    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch '{canary}'",)

    (folder / WEIGHTS).unlink()
    torch.save({WORDS: Code()}, folder / "pytorch_model.bin")


def put_training_checkpoint(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save({"epoch": 3, "model_state_dict": tensors, "optimizer": {}}, folder / "pytorch_model.bin")


def link_outside(folder: Path) -> None:
    elsewhere = folder.parent / f"{folder.name}-elsewhere.bin"
    (folder / WEIGHTS).rename(elsewhere)
    (folder / WEIGHTS).symlink_to(elsewhere.resolve())


def fill(value: float) -> Callable[[Path], None]:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        if value:
            tensors[QUERY][0, 0] = value
        else:
            tensors[QUERY].zero_()
        return tensors

    return change_tensors(change)


def old_names(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def distilbert_names(name: str) -> str:
    return name.replace("bert.encoder.layer", "distilbert.transformer.layer").replace("self.query", "q_lin")


def grow(name: str, dim: int) -> Callable[[Path], None]:
    """A kind with a tensor that is longer in one dimension."""

    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        import torch

        tensors[name] = torch.cat([tensors[name], tensors[name]], dim).contiguous()
        return tensors

    return change_tensors(change)


def grow_vocabulary(folder: Path) -> None:
    with (folder / "vocab.txt").open("a") as file:
        file.write("".join(f"more{i}\n" for i in range(28)))


def foreign_tokenizer(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<pad>"}')


def to_type(name: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        import torch

        return {key: tensor.to(getattr(torch, name)) for key, tensor in tensors.items()}

    return change_tensors(change)


def more_layers(tensors: dict[str, Any]) -> dict[str, Any]:
    return tensors | {n.replace(".1.", ".2."): t.clone() for n, t in tensors.items() if n.startswith(LAYER_1)}


def both_names(tensors: dict[str, Any]) -> dict[str, Any]:
    old = {old_names(n): t.clone() for n, t in tensors.items() if "embeddings.LayerNorm" in n}
    return tensors | old


DAMAGED = "checkpoint.damaged"
KINDS: dict[str, Kind] = {
    "empty-file": Kind(lambda f: (f / WEIGHTS).write_bytes(b"") and None, "is empty (0 bytes)", DAMAGED),
    "truncated": Kind(truncate, "is cut off: it holds", DAMAGED),
    "trailing-bytes": Kind(append_garbage, "512 bytes after its last tensor", DAMAGED),
    "header-beyond-file": Kind(header_too_long, "says its header is", DAMAGED),
    "header-no-json": Kind(header_no_json, "header that is not JSON", DAMAGED),
    "offsets-overlap": Kind(change_header(overlap), "their bytes overlap", DAMAGED),
    "offsets-hole": Kind(change_header(hole), "leaves a hole of 4,096 bytes", DAMAGED),
    "unknown-dtype": Kind(change_header(lambda h: h[WORDS].update(dtype="F31")), "the dtype F31", DAMAGED),
    "shape-and-bytes": Kind(change_header(lambda h: h[WORDS].update(shape=[100, 31])), "takes 12,400", DAMAGED),
    "negative-shape": Kind(change_header(lambda h: h[WORDS].update(shape=[-100, 32])), "which no tensor has", DAMAGED),
    "tensor-twice": Kind(tensor_twice, "twice", DAMAGED),
    "git-lfs-pointer": Kind(
        only(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"), "Git LFS pointer", DAMAGED
    ),
    "shard-absent": Kind(lambda f: shard(f, absent=True), "is named in model.safetensors.index.json", DAMAGED),
    "shard-outside": Kind(lambda f: shard(f, outside=True), "no name of a file in this folder", DAMAGED),
    "shards-share-a-tensor": Kind(lambda f: shard(f, double=True), "and so does model-00001", DAMAGED),
    "link-outside": Kind(link_outside, "a link that leaves the folder", DAMAGED),
    "pickle-with-code": Kind(put_code, f"asks for {os.system.__module__}.system", DAMAGED),
    "training-checkpoint": Kind(put_training_checkpoint, "the model lies under 'model_state_dict'", DAMAGED),
    "tensorflow-only": Kind(only("tf_model.h5", b"\x89HDF\r\n"), "TensorFlow weights", DAMAGED),
    "tensorflow-1-only": Kind(only("bert_model.ckpt.index", b"\0"), "TensorFlow 1 checkpoint", DAMAGED),
    "flax-only": Kind(only("flax_model.msgpack", b"\x80"), "Flax weights", DAMAGED),
    "config-absurd": Kind(change_config(hidden_size=10**9), "hidden_size is 1000000000", DAMAGED),
    "config-other-family": Kind(
        change_config(model_type="distilbert", architectures=["DistilBertModel"]),
        "says distilbert",
        "weights.architecture",
    ),
    "weights-other-family": Kind(rename(distilbert_names), "looks like distilbert", "weights.architecture"),
    "architectures-contradict": Kind(
        change_config(architectures=["RobertaForMaskedLM"]), "contradicts itself", "config.architecture"
    ),
    "layer-missing": Kind(without(LAYER_1), "1 of 2 encoder layers is not", "weights.missing_layers"),
    "embedding-missing": Kind(without(WORDS), "1 tensor of the encoder is not", "weights.missing"),
    "layers-too-many": Kind(
        change_tensors(more_layers), "the checkpoint has 3 encoder layers", "weights.surplus_layers"
    ),
    "vocabulary-size": Kind(grow(WORDS, 0), "vocab_size 100, the checkpoint 200", "weights.shape.vocab_size"),
    "hidden-size": Kind(
        change_config(hidden_size=64), "hidden_size 64, the checkpoint 32", "weights.shape.hidden_size"
    ),
    "labels": Kind(
        change_config(id2label={"0": "a", "1": "b", "2": "c"}, label2id={"a": 0, "b": 1, "c": 2}),
        "has 3 labels, the checkpoint's head 2",
        "weights.labels",
    ),
    "labels-contradict": Kind(
        change_config(id2label={"0": "a", "1": "b"}, label2id={"a": 1, "b": 0}),
        "numbers 'a' otherwise",
        "config.labels",
    ),
    "head-absent": Kind(without("classifier"), "head incomplete", "weights.head_incomplete"),
    "old-names": Kind(rename(old_names), "names of 2019", "weights.old_names"),
    "data-parallel": Kind(rename(lambda n: f"module.{n}"), "begin with 'module.'", "weights.wrapper_prefix"),
    "two-names-for-one": Kind(change_tensors(both_names), "are the same tensor of the model", "weights.duplicate"),
    "newer-version": Kind(change_config(transformers_version="9.1.0"), "transformers 9.1.0", "config.version"),
    "tokenizer-too-large": Kind(grow_vocabulary, "ids up to 127, the word embedding 100 rows", "tokenizer.size"),
    "tokenizer-special": Kind(foreign_tokenizer, "pad_token is <pad>", "tokenizer.special_tokens"),
    "special-id-beyond": Kind(change_config(pad_token_id=4000), "pad_token_id 4,000", DAMAGED),
    "half-precision": Kind(to_type("float16"), "saved in fp16", "weights.dtype"),
    "whole-numbers": Kind(to_type("int8"), "in I8 where the model has floating point", "weights.quantized"),
    "nan": Kind(fill(float("nan")), "1 of 1,024 numbers are NaN", "scan.not_finite", scan=True),
    "infinite": Kind(fill(float("inf")), "1 of 1,024 numbers are infinite", "scan.not_finite", scan=True),
    "all-zero": Kind(fill(0.0), "all 1,024 numbers are 0", "scan.all_zero", scan=True),
}
"""Every kind, by the name of its folder."""


def make(kind: str, sound: Path, out: Path) -> Path:
    """One broken folder, from a copy of the sound one."""
    folder = out / kind
    shutil.copytree(sound, folder)
    KINDS[kind].break_it(folder)
    return folder


def main() -> None:
    from rich.console import Console

    from vramfit.doctor.checkup import check_model
    from vramfit.report.findings import render_findings

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="an empty or new folder")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        parser.error(f"{out} is not empty")
    console = Console(highlight=False, width=140)
    sound = make_sound(out / "sound")
    for name in ("sound", *KINDS):
        folder = sound if name == "sound" else make(name, sound, out)
        scan = name != "sound" and KINDS[name].scan
        console.print(f"\n[bold]$ vramfit doctor {name}{' --scan' if scan else ''}[/bold]")
        console.print(render_findings(check_model(os.path.relpath(folder), scan=scan)))


if __name__ == "__main__":
    main()
