"""Accelerate: your own training loop, in one process or several. Tested with 1.15.0.

    torchrun --nproc-per-node 2 accelerate_loop.py
"""
import copy

import timm
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from timm_odevit import TrajectoryDistillationTask, convert_


def main(images=16):
    accelerator = Accelerator(cpu=True)
    teacher = timm.create_model('deit_tiny_patch16_128.cifar100', pretrained=True)
    student = copy.deepcopy(teacher)
    convert_(student)
    task = TrajectoryDistillationTask(student, teacher)
    optimizer = torch.optim.AdamW((p for p in task.parameters() if p.requires_grad), lr=1e-3)
    data = TensorDataset(torch.randn(images, 3, 128, 128), torch.arange(images) % 100)    # yours
    task, optimizer, loader = accelerator.prepare(task, optimizer, DataLoader(data, batch_size=8))
    losses = []
    for batch in loader:
        loss = task(*batch)['loss']
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(f'{accelerator.num_processes} processes, loss:', losses)
    return losses


if __name__ == '__main__':
    main()
