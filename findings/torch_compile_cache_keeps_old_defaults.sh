#!/bin/sh
# torch.compile's cache on disk keeps a custom operator's old default value after the library that defines it changed.
#
# Versions   torch 2.11.0, a CPU
# Behaviour  Inductor writes an operator's default arguments into the code that it generates. The keys of its cache and
#            of AOTAutograd's have the operator's name, and not its schema. So a new process, with a new version of the
#            library, hits the cache and calls the operator with the old default. Eager code takes the new one.
# Output     default 1: eager 2, compiled 2; default 3: eager 6, compiled 2
# Surprise   Both caches are on by default, and hit across processes. A release that only corrects a default value is
#            right in eager mode and silently has no effect in compiled models until the cache is removed. A renamed
#            argument raises there, at a call that doesn't name it.

. "$(dirname "$0")/packages.sh"
packages torch==2.11.0
cat >package.py <<'END'
import sys

import torch
from torch import library

default = sys.argv[1]
operators = library.Library("example", "DEF")
operators.define(f"scaled(Tensor x, float by={default}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
operators.impl("scaled", lambda x, by=float(default): 2 * x * by, "CPU")
operators.impl("scaled", lambda x, by=1.0: torch.empty_like(x), "Meta")


def function(x):
    return torch.ops.example.scaled(x)


x = torch.ones(4)
eager, compiled = function(x)[0].item(), torch.compile(function)(x)[0].item()
print(f"default {float(default):g}: eager {eager:g}, compiled {compiled:g}")
END
export TORCHINDUCTOR_CACHE_DIR="$PWD/cache"
seen=$("$PYTHON" package.py 1.0)"; "$("$PYTHON" package.py 3.0)
echo "$seen"
[ "$seen" = "default 1: eager 2, compiled 2; default 3: eager 6, compiled 2" ]
