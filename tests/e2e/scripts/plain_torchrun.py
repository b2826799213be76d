"""An unmodified torchrun script: knows nothing of Atoll."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.tensor([float(os.environ["RANK"]) + 1.0])
dist.all_reduce(value)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: sum {value.item():.0f}", flush=True)
dist.destroy_process_group()
