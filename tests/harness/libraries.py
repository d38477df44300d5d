# ruff: noqa: E501 (a planted line stands on one line, as it does in the script)
"""Scripts of libraries that hide the loop, as their users have them, and mistakes planted in them, for tools.judge.

A mistake is (what, kind, changes): the kind that tools.judge should name, or "" for what the library puts right itself.
"""

from dataclasses import dataclass

LIGHTNING = """
import os
import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 8, generator=g), torch.randint(4, (count,), generator=g))


class Classifier(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    L.seed_everything(3)
    train = DataLoader(make_data(192), batch_size=8, shuffle=True)
    val = DataLoader(make_data(64, 1), batch_size=8)
    trainer = L.Trainer(max_epochs=3, accelerator="gpu", devices="auto", strategy="ddp", gradient_clip_val=1.0, accumulate_grad_batches=2, log_every_n_steps=2)
    trainer.fit(Classifier(), train, val)


if __name__ == "__main__":
    main()
"""

TRAINER = """
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Texts(Dataset):
    def __init__(self, count, seed):
        self.ids = torch.randint(5, 60, (count, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(12, dtype=torch.long), "labels": self.ids[i]}


class OwnTrainer(Trainer):
    pass


class Report(TrainerCallback):
    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        pass


def main():
    set_seed(5)
    config = GPT2Config(vocab_size=60, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=2,
        max_grad_norm=1.0,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
    )
    train, val = Texts(160, 0), Texts(48, 1)
    trainer = OwnTrainer(model=model, args=args, train_dataset=train, eval_dataset=val, callbacks=[Report()])
    trainer.train()


if __name__ == "__main__":
    main()
"""

ACCELERATE = """
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 8, generator=g), torch.randint(4, (count,), generator=g))


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train = DataLoader(make_data(160), shuffle=True, batch_size=8)
    test = DataLoader(make_data(60, 1), batch_size=8)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    for epoch in range(2):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        shown = accelerator.reduce(loss.detach(), "mean").item()
        model.eval()
        right = total = 0
        for x, y in test:
            with torch.no_grad():
                guess = model(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            right, total = right + (guess == y).sum().item(), total + len(y)
        accelerator.print(f"epoch {epoch}: loss {shown:.4f} accuracy {right / total:.3f}")
        accelerator.save_state("state")
    accelerator.end_training()


main()
"""

SCRIPTS = {"Lightning": LIGHTNING, "the Trainer of transformers": TRAINER, "Accelerate": ACCELERATE}
PACKAGES = {"Lightning": "lightning", "the Trainer of transformers": "transformers", "Accelerate": "accelerate"}


@dataclass(frozen=True)
class Mistake:
    """What is planted, the kind that should be named ("" for none), and texts that replace others."""

    framework: str
    what: str
    kind: str
    changes: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """The script with it."""
        text = SCRIPTS[self.framework]
        for old, new in self.changes:
            assert text.count(old) == 1, (self.what, old, text.count(old))
            text = text.replace(old, new)
        return text


def of(library: str, *rows: tuple[str, str, tuple[tuple[str, str], ...]]) -> tuple[Mistake, ...]:
    """Those of one library."""
    return tuple(Mistake(library, *row) for row in rows)


STEP = '        self.log("train_loss", loss, prog_bar=True, sync_dist=True)\n        return loss\n'
HOOK = "    def configure_optimizers(self):"
BY_HAND = """        optimizer = self.optimizers()
        {first}self.manual_backward(loss / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            {last}
"""
MANUAL = (
    "        self.save_hyperparameters()\n",
    "        self.save_hyperparameters()\n        self.automatic_optimization = False\n",
)
CLIP = ("gradient_clip_val=1.0, accumulate_grad_batches=2, ", "")
SCHEDULE = (
    'return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}',
    "return optimizer",
)
NO_SCHEDULE = ("        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)\n", "")

