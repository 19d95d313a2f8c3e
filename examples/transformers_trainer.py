"""The Transformers Trainer with a run: every rank's own numbers, a crash, and the same run going on from the checkpoint.

python examples/transformers_trainer.py, or: torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

import fanfold
from fanfold.frameworks.transformers import FanfoldCallback

config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
rows = torch.randint(0, 32, (32, 8))
data = [{"input_ids": row, "labels": (row[0] > 15).long()} for row in rows]
args = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=8,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_steps=4,
    use_cpu=True,
    disable_tqdm=True,
    report_to="none",
)


class Accident(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 6:
            raise RuntimeError("the node is gone")


tracking = FanfoldCallback("transformers", name="tiny-bert", system=False)
trainer = Trainer(
    BertForSequenceClassification(config), args, train_dataset=data, eval_dataset=data, callbacks=[tracking, Accident]
)
try:
    trainer.train()
except RuntimeError as error:
    print(f"{error}: the run has {fanfold.open(tracking.run.path).status}")

trainer.remove_callback(Accident)
trainer.train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-4")
trainer.evaluate()
fanfold.finish()

if trainer.is_world_process_zero():
    run = fanfold.open(tracking.run.path)
    print(f"{run.status} after {len(run.attempts)} attempts, {len(run.series('train/loss'))} steps")
