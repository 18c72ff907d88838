"""Lanes: how many threads of this process copy or digest large chunks at a time.

A large copy keeps a core busy, and so does the source's digest of the same bytes. Where every core copies, both take
turns on each of them; with half the cores for either, the digest of one chunk is taken while another is copied::

    source process    |digest 0|digest 1|digest 2|                  one lane each, on a machine of two cores
    target process    |copy 0   |copy 1   |copy 2   |

Agents of one process share its lanes. Without digests, a chunk needs none unless a number was asked for.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext

__all__ = ["lane"]

_LARGE_BYTES = 1 << 20  # what takes less is done sooner than a waiting thread wakes up
_lock = threading.Lock()
_lanes: dict[int, threading.Semaphore] = {}


def lane(nbytes: int, threads: int, *, digests: bool) -> AbstractContextManager[object]:
    """Hold a lane while copying or digesting ``nbytes``.

    Args:
        threads: how many lanes there are; 0 is half the cores with digests, and no bound without.
    """
    threads = threads or (max(1, len(os.sched_getaffinity(0)) // 2) if digests else 0)
    if not threads or nbytes < _LARGE_BYTES:
        return nullcontext()
    with _lock:
        return _lanes.setdefault(threads, threading.Semaphore(threads))
