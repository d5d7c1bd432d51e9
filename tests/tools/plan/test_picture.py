"""The picture: a bar per rank and kind of memory, the limit, and a bar per pass."""

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from harness.compose.composer import compose_job
from harness.model.accounting import account
from harness.tools.plan.config import PlanJob
from harness.tools.plan.picture import draw
from harness.tools.plan.plan import KINDS, PARTS, Action, Plan, RankMemory, Speed

GIB = 2**30


def plan_of(*, timeline, limit=10 * GIB):
    """Two pipeline ranks of one stage each, one microbatch, with backward in two passes on the second."""
    job = compose_job(["parallelism=pp", "model=llama3_tiny"])
    kinds = dict.fromkeys(KINDS, 0.0)
    memory = [
        RankMemory(0, (0,), kinds | {"parameters": 2.0 * GIB, "activations": 3.0 * GIB}),
        RankMemory(1, (1,), kinds | {"parameters": 1.0 * GIB, "activations": 1.5 * GIB}),
    ]
    passes = [
        [Action(0, "F", 0, 0.0, 1.0), Action(0, "B", 0, 4.0, 6.0)],
        [Action(1, "F", 0, 1.0, 2.5), Action(1, "I", 0, 2.5, 4.0), Action(1, "W", 0, 4.0, 5.0)],
    ]
    parts = dict.fromkeys(PARTS, 0.0) | {"compute": 3.0, "bubble": 3.0}
    speed = Speed(6.0, parts, 100.0, None, passes) if timeline else None
    return Plan(job, account(job.model, 256), [1.0, 1.0], memory, limit, [], speed, None)


def test_memory_and_timeline(tmp_path, monkeypatch):
    figures = []
    savefig = Figure.savefig
    keep = lambda figure, *typed, **more: figures.append(figure) or savefig(figure, *typed, **more)  # noqa: E731
    monkeypatch.setattr(Figure, "savefig", keep)
    draw(str(tmp_path / "plan.png"), plan_of(timeline=True))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    memory, passes = figures[0].axes
    bars = [(bar.get_y(), bar.get_height()) for bar in memory.patches]
    assert bars == [(0.0, 2.0), (0.0, 1.0), (2.0, 3.0), (1.0, 1.5)]
    [limit] = memory.lines
    assert list(limit.get_ydata()) == [10.0, 10.0]
    assert [text.get_text() for text in memory.get_legend().get_texts()] == [
        "activations  3.00",
        "parameters  2.00",
    ]
    rows = [bars for bars in passes.collections if isinstance(bars, PolyCollection)]
    spans = [
        [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in row.get_paths()]
        for row in rows
    ]
    assert spans == [[(0.0, 1.0), (4.0, 6.0)], [(1.0, 2.5), (2.5, 4.0), (4.0, 5.0)]]
    colors = [tuple(color) for row in rows for color in row.get_facecolors()]
    assert colors[0] == colors[2] and len(set(colors)) == 4
    labels = [text.get_text() for text in passes.get_legend().get_texts()]
    assert labels == ["forward", "backward", "backward, inputs", "backward, weights"]
    assert "idle 41.7%" in passes.get_title(loc="left")
    # Unknown hardware has no limit and no time.
    draw(str(tmp_path / "plan.png"), plan_of(timeline=False, limit=None))
    [memory] = figures[1].axes
    assert not memory.lines and len(memory.patches) == 4


def test_a_picture_beside_a_search_or_a_rehearsal(tmp_path):
    for asked in ("search=true", "rehearse=true"):
        compose_job([asked, f"picture={tmp_path}/a.png"], config_name="plan", schema=PlanJob)
