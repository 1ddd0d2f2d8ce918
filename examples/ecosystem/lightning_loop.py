"""Lightning: the distillation task as a LightningModule, in one process or several. Tested with 2.6.6.

    torchrun --nproc-per-node 2 lightning_loop.py
"""
import copy
import os

import lightning
import timm
import torch
from torch.utils.data import DataLoader, TensorDataset

from timm_odevit import OdeConfig, TrajectoryDistillationTask, convert_


class Distillation(lightning.LightningModule):
    def __init__(self, task, lr=1e-3):
        super().__init__()
        self.task, self.lr = task, lr

    def training_step(self, batch, index):
        parts = self.task(*batch)
        self.log_dict({name: value.detach() for name, value in parts.items() if name.endswith('loss')}, prog_bar=True)
        return parts['loss']

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.task.parameters() if p.requires_grad), lr=self.lr)


def main(epochs=1, images=16):
    teacher = timm.create_model('deit_tiny_patch16_128.cifar100', pretrained=True)
    student = copy.deepcopy(teacher)
    convert_(student, OdeConfig(phases=3))
    data = TensorDataset(torch.randn(images, 3, 128, 128), torch.arange(images) % 100)    # yours
    processes = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    trainer = lightning.Trainer(max_epochs=epochs, accelerator='cpu', devices=processes, logger=False,
                                enable_checkpointing=False)
    trainer.fit(Distillation(TrajectoryDistillationTask(student, teacher)), DataLoader(data, batch_size=8))
    if trainer.is_global_zero:
        print(f'{trainer.world_size} processes, {trainer.global_step} updates:', trainer.callback_metrics)
    return trainer


if __name__ == '__main__':
    main()
