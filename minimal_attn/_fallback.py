"""The word that a call leaves these kernels: a warning once for each reason, or an error."""

from __future__ import annotations

import warnings


class FallbackWarning(UserWarning):
    """A call went to another library's kernels. Given once for each reason in a process.

    warnings.filterwarnings("ignore", category=minimal_attn.FallbackWarning) hides it. strict=True, of
    activate() for one, makes it a RuntimeError.
    """


_told: set[str] = set()  # the reasons already warned of; a test clears it


def passed_on(why: str, strict: bool = False, stacklevel: int = 3) -> None:
    """Say that other kernels compute a call, why being one line such as "PyTorch: attn_mask is given".

    stacklevel is that of warnings.warn: 3 means the caller of the function that calls this one.

    Raises:
        RuntimeError: if strict, in each call.
    """
    if strict:
        raise RuntimeError(f"minimal_attn does not serve this call, and strict=True. {why}")
    if why not in _told:
        _told.add(why)
        # Python shows a warning once for each text and line of code: each text comes here once.
        warnings.warn(f"minimal_attn does not serve this call. {why}", FallbackWarning, stacklevel=stacklevel)


# torch.compile calls it while it traces, and leaves it out of what it compiles.
passed_on._dynamo_marked_constant = True  # type: ignore[attr-defined]
