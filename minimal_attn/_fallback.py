"""How a call that leaves these kernels is reported: by a warning, once for each reason, or by an error."""

from __future__ import annotations

import warnings


class FallbackWarning(UserWarning):
    """A call went to another library's kernels. It is shown once for each reason in a process.

    warnings.filterwarnings("ignore", category=minimal_attn.FallbackWarning) hides it. strict=True of the
    drop-in (activate(), for example) makes it a RuntimeError.
    """


_told: set[str] = set()  # the reasons already warned of; a test clears it


def passed_on(why: str, strict: bool = False, stacklevel: int = 3) -> None:
    """Report that other kernels compute a call. `why` is one line such as "PyTorch: attn_mask is given".

    stacklevel is that of warnings.warn: 3 means the caller of the function that calls this one.

    Raises:
        RuntimeError: if strict, in each call.
    """
    if strict:
        raise RuntimeError(f"minimal_attn does not serve this call, and strict=True. {why}")
    if why not in _told:
        _told.add(why)
        # Each text comes here once, since Python would show it once for each line of code that calls.
        warnings.warn(f"minimal_attn does not serve this call. {why}", FallbackWarning, stacklevel=stacklevel)


# torch.compile then calls it while tracing, and the compiled code does not contain it.
passed_on._dynamo_marked_constant = True  # type: ignore[attr-defined]
