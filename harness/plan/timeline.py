"""Simulate a pipeline schedule: start and end of every pass."""

from __future__ import annotations

from collections.abc import Callable

from harness.plan.plan import Action


def simulate(
    order: list[list[Action]], seconds: Callable[[Action], float], send_seconds: float
) -> list[list[Action]]:
    """Compute the times of every pass: it starts when its rank is free and its inputs have arrived.

    For each microbatch, a forward pass needs the forward of the previous stage; a backward pass its own
    forward, and the backward (for inputs) of the next stage; a backward for weights the one for inputs.
    Between ranks, inputs arrive ``send_seconds`` later.

    Args:
        order: passes of each rank, in order.
        seconds: duration of a pass.
        send_seconds: time to send a microbatch's activations to the next stage.

    Raises:
        ValueError: the order cannot run: ranks wait for each other.
    """
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    last = max(rank_of)
    ended: dict[tuple[str, int, int], float] = {}
    timed: list[list[Action]] = [[] for _ in order]
    clocks, positions = [0.0] * len(order), [0] * len(order)
    remaining = sum(map(len, order))
    while remaining:
        before = remaining
        for rank, actions in enumerate(order):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                ready = _ready(action, ended, rank_of, last, send_seconds)
                if ready is None:
                    break
                start = max(clocks[rank], ready)
                end = start + seconds(action)
                timed[rank].append(Action(action.stage, action.kind, action.microbatch, start, end))
                kind = "B" if action.kind == "I" else action.kind
                ended[kind, action.stage, action.microbatch] = clocks[rank] = end
                positions[rank] += 1
                remaining -= 1
        if remaining == before:
            raise ValueError("the schedule deadlocks")
    return timed


def _ready(
    action: Action,
    ended: dict[tuple[str, int, int], float],
    rank_of: dict[int, int],
    last: int,
    send_seconds: float,
) -> float | None:
    """Time at which the inputs of an action are ready; None if that is not known yet."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "W":
        return ended.get(("B", stage, microbatch))
    if action.kind == "F":
        needs = [("F", stage - 1)] if stage else []
    else:
        needs = [("F", stage)] + ([("B", stage + 1)] if stage < last else [])
    ready = 0.0
    for kind, other in needs:
        end = ended.get((kind, other, microbatch))
        if end is None:
            return None
        ready = max(ready, end + (send_seconds if rank_of[other] != rank_of[stage] else 0.0))
    return ready


def sends_of_rank(order: list[list[Action]], rank: int) -> int:
    """Count the activations and gradients that a pipeline rank sends to other ranks.

    Gradients of weights are not sent, and neither are activations between two stages of one rank.
    """
    rank_of = {stage: owner for owner, actions in enumerate(order) for stage in {a.stage for a in actions}}
    steps = {"F": 1, "B": -1, "I": -1}
    receivers = (rank_of.get(a.stage + steps[a.kind], rank) for a in order[rank] if a.kind in steps)
    return sum(receiver != rank for receiver in receivers)
