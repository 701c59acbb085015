"""Values and gradients of a build with log_distance.h beside float64, on each of its backends.

    MINIMAL_ATTN_SCORE=examples/own_score/log_distance.h make build && build/python examples/own_score/test.py

They are the tests of alibi_slopes, with the score's formula in the place of ALiBi's. Arguments go to pytest.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in tests/conftest.py, which comes after torch here
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import pytest  # noqa: E402
import reference  # noqa: E402

HEADER = HERE / "log_distance.h"


def term_of_distance(slopes, distance):
    """The header's function, for tensors of float64."""
    return -slopes * (1 + distance.abs()).log()


def main():
    score = reference._C.score()
    if Path(score).name != HEADER.name:
        todo = f"MINIMAL_ATTN_SCORE={HEADER} make build"
        sys.exit(f"alibi_slopes have the score of {score or 'ALiBi'} here, not of {HEADER.name}: {todo}")
    reference.TERMS[score] = term_of_distance
    names = "test_alibi or alibi_slopes or with_masks"
    files = [f"{TESTS}/test_{name}.py" for name in ("alibi", "backward", "attn_mask")]
    sys.exit(pytest.main(["-q", "-k", names, *files, *sys.argv[1:]]))


if __name__ == "__main__":
    main()
