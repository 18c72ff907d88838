"""Prompt context: a digest of what a request's caches were computed from, carried sealed in the ticket.

In come the token ids up to the state's position and whatever else decides the caches; out come 16 bytes. Both
engines' connectors compute it, and the target compares: a router that hands out another request's ticket gets
an error instead of a fluent answer to another prompt (vllm#52234).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from pdxfer.errors import MisuseError

__all__ = ["prompt_context", "tenant_of"]


def tenant_of(salt: str | None) -> str:
    """Name of the tenant whose requests carry this cache salt; it does not say the salt. "" without one."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"pdxfer-tenant").hexdigest() if salt else ""


def prompt_context(token_ids: Sequence[int], *, adapter: str = "", salt: str = "", media: Iterable[str] = ()) -> bytes:
    """Return the digest of everything a request's caches depend on, the model itself apart.

    Args:
        token_ids: exactly the tokens that state and KV have seen.
        adapter: name of the LoRA adapter. salt: the request's cache salt.
        media: hashes of images and the like, in order.

    Raises:
        MisuseError: a token id is no 32-bit integer.
    """
    try:
        ids = np.asarray(token_ids, dtype="<i4")
    except (ValueError, OverflowError, TypeError) as error:
        raise MisuseError(f"not token ids: {error}") from error
    digest = hashlib.blake2b(digest_size=16, person=b"pdxfer-context")
    for part in (ids.tobytes(), adapter.encode(), salt.encode(), *(name.encode() for name in media)):
        digest.update(len(part).to_bytes(8, "little"))  # so that no two lists of parts run into one another
        digest.update(part)
    return digest.digest()
