"""One builder at a time: on one node, on several, and on file systems without locks."""

import threading
import time

import pytest
from processes import PATIENCE

from harness.util import store
from harness.util.store import HEARTBEAT, LOCK, only_builder


def never():
    return False


def build_in_thread(folder, built):
    def build():
        with only_builder(folder, lambda: bool(built)) as building:
            if building is not None:
                built.append("second")

    thread = threading.Thread(target=build)
    thread.start()
    return thread


def test_the_second_takes_over_when_the_first_fails(tmp_path):
    built = []
    with pytest.raises(KeyError), only_builder(tmp_path / "work", never) as building:
        assert building is not None
        thread = build_in_thread(tmp_path / "work", built)
        time.sleep(0.1)
        assert not built
        raise KeyError
    thread.join(PATIENCE)
    assert built == ["second"] and not (tmp_path / "work" / HEARTBEAT).exists()


def test_a_useless_folder_is_removed(tmp_path):
    with only_builder(tmp_path / "work", never) as building:
        assert building is not None
        building.is_useless = True
    assert list(tmp_path.iterdir()) == []
    with only_builder(tmp_path / "work", lambda: True) as building:
        assert building is None


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_builder_of_another_node_is_dead_when_its_heart_stops(has_locks, tmp_path, monkeypatch):
    """Its lock may not be visible here."""
    if not has_locks:
        monkeypatch.setattr(store, "lock", lambda *_, **__: None)
    monkeypatch.setattr(store, "DEAD_SECONDS", 0.5)
    heart = tmp_path / HEARTBEAT
    heart.write_text("other-node 1 0")
    built = []
    thread = build_in_thread(tmp_path, built)
    for beat in range(10):
        time.sleep(0.1)
        heart.write_text(f"other-node 1 {beat}")
    assert not built, "it beats"
    thread.join(PATIENCE)
    assert built == ["second"]


def test_a_builder_of_this_node_is_dead_when_its_lock_is_free(tmp_path):
    (tmp_path / LOCK).touch()
    (tmp_path / HEARTBEAT).write_text(f"{store.node_name()} 1 0")
    with only_builder(tmp_path, never) as building:
        assert building is not None
