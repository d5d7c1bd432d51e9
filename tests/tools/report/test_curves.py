"""The curves of a report: their points, and what their picture leaves out, names and says."""

import json
import math
import re

import numpy as np
import pytest
from cases import rows
from made import leave_run

from harness.launch.rows import load
from harness.metrics.tensor_file import ACTIVATIONS, TensorFile
from harness.tools.report.curves import curves_of, lowest_in_words, markup_of
from harness.tools.report.heat_maps import maps_of
from harness.tools.report.runs import report_runs
from harness.util.document import to_html

TINY = "model=llama3_tiny"


def losses(*values):
    return [
        {"step": n, "loss": loss, "tokens": 8 * n, "step_seconds": 0.5}
        for n, loss in enumerate(values, start=1)
    ]


def panels_of(folder, smooth=1):
    page = markup_of(curves_of(load(folder), smooth), smooth).html
    data = json.loads(re.search(r'id="curves">(.*?)</script>', page)[1])
    return data["names"], {panel["title"]: panel for panel in data["panels"]}


def test_runs_of_other_seeds_are_one_curve_and_the_best_is_first(tmp_path):
    for lr, seed, values in rows("""
        1e-3  1  [3.0, 2.0, 1.5]
        1e-3  2  [3.2, 2.2, 1.7]
        2e-3  1  [3.0, .nan, 1.0]
        3e-3  1  [3.0, 3.0, .inf]
    """):
        found = losses(*values)
        found.insert(1, {**found[1], "loss": 9.0})  # of an attempt before
        leave_run(tmp_path, TINY, f"optimizer.lr={lr}", f"training.seed={seed}", rows=found)
    names, panels = panels_of(tmp_path)
    assert names == ["lr=2e-3", "lr=1e-3 (2 seeds)", "lr=3e-3"]
    assert [line["points"] for line in panels["training loss"]["lines"]] == rows("""
        [1, 8, 0.5, 3]              [2, 16, 1, null]          [3, 24, 1.5, 1]
        [1, 8, 0.5, 3.1, 3, 3.2]    [2, 16, 1, 2.1, 2, 2.2]   [3, 24, 1.5, 1.6, 1.5, 1.7]
        [1, 8, 0.5, 3]              [2, 16, 1, 3]             [3, 24, 1.5, null]
    """)
    _, panels = panels_of(tmp_path, smooth=2)
    means = [point[3] for point in panels["training loss, mean of 2 rows"]["lines"][1]["points"]]
    assert means == [3.1, 2.6, 1.85]


FALLING = [9.0, 6.0, 4.0, *(3 - 0.02 * step for step in range(47))]
SHAPES = {
    "falls": FALLING,
    "diverges": FALLING[:20] + [1e4] * 30,
    "spikes": [*FALLING, 50.0],
    "flat": [5.944, 6.079, 5.931, 6.100, 6.045, 6.001],
    "constant": [2.0] * 40,
    "lost": [math.nan] * 2,
    "single": [9.0],
}


@pytest.mark.parametrize(
    ("runs", "above"),
    rows("""
        [falls]                   2
        [falls, falls]            4
        [falls, diverges]         34
        [falls, flat, diverges]   32
        [spikes]                  2
        [flat]                    0
        [flat, flat]              0
        [constant]                0
        [lost]                    0
        [single]                  0
    """),
)
def test_points_above_the_picture_are_counted(runs, above, tmp_path):
    for number, shape in enumerate(runs, start=1):
        leave_run(tmp_path, TINY, f"optimizer.lr={number}e-3", rows=losses(*SHAPES[shape]))
    panel = panels_of(tmp_path)[1]["training loss"]
    assert panel["above"] == above and (panel["top"] is None) == (above == 0)
    values = [point[-1] for line in panel["lines"] for point in line["points"]]
    top = panel["top"] or math.inf
    assert sum(value is not None and value > top for value in values) == above


@pytest.mark.parametrize(("runs", "most"), [(1, 1000), (25, 800)])
def test_long_runs_are_thinned_and_keep_their_range(runs, most, tmp_path):
    values = [3.0] * 1700
    values[1234] = 40.0
    for number in range(1, runs + 1):
        leave_run(tmp_path, TINY, f"optimizer.lr={number}e-4", rows=losses(*values))
    *_, text, markup = report_runs("t", load(tmp_path)).blocks
    assert "The curves are thinned" in text
    [*_, panel] = panels_of(tmp_path)[1].values()
    for line in panel["lines"]:
        points = line["points"]
        assert 0.5 * most < len(points) <= most
        assert max(point[-1] for point in points) == 40.0
        assert sum(len(point) > 4 for point in points) == 1
    assert len(markup.html) < 3_000_000


