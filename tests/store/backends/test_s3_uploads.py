"""Test multipart uploads whose writers were killed: aborted once no writer can commit them, and never before."""

from __future__ import annotations

import numpy as np
import pytest

from scarctl.state.layout import TensorSpec, build_layout
from scarctl.store import Collector, Store, open_writer, verify
from scarctl.store.backends.s3 import PART
from scarctl.store.format import segment_name, segment_path
from scarctl.store.prune import Retention, plan_prune, prune
from tests.store.helpers import Data, small_layout
from tests.support.places import Bucket, Place
from tests.support.proxy import Proxy

pytestmark = pytest.mark.slow


def begin(bucket: Bucket, key: str) -> str:
    """Leave an unfinished upload, as a writer does that was killed in the middle."""
    asked = {"Bucket": bucket.bucket, "Key": key}
    token: str = bucket.client.create_multipart_upload(**asked)["UploadId"]
    bucket.client.upload_part(**asked, UploadId=token, PartNumber=1, Body=b"x" * 1000)
    return key


def of(bucket: Bucket, epoch: int, shard: int = 0) -> str:
    return f"{bucket.folder}/{segment_path(shard, segment_name(epoch, f'{epoch:032x}'))}"


@pytest.fixture
def bucket(s3_place: Place) -> Bucket:
    assert isinstance(s3_place.raw, Bucket)
    return s3_place.raw


@pytest.mark.long
def test_the_next_writer_aborts_those_of_earlier_terms_and_no_others(s3_place: Place, bucket: Bucket) -> None:
    layout, data = small_layout(), Data(small_layout())
    store = Store.create(s3_place.url, storage_options=s3_place.options)
    with open_writer(store, layout=layout) as writer:
        writer.commit(writer.state.ids, data, step=1, sealed=True)
    dead = [begin(bucket, of(bucket, writer.epoch))]
    store = Store.open(s3_place.url, storage_options=s3_place.options)
    with open_writer(store, layout=layout) as writer:
        other = bucket.folder.rpartition("/")[0]
        stay = [
            begin(bucket, of(bucket, writer.epoch)),
            begin(bucket, of(bucket, writer.epoch + 1)),
            begin(bucket, of(bucket, 1, shard=7)),  # a shard that is not this writer's
            begin(bucket, f"{bucket.folder}/something/else"),
            begin(bucket, f"{bucket.folder}-2/{segment_path(0, segment_name(1, '0' * 32))}"),
            begin(bucket, f"{other}/{segment_path(0, segment_name(1, '0' * 32))}"),
        ]
        assert sorted(bucket.uploads()) == sorted(dead + stay)
        collector = Collector(writer)
        collector.turn()
        assert sorted(bucket.uploads()) == sorted(stay)
        begin(bucket, dead[0])
        collector.turn()
        assert dead[0] in bucket.uploads(), "it is looked once"
        writer.commit(np.array([1]), data, step=2)
    assert verify(store, read_data=True).problems == []


def test_prune_aborts_those_of_fenced_writers(s3_place: Place, bucket: Bucket) -> None:
    layout, data = small_layout(), Data(small_layout())
    store = Store.create(s3_place.url, storage_options=s3_place.options)
    for _ in range(2):
        with open_writer(store, layout=layout) as writer:
            writer.commit(writer.state.ids, data, step=1, sealed=True)
    dead, stays = begin(bucket, of(bucket, 1)), begin(bucket, of(bucket, 2))
    plan = plan_prune(store, Retention())
    assert plan.files == (dead.removeprefix(f"{bucket.folder}/"),)
    assert bucket.uploads() == [dead, stays] or sorted(bucket.uploads()) == sorted([dead, stays])
    assert prune(store, plan).files == 1
    assert bucket.uploads() == [stays]


def test_memory_of_a_large_upload_is_bounded(s3_place: Place, wire: Proxy) -> None:
    """A segment of 30 parts takes, without the state, only the parts being sent, the part being filled, and copies."""
    import tracemalloc

    from scarctl.store.backends.s3 import IN_FLIGHT, S3Blobs

    store = Store.create(s3_place.url, storage_options=s3_place.options)
    assert isinstance(store.blobs, S3Blobs)
    sent = [0]

    async def swallow(method: str, **asked: object) -> dict[str, object]:
        """Make the server keep nothing: its memory is not measured."""
        if method == "get_object":
            found: dict[str, object] = await original(method, **asked)
            return found
        body = asked.get("Body", b"")
        assert isinstance(body, bytes)
        sent[0] += len(body)
        return {"UploadId": "x", "ETag": '"0"'}

    layout = build_layout([("w", "parameter", (TensorSpec("", "U8", (240, 1 << 20)),))], rows={"w": 1})
    block = memoryview(np.zeros(240 << 20, np.uint8))
    fs = store.blobs._fs
    with open_writer(store, layout=layout) as writer:
        original, fs._call_s3 = fs._call_s3, swallow
        tracemalloc.start()
        try:
            with pytest.raises(KeyError):  # the answers make no sense
                writer.commit(writer.state.ids, lambda g, t, a, b: block[a << 20 : b << 20], step=1)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            fs._call_s3 = original
    assert sent[0] >= 240 << 20
    assert peak < (IN_FLIGHT + 4) * PART
