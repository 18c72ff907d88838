"""The copy kernel for GPUs: runs of words between two buffers of one device, gathered or scattered in one launch.

In come flat tensors of words and int64 tensors of word offsets, all on one device; out come moved words, in the order
of the current stream. This file knows nothing else; ``kernels.py`` has checked every run.

::

    for i < words of all runs:   run, within = divmod(i, words of a run)
                                 target[to[run] + within] = source[at[run] + within]

Importing it needs triton. On the CPU it runs in triton's interpreter (TRITON_INTERPRET=1, set before the import), which
is how it is tested; nobody has run it on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["copy_words"]

_BLOCK = 1024  # words of one program: 8 KiB of the widest


@triton.jit  # type: ignore[untyped-decorator]
def _copy(target, source, to, at, total, words, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < total
    run = index // words
    within = index - run * words
    values = tl.load(source + tl.load(at + run, mask=mask, other=0) + within, mask=mask)
    tl.store(target + tl.load(to + run, mask=mask, other=0) + within, values, mask=mask)


def copy_words(target: Any, source: Any, to: Any, at: Any, words: int) -> None:
    """Copy ``words`` words for each entry of ``to`` and ``at`` (word offsets); returns when the launch is queued."""
    total = to.numel() * words
    if total:
        _copy[(triton.cdiv(total, _BLOCK),)](target, source, to, at, total, words, BLOCK=_BLOCK)
