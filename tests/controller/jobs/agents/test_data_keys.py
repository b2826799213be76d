from __future__ import annotations

import pytest
import zmq
import zmq.utils.z85

from atoll.controller.jobs.model.data_keys import new_seed, private_key, public_keys

SEED = "00" * 32


def test_every_seed_job_run_and_rank_has_a_key_of_its_own_and_always_the_same() -> None:
    keys = [
        private_key(SEED, "vit-1", 1, 0),
        private_key(SEED, "vit-1", 1, 1),
        private_key(SEED, "vit-1", 2, 0),
        private_key(SEED, "vit-2", 1, 0),
        private_key("01" * 32, "vit-1", 1, 0),
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}
    assert private_key(SEED, "vit-1", 1, 0) == keys[0]
    # RFC 5869 with SHA-256, no salt, and this info: another version must hand out the same keys for a run that goes on.
    assert keys[0].hex() == "0a5882a66fb22040dd521f9ba2737a8fc0c46bd2b79375cae1cfff4e5142d44d"


def test_seeds_are_fresh() -> None:
    assert new_seed() != new_seed()
    assert len(bytes.fromhex(new_seed())) == 32


@pytest.mark.skipif(not zmq.has("curve"), reason="this ZeroMQ has no CURVE")
def test_the_public_keys_are_those_that_curve_computes_from_the_private_ones() -> None:
    public = public_keys(SEED, "vit-1", 1, 3)
    assert len(public) == 3
    for rank, key in enumerate(public):
        secret = zmq.utils.z85.encode(private_key(SEED, "vit-1", 1, rank))
        assert zmq.utils.z85.decode(zmq.curve_public(secret)) == key
