"""FSDP2 and DDP, parts of PyTorch: each shared block is a parameter group, gathered before each evaluation.

    torchrun --nproc-per-node 2 shard.py
"""
import copy

import timm
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import timm_odevit  # noqa: F401  registers the models

NAME = 'odevit_tiny_native_three_patch16_128.deit_tiny_k12_cifar100'


def losses(model, images, labels, steps=3):
    """Losses of a few updates, averaged over the processes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(mean.item() / dist.get_world_size())
    return found


def main():
    dist.init_process_group('gloo')
    rank = dist.get_rank()
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 128, 128), torch.arange(8)    # yours; each process takes its share
    mine = slice(rank * 4, rank * 4 + 4)
    model = timm.create_model(NAME, pretrained=True)
    plain = copy.deepcopy(model)

    sharded = copy.deepcopy(model)
    for block in sharded.blocks.shared.phases:    # one for each phase: what the steps call
        fully_shard(block)
    fully_shard(sharded)
    own = sum(p.to_local().numel() for p in sharded.parameters())
    both = {'FSDP2': losses(sharded, images[mine], labels[mine]),
            'DDP': losses(DistributedDataParallel(model), images[mine], labels[mine])}
    if rank == 0:
        optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
        for step in range(3):
            loss = torch.nn.functional.cross_entropy(plain(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f'update {step}: one process {loss.item():.5f}', {k: f'{v[step]:.5f}' for k, v in both.items()})
            assert all(abs(v[step] - loss.item()) < 1e-3 for v in both.values())
        total = sum(p.numel() for p in plain.parameters())
        print(f'{own:,} of {total:,} parameters in this process')
    dist.barrier()    # a process that ends while another still computes may be aborted
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