def test_columns_that_a_run_lacks_are_left_out(tmp_path):
    found = losses(3.0, 2.0)
    found[0] |= {"grad_norm": math.inf, "lr": 0.0, "tokens_per_second": None}
    found[1] |= {"grad_norm": 1.0, "lr": 1e-3, "mfu": 0.4}
    leave_run(tmp_path, TINY, rows=[*found, {"step": 2, "validation_loss": 2.5}])
    leave_run(tmp_path, TINY, "optimizer.lr=1e-4", rows=losses(1.0))
    leave_run(tmp_path, TINY, "optimizer.lr=1e-5")
    names, panels = panels_of(tmp_path)
    assert names[0] == "lr=1e-4" and len(names) == 2
    shown = []
    for title, panel in panels.items():
        shown += [[title, line["curve"], line["points"]] for line in panel["lines"]]
    assert shown == rows("""
        training loss    0  [[1, 8, 0.5, 1]]
        training loss    1  [[1, 8, 0.5, 3], [2, 16, 1, 2]]
        validation loss  1  [[2, 16, 1, 2.5]]
        gradient norm    1  [[1, 8, 0.5, null], [2, 16, 1, 1]]
        learning rate    1  [[1, 8, 0.5, 0], [2, 16, 1, 0.001]]
    """)


def test_a_name_does_not_end_the_script(tmp_path):
    bad = "</script><script>alert(1)</script><!--"
    leave_run(tmp_path, TINY, rows=losses(3.0))
    made = report_runs(bad, [{**row, "point": bad} for row in load(tmp_path)])
    page = to_html(bad, made.blocks, tmp_path)
    [data] = re.findall(r'id="curves">(.*?)</script>', page)
    assert json.loads(data)["names"] == [bad]
    assert bad not in page


@pytest.mark.parametrize(
    ("ends", "failed", "said"),
    rows("""
        [3.0]                        []  ""
        [3.0, 2.0]                   []  "`lr=2e-3`, 2.0000."
        [2.00001, 2.0]               []  "`lr=2e-3`, `lr=1e-3`, 2.0000."
        [2.0, 2.0, 2.0, 2.0, 2.0]    []  "`lr=1e-3`, `lr=2e-3`, `lr=3e-3` and 2 more, 2.0000."
        [3.0, 2.0]                  [2]  "`lr=1e-3`, 3.0000. LEFT"
        [.nan, 2.0]                  []  "`lr=2e-3`, 2.0000. LEFT"
        [.nan, 2.0]                 [2]  ""
    """),
)
def test_the_lowest_loss_is_named(ends, failed, said, tmp_path):
    for n, end in enumerate(ends, start=1):
        state = "failed" if n in failed else "completed"
        leave_run(tmp_path, TINY, f"optimizer.lr={n}e-3", rows=losses(4.0, end), state=state)
    found = lowest_in_words(curves_of(sorted(load(tmp_path), key=lambda row: row["point"])))
    said = said.replace("LEFT", "1 curve not compared: not completed, or not finite at the end.")
    assert found == [f"The lowest training loss, mean of the last tenth: {said}"] * bool(said)


def test_losses_of_equal_numerics_tie_and_of_other_data_are_not_compared(tmp_path):
    for n in (1, 2):
        found = losses(2.0 + 0.01 * n)
        leave_run(tmp_path / "ranks", TINY, f"parallelism.dp_shard={n}", rows=found)
        leave_run(tmp_path / "data", TINY, f"training.seq_len={32 * n}", rows=found)
    [tie] = lowest_in_words(curves_of(load(tmp_path / "ranks")))
    assert tie.count("`") == 4 and tie.endswith(", 2.0100 to 2.0200.")
    [refused] = lowest_in_words(curves_of(load(tmp_path / "data")))
    assert refused == "No loss is called the lowest: the runs differ in `training.seq_len`."


def test_layers_are_drawn_by_step(tmp_path):
    """Every cell has its layer, step and value; what is not finite has its own color; a name is escaped."""
    names = ["tok_embeddings.weight", "layers.0.w.weight", "layers.0.v.weight", "layers.1.w.weight"]
    file = TensorFile(tmp_path, ["gradient", "weight", "update"], names, [4, 1, 3, 1], 0)
    for step in (1, 2):
        data = np.full((3, 4), 2.0 * step)
        data[0, 3] = np.inf
        file.write(step, data)
    file.close()
    page = maps_of([{"run_dir": str(tmp_path), "point": "a<b"}]).html
    assert "<h3>a&lt;b</h3>" in page
    # Of two norms 2 over 1 + 3 values the root mean square is sqrt(8 / 4).
    for cell in ("layers.0, step 1: 1.41", "tok_embeddings, step 2: 2", "layers.1, step 2: inf"):
        assert f"<title>{cell}</title>" in page
    assert page.count("#c24d00") == 2 and page.count("<svg") == 3
    # Of activations a place without such a number has no row, and one that is not finite has.
    blocks = TensorFile(tmp_path, ["rms", "max_logit"], ["entry", "layers.0"], [], 0, ACTIVATIONS)
    blocks.write(1, np.array([[1.0, 2.0], [np.nan, 7.5]]))
    blocks.write(2, np.array([[1.0, np.nan], [np.nan, np.nan]]))
    blocks.close()
    page = maps_of([{"run_dir": str(tmp_path), "point": "a"}]).html
    assert page.count("<svg") == 5 and page.count("#c24d00") == 4
    assert page.count("<title>layers.0, step 1: 7.5</title>") == 1
    assert page.count("<title>entry, ") == 2
    assert maps_of([{"run_dir": str(tmp_path / "other"), "point": "without"}]) is None
