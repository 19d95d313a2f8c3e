"""Lightning's Trainer with a run: fit, then test, in one run; then fit goes on from the checkpoint, in the same run.

Give Trainer devices=2, strategy="ddp", and both ranks are in the run.
"""

import tempfile

import lightning.pytorch as lightning
import torch

import fanfold
from fanfold.frameworks.lightning import FanfoldLogger


class Line(lightning.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        loss = (self.layer(batch).squeeze(1) - batch.sum(1)).square().mean()
        self.log("train/loss", loss)
        return loss

    def test_step(self, batch, index):
        self.log("test/loss", (self.layer(batch).squeeze(1) - batch.sum(1)).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


folder = tempfile.mkdtemp()
loader = torch.utils.data.DataLoader(torch.rand(32, 2), batch_size=4)
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1, "accelerator": "cpu"}

model, logger = Line(), FanfoldLogger("lightning", name="line", save_dir=folder)
trainer = lightning.Trainer(logger=logger, max_epochs=1, **quiet)
trainer.fit(model, loader)
trainer.test(model, loader, verbose=False)

again = FanfoldLogger(save_dir=folder)
trainer = lightning.Trainer(logger=again, max_epochs=2, **quiet)
trainer.fit(Line(), loader, ckpt_path=f"{folder}/lightning/{logger.version}/checkpoints/epoch=0-step=8.ckpt")
fanfold.finish()

run = fanfold.open(again.experiment.path)
print(f"{run.name}: {len(run.attempts)} attempts, {len(run.series('train/loss'))} steps, lr {run.config['lr']}")
