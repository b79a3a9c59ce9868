"""The side `lightning` of `packed_speed.py`: Lightning's batch size finder, then its Trainer with what was found."""

import gc
import time
from importlib import import_module
from typing import Any

import packed_speed as speed
from packed_speed import BATCH, NUM_STEPS, SEQ

FIRST = 2
"""The batch that the search begins with. The data must have it before: its first try takes the loader as it is."""


def train(side: str, name: str, ids: list[Any], cap: int) -> dict[str, Any]:
    """The search by halves, then a run that keeps the effective batch by accumulation."""
    import torch

    from vramfit.models.resolve import resolve
    from vramfit.runtime.measurement import prepare
    from vramfit.workload import Workload

    try:
        lightning, tuning = import_module("lightning"), import_module("lightning.pytorch.tuner")
    except ModuleNotFoundError:  # the same under the name of its older package
        lightning, tuning = import_module("pytorch_lightning"), import_module("pytorch_lightning.tuner")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = prepare(resolve(name), Workload(model=name, batch=BATCH, seq=SEQ))
            self.clock, self.num_seen = speed.Clock(), 0

        def on_train_start(self) -> None:
            self.clock = speed.Clock()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step > self.num_seen:  # an optimizer step, and not one of its passes
                self.num_seen = self.trainer.global_step
                self.clock.tick()
                self.trainer.should_stop = self.trainer.should_stop or self.clock.is_done

        def training_step(self, batch: dict[str, Any], index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=torch.cuda.is_available())

    class Data(lightning.LightningDataModule):  # type: ignore[misc]
        batch_size = FIRST

        def train_dataloader(self) -> Any:
            def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
                batch = speed._collate(rows)
                module.clock.tokens.append(speed._num_tokens(batch))
                return batch

            rows = [{"input_ids": row, "labels": i % 2} for i, row in enumerate(ids)]
            return torch.utils.data.DataLoader(rows, self.batch_size, shuffle=True, drop_last=True, collate_fn=collate)

    def trainer(**more: Any) -> Any:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        return lightning.Trainer(precision="bf16-mixed", max_epochs=-1, enable_model_summary=False, **quiet, **more)

    module, data = Module(), Data()
    started = time.perf_counter()
    tuner = tuning.Tuner(trainer(max_steps=4))
    tuner.scale_batch_size(module, datamodule=data, mode="binsearch", init_val=FIRST, max_val=2 * BATCH)
    search_s, found = time.perf_counter() - started, min(data.batch_size, BATCH)
    accumulate = max(1, round(BATCH / found))
    del module
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    module, data.batch_size = Module(), found
    trainer(max_steps=NUM_STEPS, accumulate_grad_batches=accumulate).fit(module, datamodule=data)
    return {"clock": module.clock, "micro_batch": found, "accumulate": accumulate, "search_s": search_s}