MISTAKES = (
    *of(
        "Lightning",
        (
            "an own DistributedSampler, without set_epoch",
            "",
            (
                (
                    "batch_size=8, shuffle=True)",
                    'batch_size=8, sampler=DistributedSampler(make_data(192), 2, int(os.environ["RANK"])))',
                ),
            ),
        ),
        (
            "use_distributed_sampler=False",
            "same samples on all ranks",
            (("log_every_n_steps=2)", "log_every_n_steps=2, use_distributed_sampler=False)"),),
        ),
        (
            "a collective on rank 0 only",
            "not all ranks come",
            (
                (
                    STEP,
                    STEP.replace(
                        "        return",
                        "        if self.trainer.is_global_zero:\n            self.all_gather(loss)\n        return",
                    ),
                ),
            ),
        ),
        ("self.log without sync_dist", "local loss logged", (("prog_bar=True, sync_dist=True", "prog_bar=True"),)),
        (
            "a print of it on rank 0",
            "local loss logged",
            (
                (
                    STEP,
                    STEP.replace(
                        "        return",
                        '        if self.global_rank == 0:\n            print(f"loss {loss.item():.4f}")\n        return',
                    ),
                ),
            ),
        ),
        (
            "manual optimization, not divided",
            "accumulation not divided",
            (
                (STEP, BY_HAND.format(first="", last="optimizer.zero_grad()").replace("loss / 2", "loss")),
                MANUAL,
                CLIP,
                SCHEDULE,
                NO_SCHEDULE,
            ),
        ),
        (
            "manual optimization, without zero_grad",
            "zero_grad is missing",
            ((STEP, BY_HAND.format(first="", last="pass")), MANUAL, CLIP, SCHEDULE, NO_SCHEDULE),
        ),
        (
            "an optimizer of the last layer",
            "parameters without optimizer",
            (("AdamW(self.parameters()", "AdamW(self.net[2].parameters()"),),
        ),
        (
            "torch.save on all ranks",
            "saved by all ranks",
            (
                (
                    HOOK,
                    '    def on_train_epoch_end(self):\n        torch.save(self.net.state_dict(), "net.pt")\n\n' + HOOK,
                ),
            ),
        ),
    ),
    *of(
        "the Trainer of transformers",
        (
            "an own loss, a mean, under accumulation",
            "accumulation not divided",
            (
                (
                    "class OwnTrainer(Trainer):\n    pass\n",
                    "class OwnTrainer(Trainer):\n    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):\n        out = model(input_ids=inputs['input_ids'])\n        loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), inputs['labels'][:, 1:].flatten())\n        return (loss, out) if return_outputs else loss\n",
                ),
            ),
        ),
        (
            "BertForSequenceClassification, whose loss is a mean, under accumulation",
            "accumulation not divided",
            (
                ("import GPT2Config, GPT2LMHeadModel,", "import BertConfig, BertForSequenceClassification,"),
                (
                    "GPT2Config(vocab_size=60, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)",
                    "BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2)",
                ),
                ("GPT2LMHeadModel(config)", "BertForSequenceClassification(config)"),
                ('"labels": self.ids[i]}', '"labels": (self.ids[i, 0] > 30).long()}'),
            ),
        ),
        (
            "an own loader for all ranks",
            "same samples on all ranks",
            (
                (
                    "class OwnTrainer(Trainer):\n    pass\n",
                    "class OwnTrainer(Trainer):\n    def get_train_dataloader(self):\n        return DataLoader(self.train_dataset, batch_size=8, shuffle=True)\n",
                ),
            ),
        ),
        (
            "a part of the data for each rank, which the Trainer splits again",
            "samples lost",
            (
                (
                    "train, val = Texts(160, 0), Texts(48, 1)",
                    'train, val = Subset(Texts(160, 0), range(int(os.environ["RANK"]), 160, 2)), Texts(48, 1)',
                ),
            ),
        ),
        (
            "a collective on rank 0 only",
            "not all ranks come",
            (
                (
                    "model=None, **kwargs):\n        pass",
                    "model=None, **kwargs):\n        if state.is_world_process_zero:\n            dist.all_reduce(torch.ones(1))",
                ),
            ),
        ),
        (
            "a print of the loss on rank 0",
            "local loss logged",
            (
                (
                    "class OwnTrainer(Trainer):\n    pass\n",
                    "class OwnTrainer(Trainer):\n    def training_step(self, *args, **kwargs):\n        loss = super().training_step(*args, **kwargs)\n        if self.is_world_process_zero():\n            print(f'loss {loss.item():.4f}')\n        return loss\n",
                ),
            ),
        ),
        (
            "an optimizer of the head",
            "parameters without optimizer",
            (
                (
                    "callbacks=[Report()]",
                    "callbacks=[Report()], optimizers=(torch.optim.AdamW(model.transformer.ln_f.parameters(), lr=1e-3), None)",
                ),
            ),
        ),
        (
            "torch.save on all ranks",
            "saved by all ranks",
            (
                (
                    "model=None, **kwargs):\n        pass",
                    "model=None, **kwargs):\n        torch.save(model.state_dict(), 'model.pt')",
                ),
            ),
        ),
    ),
    *of(
        "Accelerate",
        (
            "a loader that is not prepared",
            "same samples on all ranks",
            (
                (
                    "model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)",
                    "model, optimizer, test, scheduler = accelerator.prepare(model, optimizer, test, scheduler)",
                ),
            ),
        ),
        (
            "a model that is not prepared",
            "never wrapped",
            (
                (
                    "model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)",
                    "optimizer, train, test, scheduler = accelerator.prepare(optimizer, train, test, scheduler)",
                ),
            ),
        ),
        (
            "own accumulation, not divided",
            "accumulation not divided",
            (
                ("gradient_accumulation_steps=2", ""),
                (
                    "for x, y in train:\n            with accelerator.accumulate(model):",
                    "for i, (x, y) in enumerate(train):\n            if True:",
                ),
                (
                    "                optimizer.step()\n                scheduler.step()\n                optimizer.zero_grad()\n",
                    "                if i % 2:\n                    optimizer.step()\n                    scheduler.step()\n                    optimizer.zero_grad()\n",
                ),
            ),
        ),
        ("zero_grad forgotten", "zero_grad is missing", (("                optimizer.zero_grad()\n", ""),)),
        (
            "a collective on rank 0 only",
            "not all ranks come",
            (
                (
                    '        shown = accelerator.reduce(loss.detach(), "mean").item()',
                    '        shown = accelerator.reduce(loss.detach(), "mean").item() if accelerator.is_main_process else 0.0',
                ),
            ),
        ),
        (
            "the loss of rank 0 printed",
            "local loss logged",
            (('accelerator.reduce(loss.detach(), "mean").item()', "loss.item()"),),
        ),
        (
            "gather instead of gather_for_metrics",
            "evaluation counts duplicates",
            (("accelerator.gather_for_metrics((guess, y))", "accelerator.gather((guess, y))"),),
        ),
    ),
)
