"""A rank sends the blocks of a pin while its lease lasts, and not after it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vllm

SECRET = "ab" * 32


def test_a_transfer_ends_with_the_lease_of_its_pin() -> None:
    """A target that is slow, or behind a cut link, must not get the blocks of another request."""
    import torch

    from coldstart.vllm.handover.connector import BlockTransfers, HandoverMetadata, HeldBlocks
    from coldstart.vllm.handover.wire import BlockQuery

    copies = BlockTransfers("127.0.0.1", 4)
    try:
        caches = {
            name: torch.arange(4 * 8, dtype=torch.uint8).view(4, 8) for name in ("layers.0", "layers.1")
        }
        copies.register_layers(caches)
        copies.apply_metadata(HandoverMetadata(pinned={"pin": HeldBlocks(SECRET, (2, 1))}))
        query = BlockQuery("pin", 0, 2, tuple(caches))
        expected = bytes(range(16, 24)) + bytes(range(8, 16))
        assert dict(copies._read(query)) == dict.fromkeys(caches, expected)
        layers = copies._read(query)
        assert next(layers)[1] == expected
        copies.apply_metadata(HandoverMetadata(ended_pins={"pin"}))
        assert list(layers) == []
    finally:
        copies.port.close()
