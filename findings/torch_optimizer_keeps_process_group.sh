#!/bin/sh
# An optimizer that is made after init_process_group keeps the group alive after destroy_process_group.
#
# Versions   torch 2.11.0, a CPU, gloo
# Behaviour  The first optimizer of a process imports torch._dynamo. If a process group exists by then, something in
#            PyTorch keeps it: destroy_process_group() returns, but the object and its threads live on, with all
#            finished works that hold tensors. If torch._dynamo was imported before the group was made, the group is
#            freed and its threads are joined.
# Output     none: freed, no thread left; optimizer: alive, 3 threads left; dynamo first: freed, no thread left
# Surprise   Every training script makes an optimizer, which needs no process group. Nothing says that it decides whether
#            destroy_process_group frees one. Threads that live on hold finished works and their tensors while Python
#            ends, when freeing a tensor needs an interpreter that is going away.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0
cat >group.py <<'END'
import os
import sys
import weakref

import torch
import torch.distributed as dist

order = sys.argv[1]
if order == "dynamo first":
    import torch._dynamo  # noqa: F401
threads = len(os.listdir("/proc/self/task"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if order != "none":
    torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
group = weakref.ref(dist.group.WORLD)
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
left = len(os.listdir("/proc/self/task")) - threads
print(f"{order}: {'alive' if group() else 'freed'}, {left or 'no'} thread{'s' * (left > 1)} left")
sys.stdout.flush()
os._exit(0)
END
for order in none optimizer "dynamo first"; do
    OMP_NUM_THREADS=1 "$PYTHON" -W ignore group.py "$order"
done >seen.txt
cat seen.txt
grep -qx "none: freed, no thread left" seen.txt
grep -q "^optimizer: alive, [1-9]" seen.txt
grep -qx "dynamo first: freed, no thread left" seen.txt
