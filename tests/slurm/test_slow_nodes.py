"""``cluster.exclude_slow``: a requeued job leaves the nodes of its slow ranks."""

from __future__ import annotations

from concurrent.futures import Future

from dragged import Attempt


def test_a_requeued_job_leaves_the_node_of_its_slow_rank(dragged: Future[list[Attempt]]) -> None:
    first, second, third = dragged.result()
    assert first.excluded == set()
    assert second.excluded == {first.slow}
    assert third.excluded == {first.slow, second.slow}
    assert all(len(each.nodes) == 2 and not each.nodes & each.excluded for each in (first, second, third))
    assert all(f"slow: rank 1 ({each.slow}, " in each.status for each in (first, second, third))
